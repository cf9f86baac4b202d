"""How far a step's batch is padded."""

from __future__ import annotations

from typing import NamedTuple


class InferenceBatchDimensions(NamedTuple):
    """Tokens, prefill rows and decode rows of one step."""

    token_count: int
    prefill_req_count: int
    decode_req_count: int

    @property
    def req_count(self) -> int:
        return self.prefill_req_count + self.decode_req_count


def pad_dimensions(
    real: InferenceBatchDimensions,
    *,
    max_tokens: int,
    max_requests: int,
    rounded_tokens: int,
    rounded_requests: int,
) -> InferenceBatchDimensions:
    """Pad a step without graphs (spec: context core, section 7); never beyond max_tokens.

    A decode-only step has as many padded rows as tokens; otherwise the extra rows count as prefill.
    """
    if real.prefill_req_count == 0:
        padded = min(max_tokens, max_requests, rounded_tokens)
        return InferenceBatchDimensions(padded, 0, padded)
    requests = min(max_requests, rounded_requests)
    return InferenceBatchDimensions(
        min(max_tokens, rounded_tokens), requests - real.decode_req_count, real.decode_req_count
    )
