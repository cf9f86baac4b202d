"""What a context is built from: the model's shape and the limits of inference, validated once."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class PrefixCachingEvictionPolicy(enum.Enum):
    """When a block that nobody uses any more leaves the prefix cache."""

    REF_ZERO = "ref_zero"
    """At once, when its last user goes."""
    LRU = "lru"
    """When its place is needed: the longest unused first, never before its cached children."""


class KVCacheManagementMode(enum.Enum):
    """What becomes of the KV buffer while the engine is suspended."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


class ResumePolicy(enum.Enum):
    """Which paused request gets the next free block."""

    FIFO = "fifo"
    """The one that waits longest; rows that get their block at once are not moved."""
    REFERENCE = "reference"
    """The newest, as the reference does: every row that needs a block passes through the paused region."""


@dataclass(slots=True)
class TransformerConfig:
    """The model's shape, under the reference's keyword names.

    `num_query_groups` is the number of KV heads (None: as many as attention heads); `kv_channels` is the head
    dimension (None: hidden_size / num_attention_heads); `layer_map` maps a 1-based layer number to its 0-based place
    in the KV buffer (None: identity).
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    multi_latent_attention: bool = False
    layer_map: dict[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"TransformerConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.multi_latent_attention:
            raise NotImplementedError("multi-latent attention (MLA) caches are not supported by this context")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"TransformerConfig.hidden_size ({self.hidden_size}) must divide by num_attention_heads "
                f"({self.num_attention_heads}) unless kv_channels is given"
            )

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads_per_rank(self) -> int:
        heads = self.num_query_groups or self.num_attention_heads
        return max(1, heads // self.tensor_model_parallel_size)


@dataclass(slots=True)
class InferenceConfig:
    """The limits of inference, under the reference's keyword names; sizes in tokens unless the name says GB."""

    max_sequence_length: int = 2560
    buffer_size_gb: float = 20.0
    paused_buffer_size_gb: float | None = None
    block_size_tokens: int = 256
    max_requests: int | None = None
    max_tokens: int | None = None
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.REF_ZERO
    prefix_caching_routing_alpha: float = 0.5
    enable_chunked_prefill: bool = False
    materialize_only_last_token_logits: bool = True
    metadata_types: Sequence[tuple[str, torch.dtype]] | None = None
    device: torch.device | str | None = None
    # Ours.
    hash_generated_blocks: bool = True
    """Hash, register and announce blocks that decode completes, so that the next turn matches through the answer."""
    resume_policy: ResumePolicy = ResumePolicy.FIFO
    # Features of the reference that this context refuses by name (see `_refuse_unsupported`).
    num_speculative_tokens: int = 0
    unified_memory_level: int = 0
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    mamba_inference_state_config: Any = None
    mamba_memory_ratio: float | None = None
    prefix_caching_mamba_gb: float | None = None
    num_cuda_graphs: int | None = None
    use_cuda_graphs_for_non_decode_steps: bool = False
    cuda_graph_max_tokens: int | None = None
    use_flashinfer_fused_rope: bool | None = None
    static_kv_memory_pointers: bool = False
    async_scheduling: bool = False
    pg_collection: Any = None

    def __post_init__(self) -> None:
        for name in ("max_sequence_length", "block_size_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"InferenceConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_requests", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"InferenceConfig.{name} is {value}; it must be at least 1, or None")
        if self.buffer_size_gb <= 0:
            raise ValueError(f"InferenceConfig.buffer_size_gb is {self.buffer_size_gb}; it must be above 0")
        if self.paused_buffer_size_gb is not None and self.paused_buffer_size_gb < 0:
            raise ValueError(
                f"InferenceConfig.paused_buffer_size_gb is {self.paused_buffer_size_gb}; it must be 0 or more"
            )
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        features = {
            "speculative decoding (num_speculative_tokens)": self.num_speculative_tokens != 0,
            "unified memory (unified_memory_level)": self.unified_memory_level != 0,
            "suspend and resume (kv_cache_management_mode)": self.kv_cache_management_mode
            is not KVCacheManagementMode.PERSIST,
            "hybrid Mamba models (mamba_inference_state_config)": self.mamba_inference_state_config is not None,
            "Mamba prefix caching (prefix_caching_mamba_gb)": self.prefix_caching_mamba_gb is not None,
            "CUDA graphs (num_cuda_graphs)": bool(self.num_cuda_graphs),
            "fused rotary embedding (use_flashinfer_fused_rope)": bool(self.use_flashinfer_fused_rope),
            "async scheduling (async_scheduling)": self.async_scheduling,
        }
        for feature, asked in features.items():
            if asked:
                raise NotImplementedError(f"{feature} is not supported by this context")


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """Counts derived from the two configurations (spec: context core, section 2)."""

    block_bytes: int
    pool_size: int
    """Blocks in the buffer; the last one is the dummy block for padding."""
    paused_limit: int
    """Blocks that paused requests may keep."""
    max_kv_block_count: int
    """Blocks in one request's table."""
    max_requests: int
    max_tokens: int


def derive_sizes(
    model: TransformerConfig,
    config: InferenceConfig,
    *,
    default_max_tokens: int,
    request_rounder: int,
) -> ContextSizes:
    """Compute all counts, and refuse combinations that cannot work with both numbers in the message.

    Raises:
        ValueError: a limit contradicts another.
    """
    bs, tp = config.block_size_tokens, model.tensor_model_parallel_size
    block_bytes = model.params_dtype.itemsize * 2 * model.num_layers * bs * model.kv_heads_per_rank * model.head_dim
    pool_size = max(2, int(config.buffer_size_gb * 1024**3) // block_bytes)
    paused_limit = int((config.paused_buffer_size_gb or 0) * 1024**3) // block_bytes
    if paused_limit > pool_size - 2:
        raise ValueError(
            f"InferenceConfig.paused_buffer_size_gb gives {paused_limit} blocks to paused requests, but the pool of "
            f"{pool_size} blocks can give {pool_size - 2} at most; lower it or raise buffer_size_gb"
        )
    if config.max_requests is not None:
        if config.max_requests % tp:
            raise ValueError(
                f"InferenceConfig.max_requests ({config.max_requests}) must divide by the tensor-parallel size ({tp})"
            )
        max_requests = config.max_requests
    else:
        max_requests = (pool_size - 1) // tp * tp
        rounder = round_up(request_rounder, request_rounder, tp)
        max_requests = max(max_requests // rounder * rounder, tp)
    max_tokens = config.max_tokens if config.max_tokens is not None else max(default_max_tokens, max_requests)
    if max_tokens < max_requests:
        raise ValueError(
            f"InferenceConfig.max_tokens ({max_tokens}) must be at least max_requests ({max_requests}): "
            "every decoding request runs one token a step"
        )
    return ContextSizes(
        block_bytes=block_bytes,
        pool_size=pool_size,
        paused_limit=paused_limit,
        max_kv_block_count=-(-config.max_sequence_length // bs),
        max_requests=max_requests,
        max_tokens=max_tokens,
    )


def round_up(value: int, rounder: int, tp_size: int) -> int:
    """Round up to a multiple of ceil(rounder / tp) x tp."""
    multiple = -(-rounder // tp_size) * tp_size
    return -(-value // multiple) * multiple
