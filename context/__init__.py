"""The dynamic inference context: in-flight batching over a paged, prefix-cached KV pool."""

from context.background_listener import BackgroundListener
from context.block_allocator import KVBlockAllocator
from context.config import (
    InferenceConfig,
    KVCacheManagementMode,
    PrefixCachingEvictionPolicy,
    ResumePolicy,
    TransformerConfig,
)
from context.dynamic_context import DynamicInferenceContext
from context.dynamo_helper import DynamoHelper, KVEventListener
from context.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from context.memory_size import get_mem_size_str
from context.request import DynamicInferenceRequest, SamplingParams, compute_block_hashes_batched

__all__ = [
    "ActiveRequestCountOverflowError",
    "BackgroundListener",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "DynamicInferenceRequest",
    "DynamoHelper",
    "InferenceConfig",
    "KVBlockAllocator",
    "KVCacheManagementMode",
    "KVEventListener",
    "MaxSequenceLengthOverflowError",
    "PrefixCachingEvictionPolicy",
    "RequestOverflowError",
    "ResumePolicy",
    "SamplingParams",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "TransformerConfig",
    "compute_block_hashes_batched",
    "get_mem_size_str",
]
