"""Ties a worker to the event plane: cache events out of the context, heartbeats with its load."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvevents.bus import NatsBus
from kvevents.publisher import EventPublisher
from kvevents.types import PROTOCOL_VERSION, Beat, Load, SourceBeat, SourceId
from kvevents.worker_plane import WorkerPlane
from worker.service import Worker

FEATURES = ["prompt_token_ids"]
"""Extensions of OpenAI's API that routers may use."""


def new_publisher(worker: str, dp_rank: int, model: str, block_size: int) -> EventPublisher:
    """The publisher of a worker's one source."""
    return EventPublisher(SourceId(worker, dp_rank), model, block_size)


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
    try:
        await plane.start()
        yield plane
        await plane.stop()
    finally:
        await bus.close()
