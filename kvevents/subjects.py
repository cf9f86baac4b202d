"""The names of NATS subjects; every token is encoded so that '.', ' ', '*', '>' and non-ASCII are safe."""

from __future__ import annotations

import re

from kvevents.types import SourceId

EVENTS_ALL = "kv.v1.events.>"
BEATS_ALL = "kv.v1.beat.*"

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")


def encode_token(text: str) -> str:
    """Write text as one subject token: letters, digits, '-' and '_' stay, other bytes become =XX; "" becomes "=".

    Reversible by `decode_token`, and equal only for equal texts.
    """
    if not text:
        return "="
    return _UNSAFE.sub(lambda found: "".join(f"={byte:02X}" for byte in found[0].encode()), text)


def decode_token(token: str) -> str:
    """Undo `encode_token`.

    Raises:
        ValueError: not an encoded token.
    """
    if token == "=":
        return ""
    data = bytearray()
    at = 0
    while at < len(token):
        if token[at] == "=":
            escape = _ESCAPE.match(token, at)
            if not escape:
                raise ValueError(f"subject token {token!r} has a bad escape at {at}")
            data.append(int(escape[1], 16))
            at = escape.end()
        else:
            if _UNSAFE.match(token[at]):
                raise ValueError(f"subject token {token!r} has an unescaped {token[at]!r}")
            data.append(ord(token[at]))
            at += 1
    return data.decode()


def events_subject(model: str, source: SourceId) -> str:
    return f"kv.v1.events.{encode_token(model)}.{encode_token(source.worker)}.{source.dp_rank}"


def beat_subject(worker: str) -> str:
    return f"kv.v1.beat.{encode_token(worker)}"


def control_subject(source: SourceId) -> str:
    return f"kv.v1.control.{encode_token(source.worker)}.{source.dp_rank}"


def parse_events_subject(subject: str) -> tuple[str, SourceId]:
    """The model and source that an event subject names.

    Raises:
        ValueError: not an event subject.
    """
    tokens = subject.split(".")
    if len(tokens) != 6 or tokens[:3] != ["kv", "v1", "events"] or not tokens[5].isdecimal():
        raise ValueError(f"{subject!r} is not kv.v1.events.<model>.<worker>.<rank>")
    return decode_token(tokens[3]), SourceId(decode_token(tokens[4]), int(tokens[5]))
