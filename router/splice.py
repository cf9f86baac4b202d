"""Adds token ids to a JSON body without touching any other byte of it."""

from collections.abc import Iterable

import msgspec

_SPACE = b" \t\r\n"


def with_token_ids(body: bytes, ids: Iterable[int]) -> bytes:
    """The body with `"prompt_token_ids": [...]` as its object's last member.

    Raises ValueError when it is not an object.
    """
    end = len(body.rstrip(_SPACE)) - 1
    if end < 1 or body[end : end + 1] != b"}":
        raise ValueError("the body is not a JSON object")
    empty = body[:end].rstrip(_SPACE).endswith(b"{") and body[:end].strip(_SPACE) == b"{"
    comma = b"" if empty else b","
    return b"".join((body[:end], comma, b'"prompt_token_ids":', msgspec.json.encode(list(ids)), body[end:]))
