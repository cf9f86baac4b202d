"""What the context's bookkeeping costs a step, and what eviction costs, by size.

    python bench/context_step.py [--json]

Both sides of each ratio come from this one run: a step at 256 rows with a small and with a large cache behind it, and
eviction of 1,000 blocks of 10,000 and of 100,000.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from context import (
    DynamicInferenceContext,
    DynamicInferenceRequest,
    InferenceConfig,
    KVBlockAllocator,
    PrefixCachingEvictionPolicy,
    SamplingParams,
    TransformerConfig,
)

BLOCK = 16
MODEL = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1)


def build(rows: int, blocks: int) -> DynamicInferenceContext:
    block_bytes = 2 * BLOCK * 2 * 4
    return DynamicInferenceContext(
        MODEL,
        InferenceConfig(
            max_sequence_length=4096,
            buffer_size_gb=(blocks + 1) * block_bytes / 1024**3,
            block_size_tokens=BLOCK,
            max_requests=rows,
            max_tokens=max(rows * 64, 2048),
            enable_prefix_caching=True,
            prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        ),
    )


def fill_cache(allocator: KVBlockAllocator, count: int) -> None:
    """Cache `count` blocks as chains of 64."""
    for start in range(0, count, 64):
        size = min(64, count - start)
        blocks = allocator.allocate_memory_blocks(size)
        assert blocks is not None
        hashes = [1 + start + i for i in range(size)]
        allocator.register_kv_block_hashes(blocks, hashes, [0, *hashes[:-1]])
        allocator.release_memory_blocks(blocks)
        allocator.lru_clock += 1


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e3


def step_costs(rows: int, cached: int, steps: int = 200) -> dict[str, float]:
    """Median ms of add (one prompt of 32 tokens), initialise, update at `rows` decoding rows; the median whole step."""
    context = build(rows, rows * 32 + cached)
    fill_cache(context.kv_block_allocator, cached)
    rng = np.random.default_rng(0)
    add: list[float] = []
    context.dynamo_helper.discard_pending_kv_stored_events()
    for i in range(rows):
        request = DynamicInferenceRequest(
            i, torch.from_numpy(rng.integers(0, 1000, 32)), SamplingParams(num_tokens_to_generate=400),
            block_size_tokens=BLOCK, enable_prefix_caching=True,
        )  # fmt: skip
        add.append(timed(lambda request=request: context.add_request(request)))  # type: ignore[misc]
    mask = torch.ones(rows, dtype=torch.bool)
    initialise: list[float] = []
    update: list[float] = []
    for _ in range(steps):
        tokens = torch.from_numpy(rng.integers(0, 1000, rows))
        initialise.append(timed(context.initialize_attention_state))
        context.dynamo_helper.publish_pending_kv_stored_events()
        context.advance_step()
        update.append(timed(lambda tokens=tokens: context.update_requests(mask, tokens)))  # type: ignore[misc]
    assert context.get_active_request_count() == rows, "the batch did not keep decoding"
    assert len(context.kv_block_allocator.kv_hash_to_block_id) > cached, "no generated block was registered"
    steps_ms = [a + b for a, b in zip(initialise[1:], update[1:], strict=True)]
    return {
        "rows": rows,
        "cached_blocks": cached,
        "add_ms": round(statistics.median(add), 4),
        "initialise_ms": round(statistics.median(initialise[1:]), 4),
        "update_ms": round(statistics.median(update[1:]), 4),
        "step_ms": round(statistics.median(steps_ms), 4),
        "step_mean_ms": round(statistics.fmean(steps_ms), 4),
    }


def eviction_cost(cached: int, count: int = 1000) -> float:
    """Median ms to evict `count` of `cached` blocks."""
    costs = []
    for _ in range(5):
        allocator = KVBlockAllocator(cached + 1, enable_prefix_caching=True, policy=PrefixCachingEvictionPolicy.LRU)
        fill_cache(allocator, cached)
        costs.append(timed(lambda allocator=allocator: allocator.evict_lru_blocks(count)))  # type: ignore[misc]
        assert allocator.pool_avail == count, "nothing was evicted"
    return round(statistics.median(costs), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = [step_costs(rows, 0) for rows in (8, 64, 256)]
    steps.append(step_costs(256, 100_000))
    eviction = {cached: eviction_cost(cached) for cached in (10_000, 100_000)}
    result = {
        "steps": steps,
        "step_256_ratio_large_to_small_cache": round(steps[3]["step_ms"] / steps[2]["step_ms"], 2),
        "evict_1000_ms": {str(cached): cost for cached, cost in eviction.items()},
        "evict_ratio_100k_to_10k": round(eviction[100_000] / eviction[10_000], 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"python {result['python']}, torch {result['torch']}; medians, ms")
    print(f"{'rows':>6}{'cached':>9}{'add':>9}{'initialise':>12}{'update':>9}{'step':>9}{'mean':>9}   goal 0.5 at 256")
    for row in steps:
        print(
            f"{row['rows']:>6}{row['cached_blocks']:>9}{row['add_ms']:>9}{row['initialise_ms']:>12}"
            f"{row['update_ms']:>9}{row['step_ms']:>9}{row['step_mean_ms']:>9}"
        )
    print(f"100,000 cached blocks against none, step at 256 rows: {result['step_256_ratio_large_to_small_cache']}x")
    for cached, cost in eviction.items():
        print(f"evict 1,000 of {cached:,} blocks: {cost} ms   goal: <= 5 at 100,000")
    print(f"100,000 against 10,000: {result['evict_ratio_100k_to_10k']}x")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
