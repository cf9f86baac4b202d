"""What the event plane's tests share: a sink of plain sets, an engine that stores and removes chains, a real server."""

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvevents.publisher import EventPublisher
from kvevents.types import PROTOCOL_VERSION, Beat, Load, SourceBeat, SourceId
from warmroute.up import broker

MODEL, BLOCK = "a model/v1.0", 4


class SetSink:
    """An `IndexSink` of plain sets."""

    def __init__(self) -> None:
        self.sets: dict[int, set[int]] = {}
        self.opened = 0

    def open(self, source_id: SourceId, model: str, block_size: int) -> int:
        self.opened += 1
        self.sets[self.opened] = set()
        return self.opened

    def store(self, source: int, hashes: NDArray[np.uint64]) -> None:
        self.sets[source].update(hashes.tolist())

    def remove(self, source: int, hashes: NDArray[np.uint64]) -> None:
        self.sets[source].difference_update(hashes.tolist())

    def replace(self, source: int, hashes: NDArray[np.uint64]) -> None:
        self.sets[source] = set(hashes.tolist())

    def drop(self, source: int) -> None:
        del self.sets[source]


class Engine:
    """Stands in for an allocator: a forest of blocks with opaque hashes, announced to a real publisher."""

    def __init__(self, publisher: EventPublisher, seed: int = 0) -> None:
        self.publisher = publisher
        self.rng = random.Random(seed)
        self.parent: dict[int, int | None] = {}
        """Engine hash -> parent, for every block that is held."""

    def store(self, blocks: int, parent: int | None = None) -> list[int]:
        """Announce a chain of new blocks below `parent`."""
        engine = [self.rng.getrandbits(63) | 1 for _ in range(blocks)]
        tokens = [self.rng.randrange(1000) for _ in range(blocks * self.publisher.block_size)]
        sizes = [self.publisher.block_size] * blocks
        self.publisher.listener(
            "stored",
            {"block_hashes": engine, "token_ids": tokens, "num_block_tokens": sizes, "parent_hash": parent},
        )
        for h in engine:
            self.parent[h] = parent
            parent = h
        return engine

    def remove(self, blocks: list[int]) -> None:
        self.publisher.listener("removed", {"block_hashes": blocks})
        for h in blocks:
            del self.parent[h]

    def remove_leaves(self, most: int) -> None:
        """Evict up to `most` blocks that no other block hangs on."""
        parents = set(self.parent.values())
        self.remove([h for h in self.parent if h not in parents][:most])

    def clear(self) -> None:
        self.publisher.listener("cleared", {})
        self.parent.clear()

    def churn(self, steps: int) -> None:
        """Some engine steps that grow, branch and evict."""
        for _ in range(steps):
            held = [None, *self.parent]
            self.store(self.rng.randrange(1, 6), self.rng.choice(held))
            if len(self.parent) > 60:
                self.remove_leaves(20)
            self.publisher.end_step()

    def truth(self) -> set[int]:
        """The sequence hashes that the engine holds."""
        return set(self.publisher.snapshot().blocks.device_hashes().tolist())


def new_engine(
    worker: str = "w.1", rank: int = 0, *, epoch: int | None = None, seed: int = 0, **options: int
) -> Engine:
    return Engine(EventPublisher(SourceId(worker, rank), MODEL, BLOCK, epoch=epoch, **options), seed)  # type: ignore[arg-type]


def beat_of(*publishers: EventPublisher, state: str = "ready") -> Beat:
    """The heartbeat of a worker with these sources."""
    first = publishers[0]
    return Beat(
        version=PROTOCOL_VERSION,
        worker=first.source.worker,
        model=first.model,
        address="http://127.0.0.1:1",
        block_size=first.block_size,
        capacity_blocks=1000,
        max_sequence_length=4096,
        tokenizer="t",
        state=state,
        sent_at=0.0,
        sources=[source_beat(publisher) for publisher in publishers],
        features=[],
    )


def source_beat(publisher: EventPublisher) -> SourceBeat:
    state = publisher.state()
    load = Load(0, 0, 0, 0, state.blocks, 1000)
    return SourceBeat(publisher.source.dp_rank, state.epoch, state.seq, state.blocks, state.digest, load)


class NatsServer:
    """A nats-server process on one free loopback port."""

    def __init__(self, folder: Path, max_payload: int = 1024 * 1024) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._folder = folder
        self._command = [str(broker.find()), "-c", str(folder / "nats.json")]
        settings = {"host": "127.0.0.1", "port": self.port, "max_payload": max_payload}
        (folder / "nats.json").write_text(json.dumps(settings))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
                return
            time.sleep(0.02)
        raise AssertionError("nats-server did not start")

    def kill(self) -> None:
        """As by kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Poll a condition that has no event of its own.

    Raises:
        AssertionError: it did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)
