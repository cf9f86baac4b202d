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
                query[start : start + length, 0],
                keys,
                values,
                metadata.block_table[row],
                metadata.kv_lengths_list[row],
                scale,
            )
            start += length
        return out

    def decode(self, metadata: AttentionMetadata, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One token a row: `[rows, heads, head_dim]` in and out, over kv_lengths tokens of each row's blocks."""
        rows, heads, dim = query.shape
        bs, kv_heads = keys.shape[1:3]
        index, mask = self._decode_plan(metadata, rows, bs)
        width = index.shape[1] * bs
        k = _gather(keys, index).view(rows, width, kv_heads, dim).transpose(1, 2)
        v = _gather(values, index).view(rows, width, kv_heads, dim).transpose(1, 2)
        # The heads of one group become query positions, so keys and values need no copy per head.
        q = query.view(rows, kv_heads, heads // kv_heads, dim)
        return F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scale).reshape(
            rows, heads, dim
        )

    @staticmethod
    def _decode_plan(metadata: AttentionMetadata, rows: int, bs: int) -> tuple[Tensor, Tensor]:
        """Block indices `[rows, blocks]` and mask `[rows, 1, 1, blocks * bs]`, derived once a step."""
        scratch = metadata.scratch
        if "decode_index" not in scratch:
            lengths = metadata.kv_lengths[:rows]
            blocks = -(-max(metadata.kv_lengths_list[:rows]) // bs)
            scratch["decode_index"] = metadata.block_table[:rows, :blocks].long()
            positions = torch.arange(blocks * bs, device=lengths.device)
            scratch["decode_mask"] = (positions < lengths[:, None])[:, None, None, :]
        return scratch["decode_index"], scratch["decode_mask"]

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, kv_length: int, scale: float
    ) -> Tensor:
        """One row's chunk `[tokens, heads, head_dim]`, causal and aligned to the end of kv_length tokens."""
        tokens, heads, dim = query.shape
        bs, kv_heads = keys.shape[1:3]
        index = table[: -(-kv_length // bs)].long()
        k = _gather(keys, index).view(-1, kv_heads, dim)[:kv_length].transpose(0, 1)
        v = _gather(values, index).view(-1, kv_heads, dim)[:kv_length].transpose(0, 1)
        group = heads // kv_heads
        k = k.to(query.dtype).repeat_interleave(group, dim=0).unsqueeze(0)
        v = v.to(query.dtype).repeat_interleave(group, dim=0).unsqueeze(0)
        q = query.transpose(0, 1).unsqueeze(0)
        if tokens == kv_length:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            offset = kv_length - tokens
            mask = torch.ones(tokens, kv_length, dtype=torch.bool, device=query.device).tril_(offset)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out[0].transpose(0, 1)


TORCH = TorchBackend()
