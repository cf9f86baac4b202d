"""What the router adds: time to first byte and throughput, against sending straight to the worker.

    python bench/router_overhead.py [--rate 100] [--seconds 10] [--prompt-tokens 1000] [--json]

Three processes besides this client: nats-server, one worker whose engine answers at once with 16 events,
one router.  Prompts are sent as token ids, streamed; half of each prompt is shared, so that matching has
work to do.  On a machine with fewer than four free cores the processes compete, and the added time is an
upper bound.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from warmroute.up import broker

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODEL, BLOCK = "bench", 16


async def serve_worker(nats: str) -> None:
    """A worker that answers at once; its events and heartbeats are real."""
    from aiohttp import web

    from kvevents.bus import NatsBus
    from kvevents.hashing import sequence_hashes
    from kvevents.publisher import EventPublisher
    from kvevents.types import Beat, Load, SourceBeat, SourceId
    from kvevents.worker_plane import WorkerPlane

    publisher = EventPublisher(SourceId("bench-worker", 0), MODEL, BLOCK)
    held: set[int] = set()
    chunk = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'

    async def generate(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        ids = body["prompt"]
        hashes = sequence_hashes(np.asarray(ids, np.uint32), BLOCK).tolist()
        first = next((i for i, h in enumerate(hashes) if h not in held), len(hashes))
        if first < len(hashes):
            held.update(hashes)
            fresh = {
                "block_hashes": hashes[first:], "token_ids": ids[first * BLOCK : len(hashes) * BLOCK],
                "num_block_tokens": [BLOCK] * (len(hashes) - first),
                "parent_hash": hashes[first - 1] if first else None,
            }  # fmt: skip
            publisher.listener("stored", fresh)
            publisher.end_step()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(16):
            await response.write(chunk)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes([web.post("/v1/completions", generate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def beat() -> Beat:
        state = publisher.state()
        source = SourceBeat(0, state.epoch, state.seq, state.blocks, state.digest, Load(0, 0, 0, 0, 0, 10**6))
        return Beat(
            version=1, worker="bench-worker", model=MODEL, address=address, block_size=BLOCK,
            capacity_blocks=10**6, max_sequence_length=10**6, tokenizer="", state="ready",
            sent_at=time.time(), sources=[source], features=[],
        )  # fmt: skip

    bus = await NatsBus.connect(nats)
    plane = WorkerPlane(bus, [publisher], beat)
    await plane.start()
    print(json.dumps({"address": address}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await plane.stop()
    await bus.close()
    await runner.cleanup()


def prompts(count: int, tokens: int) -> list[bytes]:
    """Bodies whose first half is one of four shared texts."""
    rng = random.Random(3)
    shared = [[rng.randrange(32000) for _ in range(tokens // 2)] for _ in range(4)]
    return [
        msgspec.json.encode(
            {
                "model": MODEL, "stream": True,
                "prompt": rng.choice(shared) + [rng.randrange(32000) for _ in range(tokens - tokens // 2)],
            }
        )
        for _ in range(count)
    ]  # fmt: skip


async def one(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Seconds to the first byte of one whole request."""
    start = time.perf_counter()
    async with session.post(url, data=body) as response:
        await response.content.readany()
        first = time.perf_counter() - start
        await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}")
    return first


async def open_loop(session: aiohttp.ClientSession, url: str, bodies: list[bytes], rate: float) -> list[float]:
    """Requests at a fixed rate, whatever the answers do."""
    start, asked = time.perf_counter(), []
    for number, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
        asked.append(asyncio.create_task(one(session, url, body)))
    return list(await asyncio.gather(*asked))


async def closed_loop(session: aiohttp.ClientSession, url: str, bodies: list[bytes], clients: int) -> float:
    """Requests/s of `clients` that each send the next request when the last is answered."""
    queue = iter(bodies)

    async def client() -> None:
        for body in queue:
            await one(session, url, body)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(bodies) / (time.perf_counter() - start)


async def measure(worker: str, router: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both ways, alternating, so that a drift of the machine meets both."""
    times: dict[str, list[float]] = {"direct": [], "router": []}
    rates: dict[str, list[float]] = {"direct": [], "router": []}
    urls = {"direct": worker + "/v1/completions", "router": router + "/v1/completions"}
    count = int(arguments.rate * arguments.seconds / 2)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for url in urls.values():
            await open_loop(session, url, prompts(50, arguments.prompt_tokens), arguments.rate)
        for _ in range(2):
            for side, url in urls.items():
                times[side] += await open_loop(session, url, prompts(count, arguments.prompt_tokens), arguments.rate)
        for _ in range(2):
            for side, url in urls.items():
                bodies = prompts(500, arguments.prompt_tokens)
                rates[side].append(await closed_loop(session, url, bodies, 32))
    result: dict[str, Any] = {
        "rate": arguments.rate,
        "prompt_tokens": arguments.prompt_tokens,
        "cores": os.cpu_count(),
    }
    for name, at in (("p50", 0.5), ("p99", 0.99)):
        direct, routed = (float(np.quantile(times[side], at)) * 1e3 for side in ("direct", "router"))
        result |= {
            f"direct_{name}_ms": round(direct, 2), f"router_{name}_ms": round(routed, 2),
            f"added_{name}_ms": round(routed - direct, 2),
        }  # fmt: skip
    result |= {f"{side}_requests_per_s": round(max(rates[side])) for side in rates}
    return result


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The JSON line with which a process says that it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended before it was ready")
    told: dict[str, Any] = json.loads(line)
    return told


def start(code: list[str]) -> "subprocess.Popen[str]":
    """A Python process of this benchmark."""
    return subprocess.Popen([sys.executable, *code], stdout=subprocess.PIPE, text=True, cwd=ROOT)


async def wait_ready(router: str) -> None:
    """Until the router knows the worker."""
    async with aiohttp.ClientSession() as session:
        for _ in range(200):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(router + "/health") as answer:
                    if (await answer.json())["workers_ready"] == 1:
                        return
            await asyncio.sleep(0.05)
    raise RuntimeError("the router did not find the worker")


def main() -> None:
    """Start everything, measure, print, end everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s of the open loop")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the open loop, each side")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve-worker", metavar="NATS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_worker:
        asyncio.run(serve_worker(arguments.serve_worker))
        return
    port = free_port()
    nats = f"nats://127.0.0.1:{port}"
    config = f"RouterConfig(port=0, nats={nats!r}, log_level='warning')"
    code = f"from router.main import run; from router.config import RouterConfig; run({config})"
    processes: list[subprocess.Popen[Any]] = [
        subprocess.Popen([str(broker.find()), "-a", "127.0.0.1", "-p", str(port), "-l", os.devnull])
    ]
    try:
        time.sleep(0.5)
        worker, router = start([__file__, "--serve-worker", nats]), start(["-c", code])
        processes += [worker, router]
        worker_address, router_address = first_line(worker)["address"], first_line(router)["address"]
        asyncio.run(wait_ready(router_address))
        result = asyncio.run(measure(worker_address, router_address, arguments))
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(15)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:24} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
