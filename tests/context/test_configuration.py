"""Sizes derived from the configuration, and combinations that are refused with both numbers."""

from __future__ import annotations

import pytest
import torch

from context import DynamicInferenceContext, InferenceConfig, KVCacheManagementMode, TransformerConfig
from context.config import derive_sizes

MODEL = TransformerConfig(num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=16)
# 4 bytes x 2 x 3 layers x 8 tokens x 2 heads x 16
BLOCK_BYTES = 4 * 2 * 3 * 8 * 2 * 16


def sizes(model: TransformerConfig = MODEL, **settings):  # type: ignore[no-untyped-def]
    blocks = settings.pop("blocks", 64)
    values = {"max_sequence_length": 100, "buffer_size_gb": blocks * BLOCK_BYTES / 1024**3, "block_size_tokens": 8}
    return derive_sizes(model, InferenceConfig(**(values | settings)), default_max_tokens=16384, request_rounder=4)


def test_block_bytes_and_pool_size_follow_the_models_shape() -> None:
    derived = sizes()
    assert derived.block_bytes == BLOCK_BYTES
    assert derived.pool_size == 64
    assert derived.max_kv_block_count == 13


def test_a_buffer_smaller_than_two_blocks_still_has_two() -> None:
    assert sizes(blocks=1).pool_size == 2


def test_requests_default_to_the_pool_rounded_down_to_the_rounder() -> None:
    assert sizes().max_requests == 60
    assert sizes(max_requests=7).max_requests == 7


def test_tokens_default_to_the_reference_and_are_never_below_the_requests() -> None:
    assert sizes().max_tokens == 16384
    with pytest.raises(ValueError, match=r"max_tokens \(8\).*max_requests \(16\)"):
        sizes(max_requests=16, max_tokens=8)


def test_requests_must_divide_by_the_tensor_parallel_size() -> None:
    model = TransformerConfig(
        num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=16,
        tensor_model_parallel_size=2,
    )  # fmt: skip
    assert sizes(model).block_bytes == BLOCK_BYTES // 2
    with pytest.raises(ValueError, match=r"max_requests \(7\).*\(2\)"):
        sizes(model, max_requests=7)


def test_the_paused_budget_must_leave_a_block() -> None:
    assert sizes(paused_buffer_size_gb=10 * BLOCK_BYTES / 1024**3).paused_limit == 10
    with pytest.raises(ValueError, match=r"63 blocks.*62 at most"):
        sizes(paused_buffer_size_gb=63 * BLOCK_BYTES / 1024**3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size_tokens", 0), ("max_sequence_length", -1), ("max_requests", 0), ("max_tokens", 0),
     ("buffer_size_gb", 0), ("paused_buffer_size_gb", -1.0)],
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        InferenceConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"num_speculative_tokens": 2}, "speculative"),
        ({"unified_memory_level": 1}, "unified memory"),
        ({"kv_cache_management_mode": KVCacheManagementMode.OFFLOAD}, "suspend"),
        ({"mamba_inference_state_config": object()}, "Mamba"),
        ({"num_cuda_graphs": 4}, "CUDA graphs"),
        ({"use_flashinfer_fused_rope": True}, "rotary"),
        ({"async_scheduling": True}, "async scheduling"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(settings: dict, feature: str) -> None:
    with pytest.raises(NotImplementedError, match=feature):
        InferenceConfig(**settings)


def test_rounders_follow_the_tensor_parallel_size() -> None:
    assert DynamicInferenceContext.round_up_tokens(1) == 64
    assert DynamicInferenceContext.round_up_tokens(64) == 64
    assert DynamicInferenceContext.round_up_tokens(65, tp_size=3) == 66
    assert DynamicInferenceContext.round_up_requests(5) == 8
    assert DynamicInferenceContext.round_up_requests(5, tp_size=3) == 6


def test_the_buffer_is_one_tensor_and_the_last_block_is_the_dummy() -> None:
    context = DynamicInferenceContext(
        MODEL,
        InferenceConfig(max_sequence_length=100, buffer_size_gb=64 * BLOCK_BYTES / 1024**3, block_size_tokens=8),
    )
    assert context.memory_buffer.shape == (2, 3, 64, 8, 2, 16)
    assert context.memory_buffer.dtype is torch.float32
    assert context.kv_cache.block_bytes == context.block_size_bytes == BLOCK_BYTES
    assert context.kv_block_allocator.dummy_block_idx == 63
