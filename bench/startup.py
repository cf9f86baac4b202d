"""How long `warmroute --help` and every subcommand's help take, as a user sees it: a new process each time.

    python bench/startup.py [--runs 10] [--limit-ms 300]

Ends with status 1 when a median is over the limit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from warmroute.cli import COMMANDS


def milliseconds(words: list[str]) -> float:
    """One run of the command line with `words`."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "warmroute.cli", *words],
        stdout=subprocess.DEVNULL, check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
    )  # fmt: skip
    return (time.perf_counter() - started) * 1000


def main() -> int:
    """Measure and print one row a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--limit-ms", type=float, default=300.0)
    arguments = parser.parse_args()
    late = False
    print(f"{'command':<28}{'median ms':>10}{'worst ms':>10}")
    for name in ["", *COMMANDS]:
        words = [name, "--help"] if name else ["--help"]
        milliseconds(words)  # the first run fills the file cache and writes the bytecode
        times = [milliseconds(words) for _ in range(arguments.runs)]
        late |= statistics.median(times) > arguments.limit_ms
        print(f"warmroute {' '.join(words):<18}{statistics.median(times):>10.0f}{max(times):>10.0f}")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
