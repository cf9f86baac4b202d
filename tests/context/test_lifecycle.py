"""Pausing, resuming and evicting: who waits, who goes first, whose blocks count."""

from __future__ import annotations

import pytest
import torch

from context import (
    BlockOverflowError,
    DynamicInferenceContext,
    DynamicInferenceRequest,
    MaxSequenceLengthOverflowError,
    PrefixCachingEvictionPolicy,
    RequestOverflowError,
    ResumePolicy,
    SamplingParams,
    TokenOverflowError,
)
from context.errors import TensorStateDeallocatedError
from tests.context.engine_model import BLOCK_SIZE, EngineModel, build_context, snapshot

LRU = PrefixCachingEvictionPolicy.LRU


def request(request_id: int, tokens: list[int], generate: int = 8) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id, torch.tensor(tokens), SamplingParams(num_tokens_to_generate=generate),
        block_size_tokens=BLOCK_SIZE, enable_prefix_caching=True,
    )  # fmt: skip


def forward(context: DynamicInferenceContext, tokens: list[int], mask: list[int] | None = None):  # type: ignore[no-untyped-def]
    context.initialize_attention_state()
    context.dynamo_helper.publish_pending_kv_stored_events()
    context.advance_step()
    result = context.update_requests(torch.tensor(mask or [1] * len(tokens)), torch.tensor(tokens))
    context.check_integrity()
    return result


def ids(context: DynamicInferenceContext) -> list[int]:
    return context.request_ids[: context.total_request_count].tolist()


def test_rows_that_get_their_block_at_once_are_not_moved() -> None:
    context = build_context(blocks=12, prefix_caching_eviction_policy=LRU)
    for i, length in enumerate((4, 3, 4)):
        context.add_request(request(i, [i] * length))
    result = forward(context, [0, 0, 0])
    assert ids(context) == [0, 1, 2]
    assert result["newly_paused_request_ids"] is None


def test_the_longest_waiting_resumes_first() -> None:
    context = build_context(blocks=5, paused_blocks=4, prefix_caching_eviction_policy=LRU, max_requests=5)
    for i in range(4):
        context.add_request(request(i, [i] * 4))
    assert forward(context, [0] * 4)["newly_paused_request_ids"].tolist() == [1, 2, 3]
    assert context.paused_request_count == 3
    forward(context, [0], [0])
    assert ids(context)[context.paused_request_count :] == [1, 2], "two blocks came free: the two that waited longest"
    forward(context, [0, 0], [0, 0])
    assert ids(context) == [3]


def test_the_references_policy_resumes_the_newest_first() -> None:
    context = build_context(
        blocks=5, paused_blocks=4, prefix_caching_eviction_policy=LRU, max_requests=5,
        resume_policy=ResumePolicy.REFERENCE,
    )  # fmt: skip
    for i in range(4):
        context.add_request(request(i, [i] * 4))
    forward(context, [0] * 4)
    assert ids(context)[context.paused_request_count :] == [3]


def test_a_paused_request_keeps_its_sampled_token() -> None:
    context = build_context(blocks=3, paused_blocks=2, prefix_caching_eviction_policy=LRU)
    context.add_request(request(0, [0] * 4))
    context.add_request(request(1, [1] * 4))
    forward(context, [7, 9])
    assert context.paused_tokens.tolist() == [9]
    forward(context, [8], [0])
    assert context.token_to_input_ids[: context.active_token_count].tolist() == [9]


def test_a_shared_block_is_releasable_only_with_its_last_reference() -> None:
    context = build_context(blocks=8, paused_blocks=6, prefix_caching_eviction_policy=LRU)
    context.add_request(request(0, [1] * 6))
    context.add_request(request(1, [1] * 4 + [2, 2]))
    assert context._get_releasable_block_counts(0, 2) == [0, 1, 3]
    assert context._get_releasable_block_counts(1, 2) == [0, 1]


def test_shared_blocks_of_paused_rows_count_once_against_the_budget() -> None:
    context = build_context(blocks=5, paused_blocks=3, prefix_caching_eviction_policy=LRU)
    for i in range(3):
        context.add_request(request(i, [1] * 4 + [2 + i] * 4))
    context.state.paused_request_count = 2
    assert context.kv_block_allocator.get_paused_used() == 3
    assert context.kv_block_allocator.get_active_used() == 2
    assert context._get_paused_request_count_within_block_budget() == 2
    context.kv_block_allocator.paused_limit = 2
    assert context._get_paused_request_count_within_block_budget() == 1


def test_a_stand_off_of_a_hidden_chunk_and_a_paused_row_is_broken() -> None:
    context = build_context(
        blocks=4, paused_blocks=2, prefix_caching_eviction_policy=LRU, enable_chunked_prefill=True,
    )  # fmt: skip
    context.add_request(request(0, [0] * 8, generate=4))
    chunked = request(1, [1] * 12, generate=2)
    context.add_request(chunked, 8)
    chunked.advance_chunk(8)
    forward(context, [0, 0])
    assert context.get_active_request_count() == 0
    assert context.paused_request_count == 1
    assert context.check_availability(chunked)[2] is False
    assert context.release_stalled() == [1]
    context.check_integrity()
    assert ids(context) == [0]
    assert context.get_active_request_count() == 1


