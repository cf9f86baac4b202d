"""What the kernels read of one step: lengths, block table and padding."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """The step's shape.  Rows [0, num_decode) decode one token each; rows behind them prefill; then padding.

    Tensors are int32 on the device; cumulative ones have padded_requests + 1 entries, padding repeats the last.
    """

    query_lengths: Tensor
    cu_query_lengths: Tensor
    kv_lengths: Tensor
    cu_kv_lengths: Tensor
    block_table: Tensor
    """`[padded_requests, max_kv_block_count]`; empty entries name the dummy block."""
    max_seqlen_q: int
    max_seqlen_k: int
    num_decode: int
    num_prefill: int
    padded_requests: int
    padded_tokens: int
    real_token_count: int
    query_lengths_list: list[int]
    """Query lengths of the real rows, so that the CPU path asks no tensor for a number."""
    kv_lengths_list: list[int]
    scratch: dict[str, Tensor] = field(default_factory=dict)
    """What a backend derives once a step and reuses in every layer."""
