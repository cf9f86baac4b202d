"""The router's side of the bus: discovers workers by their beats, follows their sources, repairs what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvevents import repair
from kvevents.bus import Bus, Incoming, Subscription
from kvevents.messages import RejectedMessage, decode_message
from kvevents.sink import IndexSink
from kvevents.source import Source, State, Trust
from kvevents.subjects import BEATS_ALL, EVENTS_ALL, parse_events_subject
from kvevents.types import PROTOCOL_VERSION, Beat, SourceBeat, SourceId, decode_beat

logger = logging.getLogger(__name__)

SourceView = Source
"""What the router reads of a source: state, trust, epoch, seq, blocks, digest, gaps, repairs, handle."""

_TICK_S = 0.05
_MAX_WORKERS = 4096
_MAX_RANKS = 64


@dataclass(slots=True)
class WorkerView:
    """A worker as its last heartbeat described it."""

    beat: Beat
    heard_at: float
    lease_s: float
    alive: bool = True
    sources: dict[int, Source] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it may get new prompts."""
        return self.alive and self.beat.state == "ready"

    @property
    def draining(self) -> bool:
        return self.beat.state == "draining"

    @property
    def silent(self) -> bool:
        return not self.alive


class EventConsumer:
    """Follows every worker on the bus and keeps the sink equal to their caches.

    All methods belong to one event loop; nothing that arrives raises out of here.

    Args:
        bus: the bus.
        sink: what the sources write into.
        clock: monotonic seconds.
        rng: for jitter.
        lease_s: a worker silent for longer gets no new prompts.
        grace_s: a worker silent for longer is gone, with its entries.
        on_change: called after every heartbeat and every change of a worker's life.
        concurrent_repairs: bounds a storm at a cold start.
    """

    def __init__(
        self,
        bus: Bus,
        sink: IndexSink,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        lease_s: float = 3.0,
        grace_s: float = 30.0,
        on_change: Callable[[WorkerView], None] | None = None,
        concurrent_repairs: int = 8,
    ) -> None:
        self._bus, self._sink, self._clock, self._rng = bus, sink, clock, rng
        self._lease_s, self._grace_s = lease_s, grace_s
        self._on_change = on_change
        self._workers: dict[str, WorkerView] = {}
        self._by_source: dict[SourceId, Source] = {}
        self._subscriptions: list[Subscription] = []
        self._ticker: asyncio.Task[None] | None = None
        self._repairs: dict[SourceId, asyncio.Task[None]] = {}
        self._repair_slots = asyncio.Semaphore(concurrent_repairs)
        self._changed = asyncio.Event()
        self.beats = 0
        self.messages = 0
        self.rejected: Counter[str] = Counter()
        """What arrived and was not used, by reason; sources count their own."""
        self.repair_failures: Counter[str] = Counter()
        self.internal_errors = 0
        """Failures of our own, or of `on_change`, that would have ended the plane."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe, and begin to follow."""
        self._subscriptions = [
            await self._bus.subscribe(EVENTS_ALL, lambda incoming: self._guarded(self._event_arrived, incoming)),
            await self._bus.subscribe(BEATS_ALL, lambda incoming: self._guarded(self._beat_arrived, incoming)),
        ]
        self._bus.on_reconnect(self._reconnected)
        self._ticker = asyncio.create_task(self._tick_forever())

    async def stop(self) -> None:
        """Stop following; the sink keeps what it holds."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        tasks = [task for task in (self._ticker, *self._repairs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._subscriptions, self._ticker = [], None
        self._repairs.clear()

    def workers(self) -> dict[str, WorkerView]:
        """Every worker that is known, by name; do not change it."""
        return self._workers

    def sources(self) -> dict[SourceId, Source]:
        """Every source that is known; do not change it."""
        return self._by_source

    async def settled(self, timeout_s: float, *, workers: int = 1) -> None:
        """Wait until at least `workers` workers are known and every source is exact.

        Raises:
            TimeoutError: not in time; says which source is not.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_settled(workers):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            states = {f"{s.worker}/{s.dp_rank}": f"{v.state}: {v.reason}" for s, v in self._by_source.items()}
            raise TimeoutError(f"not settled within {timeout_s} s; sources: {states}") from None

    def _is_settled(self, workers: int) -> bool:
        return len(self._workers) >= workers and all(source.trust is Trust.EXACT for source in self._by_source.values())

    def check_integrity(self) -> None:
        """Assert that every source agrees with itself.

        Raises:
            AssertionError: what differs.
        """
        for source in self._by_source.values():
            source.check_integrity()

    # -- arrivals --------------------------------------------------------------------------------------------------

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        """Run a step; the plane goes on whatever happens in it."""
        try:
            step(*arguments)
        except Exception:
            self.internal_errors += 1
            logger.exception("consumer.internal_error")

    def _event_arrived(self, incoming: Incoming) -> None:
        self.messages += 1
        source = None
        try:
            model, source_id = parse_events_subject(incoming.subject)
            source = self._by_source.get(source_id)
            message = decode_message(incoming.data)
        except RejectedMessage as error:
            self.rejected[error.reason] += 1
            if source is not None:
                # Whatever it was, the source meant something by it.
                source.distrust(f"a message could not be read: {error}", self._clock())
            return
        except ValueError:
            self.rejected["subject"] += 1
            return
        if source is None:
            # Its worker's next heartbeat opens it, and the first repair brings what this message said.
            self.rejected["unknown_source"] += 1
            return
        if source.model != model:
            self.rejected["model"] += 1
            return
        source.hear(message, self._clock())
        self._after(source)

    def _beat_arrived(self, incoming: Incoming) -> None:
        try:
            beat = decode_beat(incoming.data)
        except (msgspec.DecodeError, RecursionError):
            self.rejected["beat_malformed"] += 1
            return
        problem = self._problem_with(beat)
        if problem:
            self.rejected[problem] += 1
            return
        self.beats += 1
        now = self._clock()
        view = self._workers.get(beat.worker)
        if view is None:
            view = self._workers[beat.worker] = WorkerView(beat, now, self._lease_s)
            logger.info("worker.found: %s at %s", beat.worker, beat.address)
        if beat.state == "stopped" and self._is_late(view, beat):
            self.rejected["late_beat"] += 1
            return
        view.beat, view.heard_at, view.alive = beat, now, True
        if beat.state == "stopped":
            self._forget(view)
            return
        self._match_sources(view, now)
        self._tell(view)

    def _problem_with(self, beat: Beat) -> str | None:
        if beat.version != PROTOCOL_VERSION:
            return "beat_version"
        if beat.block_size < 1 or len(beat.sources) > _MAX_RANKS or not math.isfinite(beat.sent_at):
            return "beat_range"
        if any(not _in_range(entry) for entry in beat.sources):
            return "beat_range"
        if len({entry.dp_rank for entry in beat.sources}) != len(beat.sources):
            return "beat_ranks"
        if beat.worker not in self._workers and len(self._workers) >= _MAX_WORKERS:
            return "too_many_workers"
        return None

    def _is_late(self, view: WorkerView, beat: Beat) -> bool:
        """Whether a goodbye is that of an incarnation which another one has replaced already."""
        return any(
            entry.dp_rank in view.sources and entry.epoch < view.sources[entry.dp_rank].newest_epoch
            for entry in beat.sources
        )

    def _match_sources(self, view: WorkerView, now: float) -> None:
        """Open, update and close a worker's sources as its heartbeat lists them."""
        beat = view.beat
        told = {entry.dp_rank: entry for entry in beat.sources}
        for rank in [rank for rank in view.sources if rank not in told]:
            self._close(view, rank, now)
        for rank, entry in told.items():
            source = view.sources.get(rank)
            if source is not None and (source.model, source.block_size) != (beat.model, beat.block_size):
                # Another model or block size is another cache: nothing of the old one can be matched.
                self._close(view, rank, now)
                source = None
            if source is None:
                source_id = SourceId(beat.worker, rank)
                source = Source(source_id, beat.model, beat.block_size, self._sink, lease_s=self._lease_s)
                view.sources[rank] = self._by_source[source_id] = source
            source.beat(entry, now)
            self._after(source)

    # -- time ------------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._guarded(self._tick)

    def _tick(self) -> None:
        now = self._clock()
        for source in list(self._by_source.values()):
            source.tick(now)
            self._after(source)
        for view in list(self._workers.values()):
            silence = now - view.heard_at
            if silence > self._grace_s:
                self._forget(view)
            elif view.alive and silence > self._lease_s:
                view.alive = False
                logger.warning("worker.silent: %s for %.1f s", view.beat.worker, silence)
                self._tell(view)

    def _reconnected(self) -> None:
        now = self._clock()
        for source in self._by_source.values():
            source.distrust("the bus reconnected", now)
            self._after(source)

    def _forget(self, view: WorkerView) -> None:
        """A worker that said goodbye or is silent for too long: its entries go."""
        logger.info("worker.gone: %s", view.beat.worker)
        now = self._clock()
        for rank in list(view.sources):
            self._close(view, rank, now)
        view.alive = False
        del self._workers[view.beat.worker]
        self._tell(view)

    def _close(self, view: WorkerView, rank: int, now: float) -> None:
        source = view.sources.pop(rank)
        source.leave(now)
        self._by_source.pop(source.id, None)

    def _tell(self, view: WorkerView) -> None:
        self._changed.set()
        if self._on_change is not None:
            self._on_change(view)

    # -- repairs ---------------------------------------------------------------------------------------------------

    def _after(self, source: Source) -> None:
        """Start a repair if the source wants one and none is under way."""
        if source.needs_repair:
            if source.id not in self._repairs:
                task = asyncio.create_task(self._repair(source))
                self._repairs[source.id] = task
                task.add_done_callback(lambda _: self._repairs.pop(source.id, None))
        else:
            self._changed.set()

    async def _repair(self, source: Source) -> None:
        """Ask until the source is in step again, with growing, jittered pauses."""
        pause_s = 0.02
        while source.needs_repair and self._by_source.get(source.id) is source:
            async with self._repair_slots:
                failure = await repair.attempt(self._bus, source, self._clock)
            if failure is not None:
                self.repair_failures[failure] += 1
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                pause_s = min(pause_s * 2, 1.0)
        if source.state is State.LIVE:
            self._changed.set()


def _in_range(entry: SourceBeat) -> bool:
    limit = 2**64
    return (
        0 <= entry.dp_rank < 2**31
        and 1 <= entry.epoch < limit
        and 0 <= entry.seq < limit
        and entry.blocks >= 0
        and 0 <= entry.digest < limit
    )