def test_release_by_row_empties_the_tables() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    context.add_request(request(0, [0] * 9))
    context.release_memory_blocks_from_request_indexes(torch.tensor([0]))
    assert context.kv_block_allocator.get_allocatable_count() == 8
    assert context.request_to_kv_block_ids[0].tolist() == [-1] * context.max_kv_block_count


@pytest.mark.parametrize(
    ("tokens", "generate", "error", "text"),
    [
        ([1] * 18, 15, MaxSequenceLengthOverflowError, "is 33 tokens; the context allows 32"),
        ([1] * 24, 1, TokenOverflowError, "24 tokens of 20"),
        ([1] * 17, 1, BlockOverflowError, "5 blocks are needed and 4"),
    ],
)
def test_a_refusal_names_both_numbers_and_leaves_no_trace(tokens, generate, error, text) -> None:  # type: ignore[no-untyped-def]
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU, max_tokens=20)
    context.kv_block_allocator.allocate_memory_blocks(4)
    before = snapshot(context)
    with pytest.raises(error, match=text):
        context.add_request(request(1, tokens, generate))
    assert snapshot(context) == before


def test_a_full_table_refuses_another_request() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU, max_requests=1)
    context.add_request(request(1, [1] * 3))
    assert context.check_availability(request(2, [1] * 3))[0] is False
    with pytest.raises(RequestOverflowError, match="all 1 request rows"):
        context.add_request(request(2, [1] * 3))


def test_a_deallocated_context_refuses_with_its_own_error() -> None:
    context = build_context(blocks=8)
    context.is_tensor_state_allocated = False
    with pytest.raises(TensorStateDeallocatedError):
        context.add_request(request(1, [1] * 3))


@pytest.mark.parametrize("chunk", [0, -1, 5])
def test_a_chunk_must_lie_within_the_prompt(chunk: int) -> None:
    with pytest.raises(ValueError, match=r"must be in 1\.\.4"):
        build_context(blocks=8).add_request(request(1, [1] * 4), chunk)


def test_one_prompt_at_a_time_is_partly_in() -> None:
    context = build_context(blocks=8, enable_chunked_prefill=True)
    context.add_request(request(1, [1] * 8), 4)
    with pytest.raises(RequestOverflowError, match="request 1 is only partly in"):
        context.add_request(request(2, [2] * 8), 4)
    late = request(3, [3] * 8)
    late.advance_chunk(4)
    with pytest.raises(ValueError, match="chunked request is 1"):
        context.add_request(late, 4)


@pytest.mark.parametrize("where", ["active", "paused", "hidden"])
def test_a_request_can_leave_from_any_region(where: str) -> None:
    context = build_context(
        blocks=7, paused_blocks=5, prefix_caching_eviction_policy=LRU, enable_chunked_prefill=True, max_requests=5
    )
    engine = EngineModel(context)
    for i in range(3):
        engine.submit(i, [i] * 4, 6)
    engine.step()
    if where == "hidden":
        engine.submit(9, [4] * 8, 3)
        engine.step(chunk_limit=4)
    victims = {
        "active": lambda: int(context.request_ids[context.paused_request_count]),
        "paused": lambda: int(context.request_ids[0]),
        "hidden": lambda: context.chunked_prefill_request_id,
    }
    if where == "paused":
        for _ in range(4):
            engine.step()
        assert context.paused_request_count == 2
    if where == "hidden" and context.chunked_prefill_request_id < 0:
        pytest.fail("the chunked prompt was not admitted in part")
    engine.abort(victims[where]())
    engine.run_dry()
    for job in engine.finished.values():
        assert job.generated == job.expected()


def test_dummy_requests_take_no_blocks() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU)
    context.add_dummy_requests_parallel([request(1, [0] * 5), request(2, [0] * 3)])
    context.initialize_attention_state()
    assert context.kv_block_allocator.pool_avail == 8
    assert context.active_token_count == 8
    assert context.num_prefill_requests == 2
    context.reset()
    context.check_integrity()


def test_the_packed_step_never_exceeds_max_tokens() -> None:
    context = build_context(blocks=8, prefix_caching_eviction_policy=LRU, max_tokens=20)
    context.add_request(request(1, [1] * 17))
    context.initialize_attention_state()
    assert context.padded_active_token_count == 20


def test_utilization_counts_shared_blocks_once() -> None:
    context = build_context(blocks=8, paused_blocks=2, prefix_caching_eviction_policy=LRU)
    context.add_request(request(0, [1] * 6))
    context.add_request(request(1, [1] * 4 + [2, 2]))
    assert context.kv_block_allocator.get_active_used() == 3
    assert context.kv_block_allocator.get_paused_used() == 0
    stats = context.get_kvcache_utilization_stats()
    assert stats["total_blocks"] == 8
    assert stats["allocated_blocks"] == stats["active_unique_blocks"] == 3
    assert stats["allocated_utilization"] == 3 / 8
    assert stats["gtd_block_count"] == 6
    assert stats["block_count_avail"] == 5
    assert stats["active_token_count"] == 8
