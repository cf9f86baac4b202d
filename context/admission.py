"""Puts prompts and chunks into the batch: checks everything first, so that a refusal leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from context.errors import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)
from context.parts import ContextParts
from context.prefix import PrefixMatch, compute_prefix_match
from context.request import DynamicInferenceRequest


def check_availability(parts: ContextParts, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
    """Whether a row, the tokens and the blocks for the whole remaining prompt are available."""
    state = parts.state
    match = compute_prefix_match(parts.allocator, req, req.remaining_prompt_length, parts.block_size)
    row = state.total_request_count < parts.sizes.max_requests and state.paused_request_count == 0
    tokens = state.active_token_count + match.effective_prefill_chunk_length <= parts.sizes.max_tokens
    return row, tokens, _blocks_available(parts, match)


def _blocks_available(parts: ContextParts, match: PrefixMatch) -> bool:
    allocator = parts.allocator
    refs = allocator.block_ref_counts
    pinned = sum(1 for block in match.matched_block_ids if refs[block] == 0)
    return allocator.is_memory_available(match.num_blocks_from_pool, pinned)


def add_request(parts: ContextParts, req: DynamicInferenceRequest, prefill_chunk_length: int | None) -> None:
    """See `DynamicInferenceContext.add_request`."""
    remaining = req.remaining_prompt_length
    chunk = remaining if prefill_chunk_length is None else prefill_chunk_length
    if not 0 < chunk <= remaining:
        raise ValueError(
            f"prefill_chunk_length of request {req.request_id} is {chunk}; "
            f"{remaining} prompt tokens remain, so it must be in 1..{remaining}"
        )
    continues = _check_chunk_order(parts, req, chunk)
    match = compute_prefix_match(parts.allocator, req, chunk, parts.block_size)
    _check_room(parts, req, chunk, match)
    fresh = _take_blocks(parts, req, match)
    _write_row(parts, req, chunk, match, fresh, continues=continues)


def _check_chunk_order(parts: ContextParts, req: DynamicInferenceRequest, chunk: int) -> bool:
    """Whether this is a later chunk of the hidden chunked row.

    Raises:
        ValueError: the context does not hold this prompt's earlier chunks, or holds the request already.
        RequestOverflowError: another prompt is only partly in.
    """
    chunked = parts.state.chunked_prefill_request_id
    hidden = parts.has_hidden_chunk
    if req.finished_chunk_token_count:
        if not hidden or chunked != req.request_id:
            raise ValueError(
                f"request {req.request_id} continues after {req.finished_chunk_token_count} tokens, but the context's "
                f"chunked request is {chunked}; add its chunks one a step, from the first"
            )
        return True
    if parts.requests.find(req.request_id, parts.state.total_request_count) >= 0 or (
        hidden and chunked == req.request_id
    ):
        raise ValueError(f"request {req.request_id} is in the context already; use another request_id")
    if chunked >= 0 and chunk < req.remaining_prompt_length:
        raise RequestOverflowError(
            req.request_id, f"request {chunked} is only partly in, and only one may be at a time: add its chunks first"
        )
    return False


def _check_room(parts: ContextParts, req: DynamicInferenceRequest, chunk: int, match: PrefixMatch) -> None:
    state = parts.state
    hidden = parts.has_hidden_chunk
    others_hidden = int(hidden and state.chunked_prefill_request_id != req.request_id)
    if state.total_request_count + others_hidden >= parts.sizes.max_requests:
        raise RequestOverflowError(
            req.request_id, f"all {parts.sizes.max_requests} request rows are taken; wait for one to finish"
        )
    wanted = state.active_token_count + match.effective_prefill_chunk_length
    if wanted > parts.sizes.max_tokens:
        raise TokenOverflowError(
            req.request_id,
            f"the step would hold {wanted} tokens of {parts.sizes.max_tokens}; "
            "wait for the next step or add a smaller chunk",
            is_transient=match.effective_prefill_chunk_length <= parts.sizes.max_tokens,
        )
    length = req.prompt_length + req.tokens_to_generate
    if length > parts.max_sequence_length:
        raise MaxSequenceLengthOverflowError(
            req.request_id,
            f"prompt ({req.prompt_length}) plus generation ({req.tokens_to_generate}) is {length} tokens; "
            f"the context allows {parts.max_sequence_length}",
        )
    usable = parts.allocator.total_count - 1
    if match.overall_required_blocks > usable:
        raise BlockOverflowError(
            req.request_id,
            f"the prompt needs {match.overall_required_blocks} blocks and the pool has {usable}",
            is_transient=False,
        )
    if not _blocks_available(parts, match):
        raise BlockOverflowError(
            req.request_id,
            f"{match.num_blocks_from_pool} blocks are needed and "
            f"{parts.allocator.get_allocatable_count()} can be allocated",
        )


def _take_blocks(parts: ContextParts, req: DynamicInferenceRequest, match: PrefixMatch) -> np.ndarray:
    """Pin what matched, then allocate the rest; un-pin if that fails."""
    allocator = parts.allocator
    allocator.retain(match.matched_block_ids)
    fresh = allocator.allocate_memory_blocks(match.num_blocks_from_pool)
    if fresh is None:
        allocator.release_memory_blocks(match.matched_block_ids)
        raise BlockOverflowError(req.request_id, f"{match.num_blocks_from_pool} blocks can't be allocated")
    return fresh


def _write_row(
    parts: ContextParts,
    req: DynamicInferenceRequest,
    chunk: int,
    match: PrefixMatch,
    fresh: np.ndarray,
    *,
    continues: bool,
) -> None:
    state, requests, bs = parts.state, parts.requests, parts.block_size
    if not continues:
        _make_way_for_new_row(parts)
    row, finished = state.total_request_count, req.finished_chunk_token_count
    end, already = finished + chunk, match.already_allocated_blocks
    matched = len(match.matched_block_ids)
    requests.ids[row] = req.request_id
    requests.set_metadata(row, _metadata_of(req))
    requests.hashable[row] = req.is_hashable
    requests.query_lengths[row] = match.effective_prefill_chunk_length
    requests.in_prefill[row] = 1
    requests.output_lengths[row] = end + req.tokens_to_generate
    if not continues:
        requests.block_table[row] = -1
    requests.block_table[row, already : already + matched] = match.matched_block_ids
    requests.block_table[row, already + matched : match.overall_required_blocks] = fresh
    requests.kv_offsets[row] = finished + match.prefix_skip_tokens
    requests.block_counts[row] = match.overall_required_blocks
    requests.last_offsets[row] = (end - 1) % bs
    requests.last_blocks[row] = requests.block_table[row, match.overall_required_blocks - 1]
    _register_completed(parts, req, row, end, match)
    _write_tokens(parts, req, row, end)
    state.active_token_count += match.effective_prefill_chunk_length
    state.total_request_count += 1
    state.num_prefill_requests += 1
    if end < req.prompt_length:
        state.chunked_prefill_request_id = req.request_id
    elif state.chunked_prefill_request_id == req.request_id:
        state.chunked_prefill_request_id = -1
    _count(parts, req, match)


def _make_way_for_new_row(parts: ContextParts) -> None:
    """A hidden chunked row stands right of the active ones; move it one further."""
    state = parts.state
    if parts.has_hidden_chunk:
        here = np.array([state.total_request_count], dtype=np.intp)
        parts.requests.move(here, here + 1)


def _metadata_of(req: DynamicInferenceRequest) -> dict[str, object]:
    values: dict[str, object] = {
        name: getattr(req.sampling_params, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "return_log_probs",
            "skip_prompt_log_probs",
            "top_n_logprobs",
        )
    }
    termination = req.sampling_params.termination_id
    values["termination_id"] = -1 if termination is None else termination
    return values | req.metadata


def _register_completed(
    parts: ContextParts, req: DynamicInferenceRequest, row: int, end: int, match: PrefixMatch
) -> None:
    """Register the blocks that this chunk completes: the partial one of an earlier chunk, and the fresh ones."""
    if not req.precomputed_block_hashes:
        return
    bs, requests = parts.block_size, parts.requests
    complete, already = end // bs, match.already_allocated_blocks
    partial_end = min(already, complete)
    for index in range(req.finished_chunk_token_count // bs, partial_end):
        parts.registrar.adopt_carried_block(requests, row, index, req.precomputed_block_hashes[index])
    blocks = requests.block_table[row]
    parts.registrar.register_prompt(req, blocks, req.finished_chunk_token_count // bs, partial_end)
    parts.registrar.register_prompt(req, blocks, already + len(match.matched_block_ids), complete)


def _write_tokens(parts: ContextParts, req: DynamicInferenceRequest, row: int, end: int) -> None:
    start, first = parts.state.active_token_count, int(parts.requests.kv_offsets[row])
    tokens = req.prompt[first:end]
    parts.tokens.write_prefill(start, row, tokens, first, parts.requests.block_table[row])
    span = slice(start, start + len(tokens))
    parts.registrar.note_tokens(parts.tokens.block_idx[span], parts.tokens.local_positions[span], tokens)


def _count(parts: ContextParts, req: DynamicInferenceRequest, match: PrefixMatch) -> None:
    counters, matched = parts.counters, len(match.matched_block_ids)
    counters.lifetime_prefill_token_count += match.effective_prefill_chunk_length
    counters.prefix_cache_prefill_computed_tokens += match.effective_prefill_chunk_length
    counters.prefix_cache_prefill_skipped_tokens += match.prefix_skip_tokens
    counters.prefix_cache_hits += matched > 0
    counters.prefix_cache_blocks_matched += matched
    req.num_cached_tokens += matched * parts.block_size
    req.num_skipped_tokens += match.prefix_skip_tokens


def add_dummy_requests(
    parts: ContextParts, requests: Sequence[DynamicInferenceRequest], *, count_as_prefill: bool
) -> None:
    """See `DynamicInferenceContext.add_dummy_requests_parallel`."""
    state, table, bs = parts.state, parts.requests, parts.block_size
    if state.total_request_count + len(requests) > parts.sizes.max_requests:
        raise RequestOverflowError(
            None, f"{len(requests)} dummy requests do not fit {parts.sizes.max_requests} request rows"
        )
    wanted = state.active_token_count + sum(req.remaining_prompt_length for req in requests)
    if wanted > parts.sizes.max_tokens:
        raise TokenOverflowError(None, f"the dummy step would hold {wanted} tokens of {parts.sizes.max_tokens}")
    for req in requests:
        row, length = state.total_request_count, req.remaining_prompt_length
        blocks = -(-length // bs)
        table.ids[row] = req.request_id
        table.set_metadata(row, _metadata_of(req))
        table.hashable[row] = False
        table.query_lengths[row] = length
        table.in_prefill[row] = int(count_as_prefill)
        table.output_lengths[row] = length + req.tokens_to_generate
        table.block_table[row] = -1
        table.block_table[row, :blocks] = parts.allocator.dummy_block_idx
        table.kv_offsets[row] = 0
        table.block_counts[row] = blocks
        table.last_blocks[row] = parts.allocator.dummy_block_idx
        table.last_offsets[row] = (length - 1) % bs
        parts.tokens.write_prefill(state.active_token_count, row, req.prompt[-length:], 0, table.block_table[row])
        state.active_token_count += length
        state.total_request_count += 1
        state.num_prefill_requests += int(count_as_prefill)
