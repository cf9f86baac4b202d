"""Puts prompts and chunks into the batch: checks everything first, so that a refusal leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from context.errors import (
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)
from context.prefix import PrefixMatch, compute_prefix_match
from context.request import DynamicInferenceRequest

if TYPE_CHECKING:
    from context.dynamic_context import DynamicInferenceContext


def check_availability(context: DynamicInferenceContext, req: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
    """Whether a row, the tokens and the blocks for the whole remaining prompt are available."""
    state = context.state
    match = compute_prefix_match(
        context.kv_block_allocator, req, req.remaining_prompt_length, context.block_size_tokens
    )
    row = state.total_request_count < context.max_requests and state.paused_request_count == 0
    tokens = state.active_token_count + match.effective_prefill_chunk_length <= context.max_tokens
    return row, tokens, _blocks_available(context, match)


def _blocks_available(context: DynamicInferenceContext, match: PrefixMatch) -> bool:
    allocator = context.kv_block_allocator
    refs = allocator.block_ref_counts
    pinned = sum(1 for block in match.matched_block_ids if refs[block] == 0)
    return allocator.is_memory_available(match.num_blocks_from_pool, pinned)


def add_request(
    context: DynamicInferenceContext, req: DynamicInferenceRequest, prefill_chunk_length: int | None
) -> None:
    """See `DynamicInferenceContext.add_request`."""
    context.require_tensor_state(req.request_id)
    remaining = req.remaining_prompt_length
    chunk = remaining if prefill_chunk_length is None else prefill_chunk_length
    if not 0 < chunk <= remaining:
        raise ValueError(
            f"prefill_chunk_length of request {req.request_id} is {chunk}; "
            f"{remaining} prompt tokens remain, so it must be in 1..{remaining}"
        )
    continues = _check_chunk_order(context, req, chunk)
    match = compute_prefix_match(context.kv_block_allocator, req, chunk, context.block_size_tokens)
    _check_room(context, req, chunk, match)
    fresh = _take_blocks(context, req, match)
    _write_row(context, req, chunk, match, fresh, continues=continues)


def _check_chunk_order(context: DynamicInferenceContext, req: DynamicInferenceRequest, chunk: int) -> bool:
    """Whether this is a later chunk of the hidden chunked row.

    Raises:
        ValueError: the context does not hold this prompt's earlier chunks, or holds the request already.
        RequestOverflowError: another prompt is only partly in.
    """
    chunked = context.state.chunked_prefill_request_id
    hidden = chunked >= 0 and context.get_index_of_chunked_prefill_request() < 0
    if req.finished_chunk_token_count:
        if not hidden or chunked != req.request_id:
            raise ValueError(
                f"request {req.request_id} continues after {req.finished_chunk_token_count} tokens, but the context's "
                f"chunked request is {chunked}; add its chunks one a step, from the first"
            )
        return True
    if context.requests.find(req.request_id, context.state.total_request_count) >= 0 or (
        hidden and chunked == req.request_id
    ):
        raise ValueError(f"request {req.request_id} is in the context already; use another request_id")
    if chunked >= 0 and chunk < req.remaining_prompt_length:
        raise RequestOverflowError(
            req.request_id, f"request {chunked} is only partly in, and only one may be at a time: add its chunks first"
        )
    return False


def _check_room(context: DynamicInferenceContext, req: DynamicInferenceRequest, chunk: int, match: PrefixMatch) -> None:
    state = context.state
    hidden = state.chunked_prefill_request_id >= 0 and context.get_index_of_chunked_prefill_request() < 0
    others_hidden = int(hidden and state.chunked_prefill_request_id != req.request_id)
    if state.total_request_count + others_hidden >= context.max_requests:
        raise RequestOverflowError(
            req.request_id, f"all {context.max_requests} request rows are taken; wait for one to finish"
        )
    wanted = state.active_token_count + match.effective_prefill_chunk_length
    if wanted > context.max_tokens:
        raise TokenOverflowError(
            req.request_id,
            f"the step would hold {wanted} tokens of {context.max_tokens}; "
            "wait for the next step or add a smaller chunk",
            is_transient=match.effective_prefill_chunk_length <= context.max_tokens,
        )
    length = req.prompt_length + req.tokens_to_generate
    if length > context.max_sequence_length:
        raise MaxSequenceLengthOverflowError(
            req.request_id,
            f"prompt ({req.prompt_length}) plus generation ({req.tokens_to_generate}) is {length} tokens; "
            f"the context allows {context.max_sequence_length}",
        )
    usable = context.kv_block_allocator.total_count - 1
    if match.overall_required_blocks > usable:
        raise BlockOverflowError(
            req.request_id,
            f"the prompt needs {match.overall_required_blocks} blocks and the pool has {usable}",
            is_transient=False,
        )
    if not _blocks_available(context, match):
        raise BlockOverflowError(
            req.request_id,
            f"{match.num_blocks_from_pool} blocks are needed and "
            f"{context.kv_block_allocator.get_allocatable_count()} can be allocated",
        )


def _take_blocks(context: DynamicInferenceContext, req: DynamicInferenceRequest, match: PrefixMatch) -> np.ndarray:
    """Pin what matched, then allocate the rest; un-pin if that fails."""
    allocator = context.kv_block_allocator
    allocator.retain(match.matched_block_ids)
    fresh = allocator.allocate_memory_blocks(match.num_blocks_from_pool)
    if fresh is None:
        allocator.release_memory_blocks(match.matched_block_ids)
        raise BlockOverflowError(req.request_id, f"{match.num_blocks_from_pool} blocks can't be allocated")
    return fresh


def _write_row(
    context: DynamicInferenceContext,
    req: DynamicInferenceRequest,
    chunk: int,
    match: PrefixMatch,
    fresh: np.ndarray,
    *,
    continues: bool,
) -> None:
    state, requests, bs = context.state, context.requests, context.block_size_tokens
    if not continues:
        _make_way_for_new_row(context)
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
    _register_completed(context, req, row, end, match)
    _write_tokens(context, req, row, end)
    state.active_token_count += match.effective_prefill_chunk_length
    state.total_request_count += 1
    state.num_prefill_requests += 1
    if end < req.prompt_length:
        state.chunked_prefill_request_id = req.request_id
    elif state.chunked_prefill_request_id == req.request_id:
        state.chunked_prefill_request_id = -1
    _count(context, req, match)


def _make_way_for_new_row(context: DynamicInferenceContext) -> None:
    """A hidden chunked row stands right of the active ones; move it one further."""
    state = context.state
    if state.chunked_prefill_request_id >= 0 and context.get_index_of_chunked_prefill_request() < 0:
        here = np.array([state.total_request_count], dtype=np.intp)
        context.requests.move(here, here + 1)


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
    context: DynamicInferenceContext, req: DynamicInferenceRequest, row: int, end: int, match: PrefixMatch
) -> None:
    """Register the blocks that this chunk completes: the partial one of an earlier chunk, and the fresh ones."""
    if not req.precomputed_block_hashes:
        return
    bs, requests = context.block_size_tokens, context.requests
    complete, already = end // bs, match.already_allocated_blocks
    partial_end = min(already, complete)
    for index in range(req.finished_chunk_token_count // bs, partial_end):
        context.registrar.adopt_carried_block(requests, row, index, req.precomputed_block_hashes[index])
    blocks = requests.block_table[row]
    context.registrar.register_prompt(req, blocks, req.finished_chunk_token_count // bs, partial_end)
    context.registrar.register_prompt(req, blocks, already + len(match.matched_block_ids), complete)


def _write_tokens(context: DynamicInferenceContext, req: DynamicInferenceRequest, row: int, end: int) -> None:
    start, first = context.state.active_token_count, int(context.requests.kv_offsets[row])
    tokens = req.prompt[first:end]
    context.tokens.write_prefill(start, row, tokens, first, context.requests.block_table[row])
    span = slice(start, start + len(tokens))
    context.registrar.note_tokens(context.tokens.block_idx[span], context.tokens.local_positions[span], tokens)


def _count(context: DynamicInferenceContext, req: DynamicInferenceRequest, match: PrefixMatch) -> None:
    counters, matched = context.counters, len(match.matched_block_ids)
    counters.lifetime_prefill_token_count += match.effective_prefill_chunk_length
    counters.prefix_cache_prefill_computed_tokens += match.effective_prefill_chunk_length
    counters.prefix_cache_prefill_skipped_tokens += match.prefix_skip_tokens
    counters.prefix_cache_hits += matched > 0
    counters.prefix_cache_blocks_matched += matched
    req.num_cached_tokens += matched * context.block_size_tokens
    req.num_skipped_tokens += match.prefix_skip_tokens


def add_dummy_requests(
    context: DynamicInferenceContext, requests: Sequence[DynamicInferenceRequest], *, count_as_prefill: bool
) -> None:
    """See `DynamicInferenceContext.add_dummy_requests_parallel`."""
    state, table, bs = context.state, context.requests, context.block_size_tokens
    if state.total_request_count + len(requests) > context.max_requests:
        raise RequestOverflowError(
            None, f"{len(requests)} dummy requests do not fit {context.max_requests} request rows"
        )
    wanted = state.active_token_count + sum(req.remaining_prompt_length for req in requests)
    if wanted > context.max_tokens:
        raise TokenOverflowError(None, f"the dummy step would hold {wanted} tokens of {context.max_tokens}")
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
        table.block_table[row, :blocks] = context.kv_block_allocator.dummy_block_idx
        table.kv_offsets[row] = 0
        table.block_counts[row] = blocks
        table.last_blocks[row] = context.kv_block_allocator.dummy_block_idx
        table.last_offsets[row] = (length - 1) % bs
        context.tokens.write_prefill(state.active_token_count, row, req.prompt[-length:], 0, table.block_table[row])
        state.active_token_count += length
        state.total_request_count += 1
        state.num_prefill_requests += int(count_as_prefill)
