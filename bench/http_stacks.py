"""Streaming proxies by HTTP stack: which server and which client should a worker and a router be made of?

    python bench/http_stacks.py [--quick] [--json]        needs the extra: pip install -e '.[bench]'

One upstream process, one proxy process for each candidate (bench/http_stack_servers.py).  Upstream and load
client are bare asyncio protocols (bench/http_stack_upstream.py, bench/http_stack_load.py), cheaper than a proxy:
`cores` near 1 says that the proxy was what limited requests/s.  Before anything is measured each candidate must
hand on every event before the next one exists (else the run fails); every answer is compared byte for byte.

Candidates take turns within a round, in an order that rotates from round to round, and every figure is the median
of its rounds, since other programs may use the machine too.  CPU milliseconds per request (proxy process with
its children) depend less on such neighbours than requests/s do.  Row `direct` has the upstream itself.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))

from http_stack_load import NotStreamed, cancellation, prove_streaming, saturate, spaced
from http_stack_servers import CANDIDATES
from http_stack_upstream import EVENT_BYTES

SERVERS = Path(__file__).with_name("http_stack_servers.py")
DIRECT, BASELINE = "direct", "aiohttp+aiohttp"
PACKAGES = ("aiohttp", "uvloop", "uvicorn", "httptools", "starlette", "granian", "httpx")
_MIN_FRAMES = 0.5
"""Frames per spaced event; below, the proxy saw events in bunches and the cost of one was not exercised."""


@dataclass
class Plan:
    """How much of everything."""

    rounds: int
    concurrency: int
    chunks: int
    seconds: float
    rate: float
    gap_ms: float
    rate_seconds: float
    cancellations: int


@dataclass
class Side:
    """A port to load, the process behind it, and one value of each figure per round."""

    name: str
    port: int
    process: "subprocess.Popen[bytes]"
    rounds: dict[str, list[float]] = field(default_factory=dict)
    cancelled_s: dict[str, list[float | None]] = field(default_factory=dict)

    def note(self, **figures: float) -> None:
        """Add a round's figures."""
        for name, value in figures.items():
            self.rounds.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Over the rounds."""
        return statistics.median(self.rounds[name])

    def cpu_s(self) -> float:
        """CPU seconds so far, with children."""
        return sum(sum(process.cpu_times()[:2]) for process in self._tree())

    def rss_mib(self) -> float:
        """Resident MiB, with children."""
        return sum(process.memory_info().rss for process in self._tree()) / 2**20

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def start(name: str, upstream: str | None = None) -> Side:
    """Start a server process and wait until its port accepts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = [sys.executable, str(SERVERS), name, str(port), *([upstream] if upstream else [])]
    side = Side(name, port, subprocess.Popen(arguments))
    for _ in range(300):
        if side.process.poll() is not None:
            break
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return side
        time.sleep(0.1)
    stop(side)
    raise RuntimeError(f"{name} does not serve on port {port}, exit status {side.process.poll()}")


def stop(side: Side) -> None:
    """End a server process that this run started."""
    side.process.terminate()
    try:
        side.process.wait(10)
    except subprocess.TimeoutExpired:
        side.process.kill()
        side.process.wait()


def quantile(values: list[float], at: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(at * len(values)))]


async def one_round(side: Side, upstream: Side, plan: Plan, turn: str) -> None:
    """All figures of one side, once."""
    cpu, started = side.cpu_s(), time.perf_counter()
    result = await saturate(side.port, plan.concurrency, plan.chunks, plan.seconds)
    cpu, taken = side.cpu_s() - cpu, time.perf_counter() - started
    side.note(
        requests_per_s=result.requests_per_s,
        chunks_per_s=result.requests_per_s * plan.chunks,
        frames_per_answer=result.frames_per_answer,
        cpu_ms_per_request=cpu * 1e3 / (result.requests_per_s * taken),
        cores_used=cpu / taken,
    )
    cpu = side.cpu_s()
    answers = await spaced(side.port, plan.rate, plan.chunks, plan.gap_ms, plan.rate_seconds)
    events, frames = len(answers) * plan.chunks, sum(answer.frames for answer in answers)
    if frames < _MIN_FRAMES * events:
        raise NotStreamed(f"{side.name}: {events} events {plan.gap_ms:g} ms apart came in {frames} frames")
    times = [answer.first_byte_s * 1e3 for answer in answers]
    side.note(
        spaced_cpu_us_per_event=(side.cpu_s() - cpu) * 1e6 / events,
        spaced_frames_per_answer=frames / len(answers),
        first_byte_p50_ms=quantile(times, 0.5),
        first_byte_p99_ms=quantile(times, 0.99),
    )
    for kind, gap_ms in (("mid_stream", 20.0), ("before_answer", 0.0)):
        seen = side.cancelled_s.setdefault(kind, [])
        for number in range(plan.cancellations):
            seen.append(await cancellation(side.port, upstream.port, f"{turn}-{kind}-{number}", gap_ms))
            if seen[-1] is None:
                break  # each costs two seconds, and the others would not be seen either
    side.note(rss_mib=side.rss_mib())


