"""Takes rows out between steps (an aborted request, a failed forward); the others keep their order and tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from context.parts import ContextParts


def remove_rows(parts: ContextParts, rows: NDArray[np.intp], *, include_hidden: bool) -> list[int]:
    """Release rows of [0, total), and the hidden chunked row if asked; return their ids in row order."""
    state, requests = parts.state, parts.requests
    paused, total = state.paused_request_count, state.total_request_count
    hidden = parts.has_hidden_chunk
    ids = requests.ids[rows].tolist()
    leaving = np.zeros(total + int(hidden), dtype=bool)
    leaving[rows] = True
    if hidden and include_hidden:
        leaving[total] = True
        ids.append(state.chunked_prefill_request_id)
    if not leaving.any():
        return []
    parts.lifecycle.release_rows(np.flatnonzero(leaving))
    staying = np.flatnonzero(~leaving)
    _compress_tokens(parts, leaving[:total])
    requests.reorder(0, staying)
    requests.clear_blocks(np.arange(len(staying), len(leaving)))
    if state.paused_tokens is not None:
        state.paused_tokens = state.paused_tokens[~leaving[:paused]]
    gone = leaving[paused:total]
    prefilling = requests.in_prefill
    state.paused_request_count = paused - int(leaving[:paused].sum())
    state.total_request_count = total - int(leaving[:total].sum())
    if len(gone):
        active = slice(state.paused_request_count, state.total_request_count)
        state.num_prefill_requests = int((prefilling[active] == 1).sum())
    if state.chunked_prefill_request_id in ids:
        state.chunked_prefill_request_id = -1
    if not state.paused_request_count:
        state.paused_tokens = None
    return ids


def _compress_tokens(parts: ContextParts, leaving: NDArray[np.bool_]) -> None:
    """Take the tokens of leaving rows out of the packed step, and renumber the rows of the others."""
    state, tokens = parts.state, parts.tokens
    rows = tokens.rows[: state.active_token_count]
    keep = ~leaving[rows]
    new_row = np.cumsum(~leaving) - 1
    renumbered = new_row[rows[keep]]
    for column in tokens.columns:
        kept = column[: state.active_token_count][keep]
        column[: len(kept)] = kept
    tokens.rows[: len(renumbered)] = renumbered
    state.active_token_count = len(renumbered)
