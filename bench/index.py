"""The prefix index against a plain Python dict of bitmasks: ingest, match, memory, removal.

Ratios come from one run.

    python bench/index.py [--chains 15] [--json]

Workload (the one used for other routers' indexes): 8 workers, 15 chains of 8,192 blocks each per worker;
blocks arrive in messages of 16 or 64.  Layout `apart`: no block in common; layout `shared`: the first 1,024
blocks of all chains are the same.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.index.prefix_index import PrefixIndex
from router.index.table import compile_all

WORKERS, CHAIN = 8, 8192
SHARED = 1024


class MaskDict:
    """The other side: hash -> int bitmask in a dict, matched block by block."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def store(self, source: int, hashes: list[int]) -> None:
        masks, flag = self.masks, 1 << source
        for key in hashes:
            masks[key] = masks.get(key, 0) | flag

    def match(self, hashes: list[int]) -> int:
        following, depth = -1, 0
        for depth, key in enumerate(hashes):
            following &= self.masks.get(key, 0)
            if not following:
                return depth
        return depth + 1

    def drop(self, source: int) -> None:
        keep = ~(1 << source)
        self.masks = {key: left for key, mask in self.masks.items() if (left := mask & keep)}


def workload(layout: str, chains: int) -> np.ndarray:
    """Sequence hashes: uint64[workers, chains, blocks]."""
    rng = np.random.default_rng(11)
    blocks = rng.integers(1, 2**64, (WORKERS, chains, CHAIN), dtype=np.uint64)
    if layout == "shared":
        blocks[:, :, :SHARED] = blocks[0, 0, :SHARED]
    return blocks


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quantile_us(times: list[float], at: float) -> float:
    """A quantile in microseconds."""
    return round(float(np.quantile(times, at)) * 1e6, 2)


def ingest(store: Callable[[int, Any], None], blocks: Any, per_message: int) -> tuple[float, float]:
    """(blocks/s, slowest message in ms); chains interleave over the workers as they would arrive."""
    total, slowest, start = 0, 0.0, time.perf_counter()
    for chain in range(len(blocks[0])):
        for worker in range(WORKERS):
            row = blocks[worker][chain]
            for at in range(0, CHAIN, per_message):
                part = row[at : at + per_message]
                before = time.perf_counter()
                store(worker, part)
                slowest = max(slowest, time.perf_counter() - before)
            total += CHAIN
    return total / (time.perf_counter() - start), slowest * 1e3


def measure_ours(blocks: np.ndarray, per_message: int) -> dict[str, Any]:
    """The compiled index over one layout."""
    compile_all()
    index = PrefixIndex()
    for _ in range(WORKERS):
        index.add_source()
    rate, slowest = ingest(index.store, blocks, per_message)
    row: dict[str, Any] = {"ingest_blocks_per_s": round(rate), "slowest_message_ms": round(slowest, 3)}
    for length in (128, 1024, 8192):
        prompts = [np.ascontiguousarray(chain[:length]) for worker in blocks for chain in worker] * 3
        times = [timed(lambda p=prompt: index.match(p)) for prompt in prompts]
        row[f"match_{length}_p50_us"], row[f"match_{length}_p99_us"] = (
            quantile_us(times, 0.5),
            quantile_us(times, 0.99),
        )
    row["bytes_per_worker_block"] = round(index.nbytes / index.worker_blocks, 1)
    row["worker_blocks"] = index.worker_blocks
    row["drop_worker_us"] = round(timed(lambda: index.drop(0)) * 1e6, 1)
    steps = []
    while True:
        start = time.perf_counter()
        more = index.upkeep()
        steps.append(time.perf_counter() - start)
        if not more:
            break
    row["sweep_after_drop_ms"], row["slowest_sweep_step_us"] = (
        round(sum(steps) * 1e3, 2),
        round(max(steps) * 1e6, 1),
    )
    index.check_integrity()
    return row


def measure_plain(blocks: np.ndarray, per_message: int) -> dict[str, Any]:
    """The dict over the same layout; its hashes are ints already, as after a decoder that makes Python
    objects.
    """
    as_ints = [[chain.tolist() for chain in worker] for worker in blocks]
    plain = MaskDict()
    rate, slowest = ingest(plain.store, as_ints, per_message)
    row: dict[str, Any] = {"ingest_blocks_per_s": round(rate), "slowest_message_ms": round(slowest, 3)}
    for length in (128, 1024, 8192):
        prompts = [chain[:length] for worker in as_ints for chain in worker]
        times = [timed(lambda p=prompt: plain.match(p)) for prompt in prompts]
        row[f"match_{length}_p50_us"] = quantile_us(times, 0.5)
    row["drop_worker_us"] = round(timed(lambda: plain.drop(0)) * 1e6, 1)
    return row


def main() -> None:
    """Run every layout and message size, print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=15, help="chains of 8,192 blocks per worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = []
    for layout in ("apart", "shared"):
        blocks = workload(layout, arguments.chains)
        for per_message in (16, 64):
            ours, plain = measure_ours(blocks, per_message), measure_plain(blocks, per_message)
            rows.append(
                {
                    "layout": layout, "blocks_per_message": per_message, "ours": ours, "dict": plain,
                    "ingest_ratio": round(ours["ingest_blocks_per_s"] / plain["ingest_blocks_per_s"], 2),
                    "match_8192_ratio": round(plain["match_8192_p50_us"] / ours["match_8192_p50_us"], 1),
                }
            )  # fmt: skip
    if arguments.json:
        print(
            json.dumps(
                {
                    "machine": platform.processor() or platform.machine(),
                    "python": platform.python_version(),
                    "rows": rows,
                }
            )
        )
        return
    for row in rows:
        title = f"{row['layout']}, {row['blocks_per_message']} blocks a message"
        print(f"\n{title}: ingest {row['ingest_ratio']}x, match {row['match_8192_ratio']}x")
        for side in ("ours", "dict"):
            print(f"  {side:5}" + "  ".join(f"{name} {value}" for name, value in row[side].items()))


if __name__ == "__main__":
    main()
