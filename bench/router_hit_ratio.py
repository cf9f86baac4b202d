"""Hit ratio, balance and time to first token of every policy over a trace in Mooncake's form.

    python bench/router_hit_ratio.py TRACE [--policy warm,least-loaded] [--sizes 8x2000,16x2000] [--json]

TRACE has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (blocks of 512
tokens).
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.policy.registry import BUILT_IN, policy_by_name
from router.simulation import Arrival, Simulation


def read_trace(path: Path) -> list[Arrival]:
    """All prompts of a trace, in file order."""
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return [
        Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]) for row in rows
    ]


def main() -> None:
    """Run every policy at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", default=",".join(BUILT_IN), help="names, separated by commas")
    parser.add_argument("--sizes", default="4x2000,8x500,8x2000,8x8000,16x2000", help="workers x blocks a worker")
    parser.add_argument("--speed", type=float, default=10_000, help="prefill tokens/s of a worker")
    parser.add_argument("--requests", type=int, help="only the first N")
    parser.add_argument("--json", action="store_true", help="print one list")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)[: arguments.requests]
    rows = []
    for size in arguments.sizes.split(","):
        workers, capacity = map(int, size.split("x"))
        for name in arguments.policy.split(","):
            world = Simulation(
                policy_by_name(name), workers=workers, capacity=capacity, prefill_tokens_per_s=arguments.speed
            )
            outcome = world.run(trace)
            rows.append(outcome._asdict())
            if not arguments.json:
                print(
                    f"{size:>8} {name:14} hit {outcome.token_hit:.3f}  imbalance {outcome.imbalance:5.2f}"
                    f"  ttft p50 {outcome.ttft_p50_ms:8.0f} ms  p99 {outcome.ttft_p99_ms:8.0f} ms",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