async def measure(sides: list[Side], upstream: Side, plan: Plan) -> None:
    """Proof first, then a short warm-up, then the rounds."""
    for side in sides:
        await prove_streaming(side.port, upstream.port, side.name)
        await saturate(side.port, plan.concurrency, plan.chunks, 0.5)
    for number in range(plan.rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            await one_round(side, upstream, plan, f"{side.name}-{number}")
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def figures(side: Side, direct: Side, baseline: Side) -> dict[str, Any]:
    """One candidate's row.  Added times and ratios are taken within a round, then the median over rounds."""
    row: dict[str, Any] = {name: round(side.median(name), 2) for name in side.rounds}
    for name in ("p50", "p99"):
        key = f"first_byte_{name}_ms"
        pairs = zip(side.rounds[key], direct.rounds[key], strict=True)
        row[f"added_{name}_ms"] = round(statistics.median(mine - bare for mine, bare in pairs), 2)
    for label, other in ((DIRECT, direct), (BASELINE, baseline)):
        for ratio, key in (("requests", "requests_per_s"), ("p99", "first_byte_p99_ms")):
            pairs = zip(side.rounds[key], other.rounds[key], strict=True)
            row[f"{ratio}_ratio_to_{label}"] = round(statistics.median(mine / its for mine, its in pairs), 3)
    row["range"] = {
        key: [round(min(side.rounds[key]), 2), round(max(side.rounds[key]), 2)]
        for key in ("requests_per_s", "first_byte_p99_ms", "spaced_cpu_us_per_event")
    }
    row["rounds_with_lower_p99_than_baseline"] = sum(
        mine < its
        for mine, its in zip(side.rounds["first_byte_p99_ms"], baseline.rounds["first_byte_p99_ms"], strict=True)
    )
    for kind, seen in side.cancelled_s.items():
        known = [value for value in seen if value is not None]
        row[f"cancel_{kind}_ms"] = round(statistics.median(known) * 1e3, 2) if known else None
        row[f"cancel_{kind}_max_ms"] = round(max(known) * 1e3, 2) if known else None
        row[f"cancel_{kind}_unseen"] = len(seen) - len(known)
    return row


def run(plan: Plan, names: list[str]) -> dict[str, Any]:
    """Start everything, measure, end everything."""
    began_load = os.getloadavg()[0]
    started: list[Side] = []
    try:
        upstream = start("upstream")
        started.append(upstream)
        for name in names:
            started.append(start(name, f"http://127.0.0.1:{upstream.port}"))  # noqa: PERF401 - each must be ended
        direct = Side(DIRECT, upstream.port, upstream.process)
        sides = [direct, *started[1:]]
        uvloop.run(measure(sides, upstream, plan))
        baseline = next(side for side in sides if side.name == BASELINE)
        rows = {side.name: figures(side, direct, baseline) for side in sides}
    finally:
        for side in reversed(started):
            stop(side)
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_1min": {"before": round(began_load, 2), "after": round(os.getloadavg()[0], 2)},
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "plan": vars(plan) | {"event_bytes": EVENT_BYTES},
        "rows": rows,
    }


COLUMNS = {
    "requests_per_s": "req/s", "requests_ratio_to_direct": "/ direct",
    f"requests_ratio_to_{BASELINE}": f"/ {BASELINE}", "chunks_per_s": "events/s", "frames_per_answer": "frames",
    "cores_used": "cores", "cpu_ms_per_request": "CPU ms/req", "spaced_frames_per_answer": "frames spaced",
    "spaced_cpu_us_per_event": "CPU us/event spaced",
    "added_p50_ms": "+p50 ms", "added_p99_ms": "+p99 ms", "cancel_mid_stream_ms": "cancel ms",
    "cancel_before_answer_ms": "cancel early ms", "rss_mib": "RSS MiB",
}  # fmt: skip
"""Figure -> heading of the printed table."""


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, ready for the decision page."""
    lines = [["stack", *COLUMNS.values()], ["--"] * (len(COLUMNS) + 1)]
    for name, row in rows.items():
        cells = ("not seen" if row[key] is None else f"{row[key]:g}" for key in COLUMNS)
        lines.append([name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, not who wins")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", type=float, default=60.0, help="requests/s of the first-byte measurement")
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), metavar="STACK",
        help=f"these beside {BASELINE}; of {', '.join(CANDIDATES)}",
    )  # fmt: skip
    arguments = parser.parse_args()
    plan = Plan(arguments.rounds, 32, 20, 2.0, arguments.rate, 5.0, 4.0, 5)
    if arguments.quick:
        plan = Plan(1, 32, 20, 0.5, arguments.rate, 5.0, 1.0, 1)
    result = run(plan, list(dict.fromkeys([BASELINE, *arguments.only])))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in itertools.islice(result.items(), len(result) - 1):
        print(f"{name}: {value}")
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
