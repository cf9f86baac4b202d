"""The torch backend: what the CPU runs, and the reference that the Triton kernels are held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from context.attention import AttentionMetadata


def _gather(blocks: Tensor, index: Tensor) -> Tensor:
    """`blocks[index]` as rows: each block is copied in one piece, some five times faster than by element."""
    return F.embedding(index, blocks.flatten(1))


class TorchBackend:
    """Gathers each request's blocks and hands them to scaled_dot_product_attention."""

    def append(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, block_idx: Tensor, local_pos: Tensor
    ) -> None:
        keys[block_idx, local_pos] = key.to(keys.dtype)
        values[block_idx, local_pos] = value.to(values.dtype)

    def step(self, metadata: AttentionMetadata, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        out = torch.zeros_like(query)
        decode = metadata.num_decode
        if decode:
            out[:decode, 0] = self.decode(metadata, query[:decode, 0], keys, values, scale)
        start = decode
        for row in range(decode, decode + metadata.num_prefill):
            length = metadata.query_lengths_list[row]
            out[start : start + length, 0] = self.prefill(
                metadata, row, query[start : start + length, 0], keys, values, scale
            )
            start += length
        return out

    def decode(self, metadata: AttentionMetadata, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One token a row: `[rows, heads, head_dim]` in and out, over kv_lengths tokens of each row's blocks."""
        rows, heads, dim = query.shape
        bs, kv_heads = keys.shape[1:3]
        index, mask = self._decode_plan(metadata, rows, bs, query.dtype)
        width = len(index) // rows * bs
        k = gather_blocks(keys, index).view(rows, width, kv_heads, dim).transpose(1, 2)
        v = gather_blocks(values, index).view(rows, width, kv_heads, dim).transpose(1, 2)
        # The heads of one group become query positions, so keys and values need no copy per head.
        q = query.view(rows, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scale)
        return out.reshape(rows, heads, dim)

    @staticmethod
    def _decode_plan(metadata: AttentionMetadata, rows: int, bs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Block indices `[rows * blocks]` and additive mask `[rows, 1, 1, blocks * bs]`, derived once a step."""
        scratch = metadata.scratch
        if "decode_index" not in scratch:
            lengths = metadata.kv_lengths[:rows]
            blocks = -(-max(metadata.kv_lengths_list[:rows]) // bs)
            positions = torch.arange(blocks * bs, device=lengths.device)
            unseen = (positions >= lengths[:, None])[:, None, None, :]
            scratch["decode_index"] = metadata.block_table[:rows, :blocks].flatten()
            scratch["decode_mask"] = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
        return scratch["decode_index"], scratch["decode_mask"]

    def prefill(
        self, metadata: AttentionMetadata, row: int, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """One row's chunk `[tokens, heads, head_dim]`, causal and aligned to the end of its cached tokens."""
        tokens, (bs, kv_heads, dim) = len(query), keys.shape[1:]
        length = metadata.kv_lengths_list[row]
        index = metadata.block_table[row, : -(-length // bs)]
        k = gather_blocks(keys, index).view(-1, kv_heads, dim)[:length].transpose(0, 1).unsqueeze(0)
        v = gather_blocks(values, index).view(-1, kv_heads, dim)[:length].transpose(0, 1).unsqueeze(0)
        mask = None if tokens == length else self._chunk_mask(metadata, row, tokens, length, query)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            k.to(query.dtype),
            v.to(query.dtype),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    @staticmethod
    def _chunk_mask(metadata: AttentionMetadata, row: int, tokens: int, length: int, query: Tensor) -> Tensor:
        """Additive mask `[tokens, length]` of a chunk behind cached tokens, built once a step."""
        name = f"chunk_mask/{row}"
        if name not in metadata.scratch:
            unseen = torch.ones(tokens, length, dtype=torch.bool, device=query.device).triu_(length - tokens + 1)
            zeros = torch.zeros(tokens, length, dtype=query.dtype, device=query.device)
            metadata.scratch[name] = zeros.masked_fill_(unseen, float("-inf"))
        return metadata.scratch[name]


def gather_blocks(cache: Tensor, index: Tensor) -> Tensor:
    """The named blocks of `[pool, block size, kv heads, head_dim]`, in order; whole blocks are copied at once."""
    flat = cache.view(cache.shape[0], -1)
    return flat.index_select(0, index).view(-1, *cache.shape[1:])


TORCH = TorchBackend()
