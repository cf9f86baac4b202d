"""The event plane: hashing, publishing, following; alone and over a real nats-server.

    python bench/events.py [--json] [--chains 2]

Workload: 8 workers, each with chains of 8,192 blocks of 16 tokens that share nothing; 16 or 64 blocks a message.
Hashing is measured beside python-xxhash called block by block.  "follow" is decode, check, view, digest and index, in
one thread; "over NATS" has the workers in a process of their own and counts from the first message that is sent to
the last that can be matched.
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvevents.bus import NatsBus
from kvevents.consumer import EventConsumer
from kvevents.digest import digest_of
from kvevents.hashing import block_hashes, sequence_hashes
from kvevents.messages import decode_message
from kvevents.publisher import EventPublisher
from kvevents.source import Source, Trust
from kvevents.types import Beat, Load, SourceBeat, SourceId
from kvevents.worker_plane import WorkerPlane
from router.index.catalog import IndexCatalog
from router.index.table import compile_all
from warmroute.up import broker

WORKERS, CHAIN, BLOCK, MODEL = 8, 8192, 16, "bench"


def best_of(call: Callable[[], Any], rounds: int = 5) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def hashing() -> dict[str, Any]:
    """Million tokens a second."""
    tokens = np.random.default_rng(1).integers(0, 50_000, 1 << 20, dtype=np.uint32)
    as_list = tokens[: 1 << 17].tolist()

    def plain(count: int) -> None:
        data = tokens[:count].tobytes()
        for at in range(0, len(data), 4 * BLOCK):
            xxhash.xxh3_64_intdigest(data[at : at + 4 * BLOCK], 1337)

    block_hashes(tokens[:64], BLOCK)
    ours = len(tokens) / best_of(lambda: block_hashes(tokens, BLOCK)) / 1e6
    other = (1 << 17) / best_of(lambda: plain(1 << 17)) / 1e6
    return {
        "block_hashes_mtokens_per_s": round(ours),
        "python_xxhash_mtokens_per_s": round(other),
        "ratio": round(ours / other, 1),
        "sequence_hashes_mtokens_per_s": round(len(tokens) / best_of(lambda: sequence_hashes(tokens, BLOCK)) / 1e6),
        "block_size_256_mtokens_per_s": round(len(tokens) / best_of(lambda: block_hashes(tokens, 256)) / 1e6),
        "from_a_list_mtokens_per_s": round(len(as_list) / best_of(lambda: sequence_hashes(as_list, BLOCK)) / 1e6),
    }


def payloads(chains: int, per_message: int, seed: int) -> Iterator[dict[str, Any]]:
    """What an engine's listener hears."""
    rng = np.random.default_rng(seed)
    for _ in range(chains):
        engine = rng.integers(1, 2**63, CHAIN, dtype=np.uint64).tolist()
        tokens = rng.integers(0, 50_000, CHAIN * BLOCK, dtype=np.uint32).tolist()
        for at in range(0, CHAIN, per_message):
            yield {
                "block_hashes": engine[at : at + per_message],
                "token_ids": tokens[at * BLOCK : (at + per_message) * BLOCK],
                "num_block_tokens": [BLOCK] * per_message,
                "parent_hash": engine[at - 1] if at else None,
            }


def publisher_of(worker: int, messages: int = 1 << 20) -> EventPublisher:
    return EventPublisher(SourceId(f"w{worker}", 0), MODEL, BLOCK, queue_messages=messages)


def publishing(chains: int, per_message: int) -> tuple[dict[str, Any], list[list[bytes]]]:
    """Microseconds a message on the engine's thread; and every worker's messages."""
    times: list[float] = []
    streams = []
    for worker in range(WORKERS):
        publisher = publisher_of(worker)
        for payload in payloads(chains, per_message, worker):
            start = time.perf_counter()
            publisher.listener("stored", payload)
            publisher.end_step()
            times.append(time.perf_counter() - start)
        streams.append(list(iter(publisher.take, None)))
    return {
        "publish_p50_us": round(float(np.quantile(times, 0.5)) * 1e6, 1),
        "publish_p99_us": round(float(np.quantile(times, 0.99)) * 1e6, 1),
    }, streams


