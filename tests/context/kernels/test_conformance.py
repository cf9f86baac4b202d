"""One suite over every backend: odd sizes, block borders, head groups and types, against plain float64 attention."""

from __future__ import annotations

import math

import pytest
import torch

from context.attention import AttentionMetadata
from context.kernels import KernelBackend, backend_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KernelBackend:
    monkeypatch.setenv("WARMROUTE_KERNELS", request.param)
    return backend_for(DEVICE)


class Step:
    """A random paged step: rows of (query tokens, cached tokens), decode rows first, scattered blocks, padding."""

    def __init__(
        self, rows: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 64, bs: int = 4,
        dtype: torch.dtype = torch.float32, padding: int = 3,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(7)
        self.rows, self.bs, self.heads, self.kv_heads, self.dim, self.dtype = rows, bs, heads, kv_heads, dim, dtype
        query_lengths = [query for query, _ in rows]
        kv_lengths = [query + cached for query, cached in rows]
        blocks = [-(-length // bs) for length in kv_lengths]
        pool = sum(blocks) + 2
        order = torch.randperm(pool - 1, generator=random).tolist()
        width, tokens, padded_rows = max(blocks) + 1, sum(query_lengths), len(rows) + 2
        self.table = torch.full((padded_rows, width), pool - 1, dtype=torch.int32)
        self.block_idx = torch.full((tokens + padding,), pool - 1, dtype=torch.int64)
        self.local_pos = torch.zeros(tokens + padding, dtype=torch.int32)
        at = 0
        for row, (query, cached) in enumerate(rows):
            mine = [order.pop() for _ in range(blocks[row])]
            self.table[row, : len(mine)] = torch.tensor(mine)
            for position in range(cached, cached + query):
                self.block_idx[at] = mine[position // bs]
                self.local_pos[at] = position % bs
                at += 1
        shape = (pool, bs, kv_heads, dim)
        self.keys = torch.randn(shape, generator=random).to(dtype)
        self.values = torch.randn(shape, generator=random).to(dtype)
        self.query = torch.randn(tokens + padding, 1, heads, dim, generator=random).to(dtype)
        self.key = torch.randn(tokens + padding, kv_heads, dim, generator=random).to(dtype)
        self.value = torch.randn(tokens + padding, kv_heads, dim, generator=random).to(dtype)
        padded_query = [*query_lengths, 0, 0]
        padded_kv = [*kv_lengths, 0, 0]
        decode = sum(query == 1 for query, _ in rows)
        self.metadata = AttentionMetadata(
            query_lengths=torch.tensor(padded_query, dtype=torch.int32, device=DEVICE),
            cu_query_lengths=cumulative(padded_query),
            kv_lengths=torch.tensor(padded_kv, dtype=torch.int32, device=DEVICE),
            cu_kv_lengths=cumulative(padded_kv),
            block_table=self.table.to(DEVICE),
            max_seqlen_q=max(query_lengths),
            max_seqlen_k=max(kv_lengths),
            num_decode=decode,
            num_prefill=len(rows) - decode,
            padded_requests=padded_rows,
            padded_tokens=tokens + padding,
            real_token_count=tokens,
            query_lengths_list=query_lengths,
            kv_lengths_list=kv_lengths,
        )
        for name in ("keys", "values", "query", "key", "value", "block_idx", "local_pos"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def append(self, backend: KernelBackend) -> None:
        backend.append(self.key, self.value, self.keys, self.values, self.block_idx, self.local_pos)

    def attend(self, backend: KernelBackend) -> torch.Tensor:
        return backend.step(self.metadata, self.query, self.keys, self.values, self.dim**-0.5)

    def expected(self) -> torch.Tensor:
        """Plain attention in float64, token by token, over the blocks as they stand."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        at, group = 0, self.heads // self.kv_heads
        for row, (query, cached) in enumerate(self.rows):
            slots = [
                (int(self.table[row, position // self.bs]), position % self.bs) for position in range(cached + query)
            ]
            keys = torch.stack([self.keys[block, slot] for block, slot in slots]).double().cpu()
            values = torch.stack([self.values[block, slot] for block, slot in slots]).double().cpu()
            for token in range(query):
                seen = cached + token + 1
                for head in range(self.heads):
                    q = self.query[at, 0, head].double().cpu()
                    scores = keys[:seen, head // group] @ q / math.sqrt(self.dim)
                    out[at, 0, head] = torch.softmax(scores, 0) @ values[:seen, head // group]
                at += 1
        return out


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).to(torch.int32)


def assert_attention(step: Step, backend: KernelBackend) -> None:
    step.append(backend)
    out = step.attend(backend)
    real = step.metadata.real_token_count
    difference = (out.double().cpu() - step.expected())[:real].abs().max().item()
    assert difference < TOLERANCE[step.dtype], f"max abs difference {difference}"
    assert (out[real:] == 0).all(), "padding rows must be zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_append_writes_every_real_slot_and_no_other(backend: KernelBackend, dtype: torch.dtype) -> None:
    step = Step([(1, 5), (3, 2), (7, 0)], dtype=dtype)
    before = step.keys.clone(), step.values.clone()
    step.append(backend)
    for cache, old, new in ((step.keys, before[0], step.key), (step.values, before[1], step.value)):
        for token in range(step.metadata.real_token_count):
            assert torch.equal(cache[step.block_idx[token], step.local_pos[token]], new[token])
        written = torch.zeros(cache.shape[:2], dtype=torch.bool, device=DEVICE)
        written[step.block_idx, step.local_pos.long()] = True
        assert torch.equal(cache[~written], old[~written])


def test_append_takes_a_strided_view(backend: KernelBackend) -> None:
    step = Step([(3, 2)])
    fused = torch.cat([step.key, step.value], dim=1)
    step.key, step.value = fused[:, :2], fused[:, 2:]
    assert_attention(step, backend)


@pytest.mark.parametrize("kv_length", [1, 3, 4, 5, 8, 63, 64, 65])
def test_decode_at_block_and_tile_borders(backend: KernelBackend, kv_length: int) -> None:
    assert_attention(Step([(1, kv_length - 1), (1, 6)]), backend)


@pytest.mark.parametrize(("query", "cached"), [(2, 0), (4, 0), (17, 0), (2, 4), (5, 3), (16, 8), (18, 61)])
def test_prefill_chunks_are_causal_and_aligned_to_the_end(backend: KernelBackend, query: int, cached: int) -> None:
    assert_attention(Step([(query, cached)]), backend)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (9, 3), (6, 6)])
def test_head_groups_and_sizes(backend: KernelBackend, dim: int, heads: int, kv_heads: int) -> None:
    assert_attention(Step([(1, 9), (3, 2)], dim=dim, heads=heads, kv_heads=kv_heads), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_single(backend: KernelBackend, dtype: torch.dtype) -> None:
    assert_attention(Step([(1, 40), (5, 30)], dtype=dtype, bs=16), backend)


def test_a_mixed_batch_with_many_rows(backend: KernelBackend) -> None:
    assert_attention(Step([(1, 0), (1, 15), (1, 16), (1, 33), (4, 0), (19, 13), (2, 30)], bs=16), backend)


def test_an_unknown_backend_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="'cuda'; it must be 'torch' or 'triton'"):
        backend_for(DEVICE)


def test_the_device_chooses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMROUTE_KERNELS", raising=False)
    assert type(backend_for(torch.device("cpu"))).__name__ == "TorchBackend"
    assert type(backend_for(torch.device("cuda"))).__name__ == "TritonBackend"
