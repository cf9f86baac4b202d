"""Ties a worker to the event plane: cache events out of the context, heartbeats with its load."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kvevents.bus import NatsBus
from kvevents.metrics import PublisherCollector
from kvevents.publisher import EventPublisher
from kvevents.types import PROTOCOL_VERSION, Beat, Load, SourceBeat, SourceId
from kvevents.worker_plane import WorkerPlane
from worker.service import Worker

FEATURES = ["prompt_token_ids"]
"""Extensions of OpenAI's API that routers may use."""


def new_publisher(worker: str, dp_rank: int, model: str, block_size: int) -> EventPublisher:
    """The publisher of a worker's one source; its compiled parts are loaded before the first event needs them."""
    rehearsal = EventPublisher(SourceId(worker, dp_rank), model, block_size)
    rehearsal.listener(
        "stored",
        {
            "block_hashes": [1, 2],
            "token_ids": [0] * (2 * block_size),
            "num_block_tokens": [block_size] * 2,
            "parent_hash": None,
        },
    )
    rehearsal.listener("removed", {"block_hashes": [2, 1]})
    rehearsal.end_step()
    return EventPublisher(SourceId(worker, dp_rank), model, block_size)


def reachable_host(host: str, nats: str) -> str:
    """The address under which others reach what listens on `host`: itself, or for a wildcard the one of the interface
    that leads to the broker.
    """
    if host not in ("0.0.0.0", "::", ""):
        return f"[{host}]" if ":" in host else host
    broker = urlsplit(nats.split(",")[0])
    try:
        # Connecting a datagram socket sends nothing; it only chooses the interface.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((broker.hostname or "127.0.0.1", broker.port or 4222))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def heartbeat(worker: Worker, publisher: EventPublisher, address: str) -> Beat:
    """The worker as the fleet sees it now."""
    core, load, state = worker.engine.core, worker.engine.load, publisher.state()
    return Beat(
        version=PROTOCOL_VERSION,
        worker=worker.id,
        model=worker.model,
        address=address,
        block_size=core.context.block_size_tokens,
        capacity_blocks=load.total_blocks,
        max_sequence_length=worker.max_length,
        tokenizer=worker.tokenizer.fingerprint,
        state=worker.state,
        sent_at=time.time(),
        sources=[
            SourceBeat(
                dp_rank=publisher.source.dp_rank,
                epoch=state.epoch,
                seq=state.seq,
                blocks=state.blocks,
                digest=state.digest,
                load=Load(
                    running=load.running,
                    waiting=worker.engine.waiting,
                    prefill_tokens=load.waiting_prompt_tokens,
                    decode_blocks=load.used_blocks,
                    blocks_used=load.used_blocks + load.cached_blocks,
                    blocks_total=load.total_blocks,
                ),
            )
        ],
        features=FEATURES,
    )


@asynccontextmanager
async def event_plane(worker: Worker, publisher: EventPublisher, address: str) -> AsyncIterator[WorkerPlane]:
    """Connected to the bus of the worker's settings, until the block ends with a "stopped" heartbeat.

    A bus that is away keeps nobody from serving: the connection is tried for in the background.
    """
    bus = await NatsBus.connect(worker.config.nats, name=worker.id)

    def beat() -> Beat:
        worker.bus_connected = bus.connected
        return heartbeat(worker, publisher, address)

    plane = WorkerPlane(bus, [publisher], beat, interval_s=worker.config.beat_interval_s)
    worker.registry.register(PublisherCollector([publisher], plane))
    try:
        await plane.start()
        yield plane
        await plane.stop()
    finally:
        await bus.close()
