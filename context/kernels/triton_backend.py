"""The Triton backend: paged append, and paged attention for decode and chunked prefill, for GPUs.

One attention kernel serves both: a program takes a tile of one request's query tokens and one KV head, with all query
heads of that group, and runs an online softmax over the request's blocks (Dao et al., FlashAttention-2, 2023; paging as
in Kwon et al., PagedAttention, 2023).  Scores and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from context.attention import AttentionMetadata

_PREFILL_TILE = 16
_KEY_TILE = 64
_SMALLEST_DOT = 16


@triton.jit
def _append_kernel(  # type: ignore[no-untyped-def]
    key, value, keys, values, block_idx, local_pos, block_stride, slot_stride,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(block_idx + token).to(tl.int64)
    slot = tl.load(local_pos + token).to(tl.int64)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    source = token * WIDTH + lane
    target = block * block_stride + slot * slot_stride + lane
    tl.store(keys + target, tl.load(key + source, mask=inside).to(keys.dtype.element_ty), mask=inside)
    tl.store(values + target, tl.load(value + source, mask=inside).to(values.dtype.element_ty), mask=inside)


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, out, keys, values, table, query_starts, kv_lengths, scale,
    query_token_stride, query_head_stride, out_token_stride, out_head_stride,
    block_stride, slot_stride, head_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tile = tl.program_id(1)
    kv_head = tl.program_id(2)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - first
    kv_length = tl.load(kv_lengths + row)
    if tile * TILE_Q < length:
        # Lane m holds query token m // GROUP_PAD of the tile, head m % GROUP_PAD of the group.
        lane = tl.arange(0, TILE_Q * GROUP_PAD)
        token = tile * TILE_Q + lane // GROUP_PAD
        head = kv_head * GROUP + lane % GROUP_PAD
        dim = tl.arange(0, HEAD_PAD)
        inside_dim = dim[None, :] < HEAD_DIM
        inside_query = ((token < length) & (lane % GROUP_PAD < GROUP))[:, None] & inside_dim
        at = (first + token).to(tl.int64)[:, None]
        q = tl.load(
            query + at * query_token_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=inside_query,
            other=0.0,
        )
        if SINGLE:
            q = q.to(tl.float32)
        position = kv_length - length + token
        best = tl.full([TILE_Q * GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q * GROUP_PAD], tl.float32)
        weighted = tl.zeros([TILE_Q * GROUP_PAD, HEAD_PAD], tl.float32)
        end = tl.minimum(kv_length, kv_length - length + (tile + 1) * TILE_Q)
        for start in range(0, end, TILE_K):
            n = start + tl.arange(0, TILE_K)
            inside_key = n < end
            block = tl.load(table + row * table_stride + n // BLOCK_SIZE, mask=inside_key, other=0).to(tl.int64)
            base = block * block_stride + (n % BLOCK_SIZE) * slot_stride + kv_head * head_stride
            load = inside_key[:, None] & inside_dim
            k = tl.load(keys + base[:, None] + dim[None, :], mask=load, other=0.0).to(q.dtype)
            v = tl.load(values + base[:, None] + dim[None, :], mask=load, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = inside_key[None, :] & (n[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            # Key 0 is seen by every lane, so `best` is finite from the first round on.
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - new_best[:, None])
            decay = tl.exp(best - new_best)
            total = total * decay + tl.sum(weights, 1)
            weighted = weighted * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
            best = new_best
        tl.store(
            out + at * out_token_stride + head[:, None] * out_head_stride + dim[None, :],
            (weighted / total[:, None]).to(out.dtype.element_ty),
            mask=inside_query,
        )


def _interpreted() -> bool:
    """Whether kernels run through Triton's interpreter, which multiplies bfloat16 as raw bits (Triton 3.9)."""
    return bool(triton.knobs.runtime.interpret)


class TritonBackend:
    """Launches the kernels; signatures and results are those of the torch twin."""

    def append(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, block_idx: Tensor, local_pos: Tensor
    ) -> None:
        tokens, width = key.shape[0], key.shape[1] * key.shape[2]
        if not tokens:
            return
        _append_kernel[(tokens,)](
            key.contiguous(), value.contiguous(), keys, values, block_idx, local_pos,
            keys.stride(0), keys.stride(1), WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width),
        )  # fmt: skip

    def step(self, metadata: AttentionMetadata, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(query)
        decode, rows = metadata.num_decode, metadata.num_decode + metadata.num_prefill
        self._launch(metadata, 0, decode, 1, query, out, keys, values, scale)
        self._launch(metadata, decode, rows, _PREFILL_TILE, query, out, keys, values, scale)
        return out

    def _launch(
        self, metadata: AttentionMetadata, start: int, end: int, tile: int,
        query: Tensor, out: Tensor, keys: Tensor, values: Tensor, scale: float,
    ) -> None:  # fmt: skip
        """Run rows [start, end), in tiles of `tile` query tokens."""
        if start == end:
            return
        block_size, kv_heads, dim = keys.shape[1:]
        group = query.shape[2] // kv_heads
        group_pad = triton.next_power_of_2(group)
        longest = max(metadata.query_lengths_list[start:end])
        _attention_kernel[(end - start, triton.cdiv(longest, tile), kv_heads)](
            query, out, keys, values, metadata.block_table[start:], metadata.cu_query_lengths[start:],
            metadata.kv_lengths[start:], scale,
            query.stride(0), query.stride(2), out.stride(0), out.stride(2),
            keys.stride(0), keys.stride(1), keys.stride(2), metadata.block_table.stride(0),
            BLOCK_SIZE=block_size, GROUP=group, GROUP_PAD=max(group_pad, _SMALLEST_DOT // tile),
            HEAD_DIM=dim, HEAD_PAD=max(triton.next_power_of_2(dim), _SMALLEST_DOT),
            TILE_Q=tile, TILE_K=_KEY_TILE, SINGLE=_interpreted() and query.dtype is torch.bfloat16,
        )  # fmt: skip


TRITON = TritonBackend()
