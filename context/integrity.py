"""The context's invariants as code (spec: context core, section 14)."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from context.block_allocator import UNREGISTERED
from context.parts import ContextParts


def check_context_integrity(parts: ContextParts) -> None:
    """Assert every invariant; O(pool size + tokens).

    Raises:
        AssertionError: which invariant broke.
    """
    parts.allocator.check_integrity()
    _check_counts(parts)
    _check_rows(parts)
    _check_tokens(parts)
    _check_references(parts)
    _check_announcements(parts)


def _rows_in_use(parts: ContextParts) -> list[int]:
    """Rows [0, total), and the hidden chunked row."""
    rows = list(range(parts.state.total_request_count))
    if parts.has_hidden_chunk:
        hidden = parts.chunked_row(among_hidden=True)
        assert hidden == parts.state.total_request_count, f"the hidden chunked row stands at {hidden}"
        rows.append(hidden)
    return rows


def _check_counts(parts: ContextParts) -> None:
    state = parts.state
    paused, total = state.paused_request_count, state.total_request_count
    assert 0 <= paused <= total <= parts.sizes.max_requests, f"counts are {paused} paused of {total}"
    assert state.active_token_count <= parts.sizes.max_tokens, "more tokens than the step may hold"
    waiting = 0 if state.paused_tokens is None else len(state.paused_tokens)
    assert waiting == paused, f"{waiting} paused tokens for {paused} paused rows"
    prefilling = int((parts.requests.in_prefill[paused:total] == 1).sum())
    assert prefilling == state.num_prefill_requests, "num_prefill_requests is wrong"
    ids = parts.requests.ids[: len(_rows_in_use(parts))].tolist()
    assert len(set(ids)) == len(ids), f"a request has two rows: {ids}"


def _check_rows(parts: ContextParts) -> None:
    requests, bs = parts.requests, parts.block_size
    for row in _rows_in_use(parts):
        count = int(requests.block_counts[row])
        table = requests.block_table[row]
        assert (table[:count] >= 0).all(), f"the block table of row {row} has a hole"
        assert (table[count:] == -1).all(), f"the block table of row {row} goes on behind its {count} blocks"
        assert requests.last_blocks[row] == table[count - 1], f"last block of row {row} is wrong"
        length = int(requests.kv_offsets[row] + requests.query_lengths[row])
        expected = (count - 1) * bs + int(requests.last_offsets[row]) + 1
        assert length == expected, f"row {row} holds {length} tokens, its blocks say {expected}"
    free = requests.block_table[len(_rows_in_use(parts)) :]
    assert (free == -1).all(), "a free row holds blocks"


def _check_tokens(parts: ContextParts) -> None:
    state, requests, tokens = parts.state, parts.requests, parts.tokens
    paused, total, count = state.paused_request_count, state.total_request_count, state.active_token_count
    query = requests.query_lengths[paused:total]
    assert int(query.sum()) == count, f"rows run {int(query.sum())} tokens, the step holds {count}"
    rows = np.repeat(np.arange(paused, total), query)
    assert np.array_equal(tokens.rows[:count], rows), "tokens are not packed in row order"
    starts = np.repeat(np.cumsum(query) - query, query)
    positions = requests.kv_offsets[rows] + (np.arange(count) - starts)
    assert np.array_equal(tokens.positions[:count], positions), "token positions are wrong"
    assert np.array_equal(tokens.pos_ids[:count], positions), "position ids are wrong"
    bs = parts.block_size
    assert np.array_equal(tokens.local_positions[:count], positions % bs), "positions inside blocks are wrong"
    assert np.array_equal(tokens.block_idx[:count], requests.block_table[rows, positions // bs]), (
        "tokens go to blocks that are not their row's"
    )


def _check_references(parts: ContextParts) -> None:
    allocator = parts.allocator
    held = Counter(parts.requests.block_table[parts.requests.block_table >= 0].tolist())
    held.pop(allocator.dummy_block_idx, None)
    if not allocator.enable_prefix_caching:
        assert all(count == 1 for count in held.values()), "a block is in two rows without prefix caching"
        assert len(held) == allocator.get_total_used(), "blocks are lost"
        return
    refs = allocator.block_ref_counts.numpy()
    for block in np.flatnonzero(refs).tolist() + list(held):
        assert refs[block] == held[block], f"block {block} has {refs[block]} references and {held[block]} holders"
    for row in _rows_in_use(parts):
        blocks = parts.requests.blocks_of(row)
        registered = allocator.block_hashes.numpy()[blocks] != UNREGISTERED
        chain = blocks[: int(registered.sum())].tolist()
        for parent, child in itertools.pairwise(chain):
            assert allocator.block_parents[child] == parent, f"row {row} does not hold the chain it is registered in"


def _check_announcements(parts: ContextParts) -> None:
    """Once nothing is pending, what listeners were told is what is registered."""
    helper = parts.helper
    if not helper.has_kv_event_listeners or helper.has_pending:
        return
    registered = set(parts.allocator.kv_hash_to_block_id)
    assert helper.announced_hashes == registered, "announced blocks differ from registered ones"