def following(streams: list[list[bytes]], per_message: int) -> dict[str, Any]:
    """Blocks a second from bytes to a matchable index, and the share of the digest in it."""
    compile_all()
    catalog = IndexCatalog()
    sources = [Source(SourceId(f"w{i}", 0), MODEL, BLOCK, catalog) for i in range(len(streams))]
    start = time.perf_counter()
    for messages in zip(*streams, strict=True):
        for source, data in zip(sources, messages, strict=True):
            source.hear(decode_message(data), 0.0)
    seconds = time.perf_counter() - start
    count = sum(map(len, streams))
    assert all(source.trust is Trust.EXACT for source in sources)
    # The digest is part of a compiled loop over a message's blocks: its work, and reading it after each message.
    hashes = np.frombuffer(np.random.default_rng(1).bytes(8 * per_message * count), dtype=np.uint64)
    digest = best_of(lambda: digest_of(hashes)) + best_of(lambda: [sources[0].digest for _ in range(count)], 3)
    return {
        "follow_mblocks_per_s": round(count * per_message / seconds / 1e6, 2),
        "follow_us_per_message": round(seconds / count * 1e6, 2),
        "digest_share_percent": round(100 * digest / seconds, 1),
    }


@contextmanager
def nats_server() -> Iterator[str]:
    """A server on a free loopback port; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [str(broker.find()), "-a", "127.0.0.1", "-p", str(port), "-l", str(Path(folder) / "log")]
        )
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def beat_of(publisher: EventPublisher) -> Beat:
    state = publisher.state()
    source = SourceBeat(0, state.epoch, state.seq, state.blocks, state.digest, Load(0, 0, 0, 0, 0, 0))
    return Beat(1, publisher.source.worker, MODEL, "-", BLOCK, 0, 0, "", "ready", 0.0, [source])


def workers_process(url: str, chains: int, per_message: int, ready: Any, go: Any, began: Any, done: Any) -> None:
    """Eight workers' planes; their messages are prepared and then leave as fast as the bus takes them."""

    async def run() -> None:
        bus = await NatsBus.connect(url)
        publishers = [publisher_of(worker) for worker in range(WORKERS)]
        planes = [WorkerPlane(bus, [publisher], lambda p=publisher: beat_of(p)) for publisher in publishers]  # type: ignore[misc]
        for plane in planes:
            await plane.start()
        ready.set()
        await asyncio.to_thread(go.wait)
        for plane in planes:
            plane._wake.clear()
        for worker, publisher in enumerate(publishers):
            publisher.on_message(None)
            for payload in payloads(chains, per_message, worker):
                publisher.listener("stored", payload)
                publisher.end_step()
        began.value = time.monotonic()
        for plane in planes:
            plane._wake.set()
        await asyncio.to_thread(done.wait)
        for plane in planes:
            await plane.stop()
        await bus.close()

    asyncio.run(run())


def over_nats(chains: int, per_message: int) -> dict[str, Any]:
    """Blocks a second from a worker's queue to a matchable index in another process."""
    context = multiprocessing.get_context("spawn")
    ready, go, done = context.Event(), context.Event(), context.Event()
    began = context.Value("d", 0.0)
    expected = WORKERS * chains * CHAIN

    async def follow(url: str) -> tuple[float, int]:
        bus = await NatsBus.connect(url)
        consumer = EventConsumer(bus, catalog := IndexCatalog(), clock=time.monotonic, rng=random.Random(1))
        await consumer.start()
        await asyncio.to_thread(ready.wait)
        await consumer.settled(30, workers=WORKERS)
        go.set()

        def held() -> int:
            return sum(catalog.blocks_of(source.handle) for source in consumer.sources().values())

        while held() < expected:  # noqa: ASYNC110 - what is measured is the index, which has no event for this
            await asyncio.sleep(0.002)
        seconds = time.monotonic() - began.value
        gaps = sum(source.gaps for source in consumer.sources().values())
        done.set()
        await consumer.stop()
        await bus.close()
        return seconds, gaps

    compile_all()
    with nats_server() as url:
        arguments = (url, chains, per_message, ready, go, began, done)
        process = context.Process(target=workers_process, args=arguments)
        process.start()
        seconds, gaps = asyncio.run(follow(url))
        process.join(30)
    return {"over_nats_mblocks_per_s": round(expected / seconds / 1e6, 2), "over_nats_gaps": gaps}


def main() -> None:
    """Run everything, print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=2, help="chains of 8,192 blocks per worker")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = []
    for per_message in (16, 64):
        published, streams = publishing(arguments.chains, per_message)
        row: dict[str, Any] = {"blocks_per_message": per_message, **published, **following(streams, per_message)}
        rows.append(row | over_nats(arguments.chains, per_message))
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "hashing": hashing(),
        "events": rows,
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result["hashing"].items():  # type: ignore[attr-defined]
        print(f"{name:32} {value}")
    for row in rows:
        print()
        for name, value in row.items():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
