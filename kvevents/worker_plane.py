"""A worker's side of the bus: drains its publishers, sends heartbeats, answers what consumers ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine

import numpy as np

from kvevents import control
from kvevents.bus import Bus, Incoming, Subscription
from kvevents.messages import pack_hashes
from kvevents.publisher import EventPublisher
from kvevents.subjects import beat_subject, control_subject, events_subject
from kvevents.types import Beat, encode_beat

logger = logging.getLogger(__name__)

_KEPT_SNAPSHOTS = 4
_HEADROOM = 4096
"""Bytes of a reply that are not hashes."""


class WorkerPlane:
    """Runs on the worker's event loop, beside an engine thread that feeds the publishers.

    Args:
        bus: the bus.
        publishers: one per source of this worker.
        beat: builds the heartbeat; called on the event loop.
        interval_s: seconds between heartbeats.
    """

    def __init__(
        self,
        bus: Bus,
        publishers: list[EventPublisher],
        beat: Callable[[], Beat],
        *,
        interval_s: float = 1.0,
    ) -> None:
        self._bus, self._publishers, self._beat, self._interval_s = bus, publishers, beat, interval_s
        self._wake = asyncio.Event()
        self._beat_wanted = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._answers: set[asyncio.Task[None]] = set()
        self._snapshots: OrderedDict[str, list[control.SnapshotPart]] = OrderedDict()
        self._snapshot_ids = itertools.count(1)
        self.sent = 0
        self.lost = 0
        """Messages that the bus would not take; consumers find the hole."""
        self.rejected_requests = 0
        self.beats = 0
        self.internal_errors = 0
        """Failures of `beat` or of our own; the plane goes on."""

    async def start(self) -> None:
        """Begin to publish, beat and answer."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        for publisher in self._publishers:
            publisher.fit(self._bus.max_payload)
            publisher.on_message(wake)
            self._subscriptions.append(
                await self._bus.subscribe(
                    control_subject(publisher.source),
                    lambda incoming, publisher=publisher: self._asked(publisher, incoming),  # type: ignore[misc]
                )
            )
        self._bus.on_reconnect(self.beat_now)
        self._tasks = [asyncio.create_task(self._drain()), asyncio.create_task(self._beat_forever())]

    async def stop(self) -> None:
        """Send what waits, say "stopped", and end."""
        for publisher in self._publishers:
            publisher.on_message(None)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        await self._send_waiting()
        last = self._beat()
        last.state = "stopped"
        await self._bus.publish(beat_subject(last.worker), encode_beat(last))
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []

    def beat_now(self) -> None:
        """Send a heartbeat at once, as after a change of state; callable on the event loop only."""
        self._beat_wanted.set()

    async def _drain(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._guarded(self._send_waiting())

    async def _send_waiting(self) -> None:
        for publisher in self._publishers:
            subject = events_subject(publisher.model, publisher.source)
            while (data := publisher.take()) is not None:
                if await self._bus.publish(subject, data):
                    self.sent += 1
                else:
                    self.lost += 1

    async def _beat_forever(self) -> None:
        while True:
            self._beat_wanted.clear()
            await self._guarded(self._send_beat())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat_wanted.wait(), self._interval_s)

    async def _send_beat(self) -> None:
        beat = self._beat()
        # What the beat counts must be on its way before it, or it would look like a loss.
        await self._send_waiting()
        beat.sent_at = time.time()
        if await self._bus.publish(beat_subject(beat.worker), encode_beat(beat)):
            self.beats += 1

    async def _guarded(self, step: Coroutine[None, None, None]) -> None:
        """Run a step; a worker must not fall silent because one went wrong."""
        try:
            await step
        except Exception:
            self.internal_errors += 1
            logger.exception("plane.internal_error")

    # -- control ---------------------------------------------------------------------------------------------------

    def _asked(self, publisher: EventPublisher, incoming: Incoming) -> None:
        if not incoming.reply:
            self.rejected_requests += 1
            return
        task = asyncio.create_task(self._guarded(self._answer(publisher, incoming)))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, publisher: EventPublisher, incoming: Incoming) -> None:
        try:
            request = control.decode_request(incoming.data)
        except ValueError as error:
            self.rejected_requests += 1
            logger.warning("control.rejected: %s", error)
            reply: control.Reply = control.Refused("malformed", str(error))
        else:
            if isinstance(request, control.EventsSince):
                reply = self._events_since(publisher, request)
            else:
                reply = await self._snapshot_part(publisher, request)
        await self._bus.publish(incoming.reply, control.encode(reply))

    def _events_since(self, publisher: EventPublisher, request: control.EventsSince) -> control.Reply:
        messages = publisher.events_since(request.epoch, request.seq)
        if messages is None:
            state = publisher.state()
            return control.TooOld(state.epoch, state.seq)
        room = self._bus.max_payload - _HEADROOM
        fitting: list[bytes] = []
        for message in messages:
            room -= len(message) + 8
            if room < 0:
                break
            fitting.append(message)
        if messages and not fitting:
            state = publisher.state()
            return control.TooOld(state.epoch, state.seq)
        return control.Events(fitting, more=len(fitting) < len(messages))

    async def _snapshot_part(self, publisher: EventPublisher, request: control.SnapshotChunk) -> control.Reply:
        if not request.snapshot:
            name = f"{publisher.epoch}-{next(self._snapshot_ids)}"
            # Copying and packing a large set takes a while; the loop serves HTTP meanwhile.
            self._snapshots[name] = await asyncio.to_thread(self._pack, name, publisher)
            while len(self._snapshots) > _KEPT_SNAPSHOTS:
                self._snapshots.popitem(last=False)
            return self._snapshots[name][0] if name in self._snapshots else control.Refused("gone", "ask again")
        parts = self._snapshots.get(request.snapshot)
        if parts is None:
            return control.Refused("gone", f"snapshot {request.snapshot!r} is no longer kept; begin a new one")
        if not 0 <= request.chunk < len(parts):
            return control.Refused("chunk", f"chunk {request.chunk} is not in 0..{len(parts) - 1}")
        return parts[request.chunk]

    def _pack(self, name: str, publisher: EventPublisher) -> list[control.SnapshotPart]:
        """Cut a snapshot into parts that fit one message each; parents come before children."""
        state, blocks = publisher.snapshot()
        size = max(1, (self._bus.max_payload - _HEADROOM) // 16)
        pieces = [
            (tier, engine[start : start + size], sequence[start : start + size])
            for tier, engine, sequence in blocks.members()
            for start in range(0, len(engine), size)
        ] or [(0, np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64))]
        return [
            control.SnapshotPart(
                name,
                state.epoch,
                state.seq,
                state.blocks,
                state.digest,
                chunk,
                len(pieces),
                tier,
                pack_hashes(engine),
                pack_hashes(sequence),
            )
            for chunk, (tier, engine, sequence) in enumerate(pieces)
        ]
