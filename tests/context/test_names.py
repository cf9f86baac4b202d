"""Every name of the reference's documented API is where someone who knows it looks for it."""

from __future__ import annotations

import pytest
import torch

import context as package
from context import DynamicInferenceRequest, SamplingParams
from tests.context.engine_model import build_context

METHODS = [
    "_allocate_memory_buffer",
    "_allocate_mamba_states",
    "initialize_all_tensors",
    "reinitialize_inference_state_buffers",
    "deallocate_inference_state_buffers",
    "round_up_tokens",
    "round_up_requests",
    "is_static_batching",
    "is_decode_only",
    "using_cuda_graph_this_step",
    "has_unfinished_requests",
    "cu_query_lengths",
    "cu_kv_lengths",
    "get_active_sequence_lengths",
    "get_max_sequence_lengths",
    "get_active_request_count",
    "build_active_slices",
    "pad_active_slices",
    "append_key_value_cache",
    "key_value_cache",
    "mamba_states_cache",
    "_allocate_mamba_cache",
    "apply_fused_qk_rotary_emb",
    "apply_rotary_emb_query",
    "apply_rotary_emb_key",
    "set_ep_zmq_communicator",
    "reset_attention_state",
    "reset_mamba_state",
    "add_dummy_requests_parallel",
    "add_dummy_requests_for_cudagraph_capture",
    "add_dummy_requests_for_expert_parallel_step",
    "initialize_attention_state",
    "_execute_pending_mamba_ops",
    "transfer_bookkeeping_to_gpu",
    "copy_async_sched_sample_to_forward",
    "reset_tensors",
    "reset_metadata",
    "reset",
    "current_input_and_position_ids",
    "speculative_required_logit_indices",
    "last_token_logits",
    "_find_mamba_match_count",
    "_compute_prefix_match",
    "check_availability",
    "_find_kv_match_count",
    "add_request",
    "_move_book_keeping_tensors",
    "_swap_book_keeping_tensors",
    "get_index_of_chunked_prefill_request",
    "is_chunked_prefill_enabled",
    "release_memory_blocks_from_request_indexes",
    "_get_paused_request_count_within_block_budget",
    "_get_releasable_block_counts",
    "resume_paused_requests",
    "evict_overflow_paused_requests",
    "_get_async_sched_rows_requiring_new_block",
    "can_prepare_requests",
    "prepare_requests",
    "commit_sampled_tokens",
    "resolve_requests",
    "update_requests",
    "calculate_log_probs_tensors",
    "calculate_log_probs",
    "_processed_log_probs",
    "get_kvcache_utilization_stats",
]

ATTRIBUTES = [
    "DEFAULT_MAX_TOKENS",
    "TOKEN_ROUNDER",
    "REQUEST_ROUNDER",
    "TMS_TAG",
    "num_decode_requests",
    "num_last_token_logits",
    "request_ids",
    "request_query_lengths",
    "request_in_prefill_status_tensor",
    "request_output_lengths",
    "request_kv_length_offsets",
    "request_kv_block_counts",
    "request_last_kv_block_id",
    "request_last_kv_block_offset",
    "request_to_kv_block_ids",
    "request_metadata",
    "token_to_input_ids",
    "token_to_pos_ids",
    "token_to_block_idx",
    "token_to_local_position_within_kv_block",
    "token_to_request_idx",
    "token_to_position_in_request",
    "total_request_count",
    "paused_request_count",
    "active_token_count",
    "num_prefill_requests",
    "chunked_prefill_request_id",
    "paused_tokens",
    "step_count",
    "prefix_cache_lru_clock",
    "lifetime_prefill_token_count",
    "prefix_cache_hits",
    "prefix_cache_blocks_matched",
    "prefix_cache_prefill_computed_tokens",
    "prefix_cache_prefill_skipped_tokens",
    "is_tensor_state_allocated",
    "kv_block_allocator",
    "dynamo_helper",
    "max_requests",
    "max_tokens",
    "max_kv_block_count",
    "block_size_tokens",
    "memory_buffer",
]

EXPORTS = [
    "DynamicInferenceContext",
    "DynamoHelper",
    "KVEventListener",
    "KVBlockAllocator",
    "TransformerConfig",
    "InferenceConfig",
    "DynamicInferenceRequest",
    "SamplingParams",
    "compute_block_hashes_batched",
    "PrefixCachingEvictionPolicy",
    "KVCacheManagementMode",
    "ContextOverflowError",
    "RequestOverflowError",
    "TokenOverflowError",
    "MaxSequenceLengthOverflowError",
    "BlockOverflowError",
    "ActiveRequestCountOverflowError",
    "TensorStateDeallocatedError",
    "ContextErrorFactory",
    "get_mem_size_str",
]


@pytest.mark.parametrize("name", EXPORTS)
def test_the_package_exports_the_name(name: str) -> None:
    assert hasattr(package, name)


def test_the_context_has_every_method_and_attribute() -> None:
    context = build_context(blocks=4)
    assert [name for name in METHODS if not callable(getattr(context, name, None))] == []
    assert [name for name in ATTRIBUTES if not hasattr(context, name)] == []


@pytest.mark.parametrize(
    ("call", "feature"),
    [
        ("mamba_states_cache", "Mamba"),
        ("speculative_required_logit_indices", "speculative"),
        ("set_ep_zmq_communicator", "expert"),
        ("prepare_requests", "async"),
        ("deallocate_inference_state_buffers", "suspend"),
        ("apply_rotary_emb_key", "rotary"),
        ("add_dummy_requests_for_cudagraph_capture", "CUDA graphs"),
    ],
)
def test_an_unsupported_method_names_its_feature(call: str, feature: str) -> None:
    with pytest.raises(NotImplementedError, match=feature):
        getattr(build_context(blocks=4), call)(1)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"construct_graph_dimensions": (1, 1, 0)}, "CUDA graphs"),
        ({"is_expert_parallel_dummy_cuda_graph_step": True}, "expert"),
        ({"transfer_bookkeeping_to_gpu": False}, "async"),
        ({"record_bookkeeping_done_event": True}, "async"),
    ],
)
def test_unsupported_arguments_of_a_step_name_their_feature(arguments: dict, feature: str) -> None:
    with pytest.raises(NotImplementedError, match=feature):
        build_context(blocks=4).initialize_attention_state(**arguments)


def test_rows_move_and_swap_with_their_next_tokens() -> None:
    context = build_context(blocks=8)
    for i in range(3):
        prompt = torch.full((2 + i,), i)
        context.add_request(
            DynamicInferenceRequest(i, prompt, SamplingParams(num_tokens_to_generate=1), block_size_tokens=4)
        )
    tokens = torch.tensor([10, 11, 12])
    context._swap_book_keeping_tensors(torch.tensor([0]), torch.tensor([2]), tokens)
    assert context.request_ids[:3].tolist() == [2, 1, 0]
    assert tokens.tolist() == [12, 11, 10]
    context._move_book_keeping_tensors(torch.tensor([2]), torch.tensor([1]), tokens)
    assert context.request_ids[:3].tolist() == [2, 0, 0]
    assert tokens.tolist() == [12, 10, 10]
