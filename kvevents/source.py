"""One source as a consumer sees it: a state machine that always knows whether its view equals the source's cache.

Pure: it gets messages, beats, repairs and the time, and writes into the sink; the consumer asks for repairs.
(Protocol: docs/event-plane.md.)
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvevents.block_set import BlockSet, Change
from kvevents.message_buffer import MessageBuffer
from kvevents.messages import (
    Cleared,
    Event,
    Message,
    RejectedMessage,
    Removed,
    Stored,
    decode_events,
    unpack_hashes,
)
from kvevents.sink import IndexSink
from kvevents.types import SourceBeat, SourceId

_REORDER_S = 0.1
"""How long a hole may wait for a message that is merely late."""
TIERS = 256
"""Tiers beyond the known ones may come; their number stays bounded."""


class State(enum.StrEnum):
    """Where a source is; it serves its last view in every state but `unknown` and `gone`."""

    UNKNOWN = "unknown"
    SYNCING = "syncing"
    LIVE = "live"
    SUSPECT = "suspect"
    GONE = "gone"


class Trust(enum.StrEnum):
    """How far a view may be believed."""

    EXACT = "exact"
    """Count and digest agree with the source's."""
    DEGRADED = "degraded"
    """The last view is served while it is repaired."""
    FALLBACK = "fallback"
    """Nothing is known yet."""


@dataclass(slots=True)
class SourceCounters:
    """What has happened to a source since it was first seen."""

    applied: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    gaps: int = 0
    repairs: int = 0
    snapshots: int = 0
    restarts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Messages not applied, by reason: duplicate, late_epoch, event, block_size, ..."""


class Source:
    """The view of one (worker, dp_rank) on one model and block size."""

    def __init__(
        self, source_id: SourceId, model: str, block_size: int, sink: IndexSink, *, lease_s: float = 3.0
    ) -> None:
        self.id, self.model, self.block_size = source_id, model, block_size
        self.state = State.UNKNOWN
        self.reason = "no heartbeat yet"
        self.since = 0.0
        """When the present state began."""
        self.epoch = 0
        self.seq = 0
        self.handle: int = sink.open(source_id, model, block_size)
        self.counters = SourceCounters()
        self._sink = sink
        self._lease_s = lease_s
        self._view = BlockSet()
        self._buffer = MessageBuffer()
        self._buffer_epoch = 0
        """The incarnation that counts now; it differs from `epoch` while the old one's view is still served."""
        self._retired: deque[int] = deque(maxlen=16)
        """Incarnations that a lower epoch has replaced; whatever is late of them must not come back as newer."""
        self._hole_since: float | None = None
        self._lag_since: float | None = None
        self._told_seq = 0
        """The highest seq that a heartbeat has told, while the view lags behind it."""
        self._must_snapshot = False
        self._heard_at = 0.0

    # -- what others read ------------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        if self.state is State.LIVE and self._hole_since is None and self._lag_since is None:
            return Trust.EXACT
        return Trust.DEGRADED if self.epoch else Trust.FALLBACK

    @property
    def blocks(self) -> int:
        """Members of the view, over all tiers."""
        return len(self._view)

    @property
    def digest(self) -> int:
        return self._view.digest

    @property
    def newest_epoch(self) -> int:
        """The incarnation that counts now; `epoch` is the one whose view is served."""
        return self._buffer_epoch

    @property
    def lag(self) -> int:
        """Messages that the source is known to have sent and that are not in the view."""
        if self._buffer_epoch != self.epoch:
            return len(self._buffer)
        return max(0, self._told_seq - self.seq, self._buffer.newest - self.seq)

    @property
    def gaps(self) -> int:
        return self.counters.gaps

    @property
    def repairs(self) -> int:
        return self.counters.repairs

    @property
    def needs_repair(self) -> bool:
        return self.state in (State.SYNCING, State.SUSPECT)

    @property
    def wants_snapshot(self) -> bool:
        """Whether a repair must take the whole set, because the messages after `seq` would not mend the view."""
        return self._must_snapshot or self._buffer_epoch != self.epoch

    def device_hashes(self) -> NDArray[np.uint64]:
        """The sequence hashes that the view holds; what the sink holds of this source."""
        return self._view.device_hashes()

    # -- what arrives ----------------------------------------------------------------------------------------------

    def hear(self, message: Message, now: float) -> None:
        """Take a message from the event subject."""
        if self.state is State.GONE:
            self.counters.rejected["gone"] += 1
            return
        newest = self._buffer_epoch
        if message.epoch < newest or message.epoch in self._retired:
            self.counters.rejected["late_epoch"] += 1
            return
        self._heard_at = now
        if message.epoch > newest:
            self._begin_epoch(message.epoch, now)
            if message.seq == 1:
                # The first message of an incarnation is all of its truth.
                self._replace(BlockSet(), message.epoch, 0, now)
        if message.epoch == self.epoch and message.seq <= self.seq:
            self.counters.rejected["duplicate"] += 1
            return
        if message.epoch == self.epoch and self.state is State.LIVE and message.seq == self.seq + 1:
            if self._apply(message, now):
                self._drain(now)
            return
        self._keep(message, now)
        if message.epoch == self.epoch and not self._must_snapshot:
            self._drain(now)

    def beat(self, beat: SourceBeat, now: float) -> None:
        """Compare the view with a heartbeat's account of the source."""
        if self.state is State.GONE:
            return
        newest = self._buffer_epoch
        if beat.epoch in self._retired or (beat.epoch < newest and now - self._heard_at < self._lease_s):
            self.counters.rejected["late_epoch"] += 1
            return
        self._heard_at = now
        if beat.epoch < newest:
            self._retired.append(newest)
        if beat.epoch != newest:
            # A lower epoch after a lease of silence is a new incarnation whose clock went back.
            self._begin_epoch(beat.epoch, now)
        if beat.epoch != self.epoch:
            if beat.seq == 0 and beat.blocks == 0:
                self._replace(BlockSet(), beat.epoch, 0, now)
                self._drain(now)
            return
        if self.state is not State.LIVE:
            return
        if beat.seq == self.seq:
            if beat.blocks != len(self._view) or beat.digest != self._view.digest:
                self._suspect("digest of a heartbeat disagrees", now, snapshot=True)
        elif beat.seq > self.seq:
            self._told_seq = max(self._told_seq, beat.seq)
            if self._lag_since is None:
                self._lag_since = now

    def tick(self, now: float) -> None:
        """Let time pass: a hole or a lag that lasted too long makes the source suspect."""
        if self.state is not State.LIVE:
            return
        if self._hole_since is not None and now - self._hole_since >= _REORDER_S:
            self.counters.gaps += 1
            self._suspect(f"a hole after seq {self.seq}", now)
        elif self._lag_since is not None and now - self._lag_since >= _REORDER_S:
            self.counters.gaps += 1
            self._suspect(f"heartbeats are ahead of seq {self.seq}", now)

    def distrust(self, reason: str, now: float) -> None:
        """Make a live source suspect, as after a reconnect or a message that could not be read."""
        if self.state is State.LIVE:
            self._suspect(reason, now)

    # -- repairs ---------------------------------------------------------------------------------------------------

    def repaired_by_events(self, messages: list[Message], now: float) -> bool:
        """Apply the messages that were missed; True if the source is live again.

        A hole that is left among the buffered messages is found by `tick`.
        """
        if not self.needs_repair:
            return True
        if self.wants_snapshot:
            return False
        for message in messages:
            if message.epoch == self.epoch and message.seq == self.seq + 1 and not self._apply(message, now):
                return False
        self._buffer.forget_until(self.seq)
        self._enter(State.LIVE, "repaired by missed messages", now)
        self.counters.repairs += 1
        self._drain(now)
        return True

    def repaired_by_snapshot(self, view: BlockSet, epoch: int, seq: int, now: float) -> bool:
        """Swap in a whole set that stands for message `seq` of `epoch`; the caller has checked its digest.

        False: the set is older than what is known already.
        """
        if not self.needs_repair:
            return True
        if epoch < self._buffer_epoch or epoch in self._retired or (epoch == self.epoch and seq < self.seq):
            return False
        if epoch > self._buffer_epoch:
            self._begin_epoch(epoch, now)
        self._replace(view, epoch, seq, now)
        self.counters.repairs += 1
        self.counters.snapshots += 1
        self._drain(now)
        return True

    def leave(self, now: float) -> None:
        """Forget the source: its entries leave the sink."""
        if self.state is not State.GONE:
            self._enter(State.GONE, "silent beyond the grace period, or stopped", now)
            self._sink.drop(self.handle)
            self._view = BlockSet()
            self._buffer.clear()

    def check_integrity(self) -> None:
        """Assert that the view agrees with itself and with its state.

        Raises:
            AssertionError: what differs.
        """
        self._view.check_integrity()
        if self.state is State.LIVE:
            assert not self._buffer or self._buffer.oldest > self.seq + 1, (
                "a live source waits with an applicable message"
            )
            assert bool(self._buffer) == (self._hole_since is not None), "hole and buffer disagree"
            assert (self._told_seq > self.seq) == (self._lag_since is not None), "lag and heartbeats disagree"
        self._buffer.check_integrity()

    # -- internals -------------------------------------------------------------------------------------------------

    def _enter(self, state: State, reason: str, now: float) -> None:
        self.state, self.reason, self.since = state, reason, now

    def _suspect(self, reason: str, now: float, *, snapshot: bool = False) -> None:
        self._must_snapshot = self._must_snapshot or snapshot
        self._forget_delays()
        self._enter(State.SUSPECT, reason, now)

    def _begin_epoch(self, epoch: int, now: float) -> None:
        """A new incarnation: its messages are buffered while the old view goes on being served."""
        if self.epoch:
            self.counters.restarts += 1
        self._buffer.clear()
        self._buffer_epoch = epoch
        self._forget_delays()
        self._enter(State.SYNCING, "a new incarnation" if self.epoch else "first contact", now)

    def _replace(self, view: BlockSet, epoch: int, seq: int, now: float) -> None:
        self._view = view
        self.epoch = self._buffer_epoch = epoch
        self.seq = seq
        self._must_snapshot = False
        self._forget_delays()
        self._buffer.forget_until(seq)
        self._sink.replace(self.handle, view.device_hashes())
        self._enter(State.LIVE, "in step", now)

    def _keep(self, message: Message, now: float) -> None:
        """Buffer a message that can't be applied yet."""
        refused = self._buffer.keep(message)
        if refused is not None:
            self.counters.rejected[refused] += 1
        if self.state is State.LIVE and self._hole_since is None:
            self._hole_since = now

    def _forget_delays(self) -> None:
        self._hole_since = self._lag_since = None
        self._told_seq = 0

    def _drain(self, now: float) -> None:
        """Apply what follows directly; a suspect source heals if the missing message has merely been late."""
        while self._buffer_epoch == self.epoch and (message := self._buffer.take(self.seq + 1)):
            if not self._apply(message, now):
                return
            if self.state is State.SUSPECT and not self._buffer:
                self._enter(State.LIVE, "the missing message was late", now)
        if self.state is State.LIVE:
            if not self._buffer:
                self._hole_since = None
            elif self._hole_since is None:
                self._hole_since = now

    def _apply(self, message: Message, now: float) -> bool:
        """Apply one message to view and sink; False if it made the source suspect."""
        try:
            changes = [self._apply_event(event) for event in self._checked(decode_events(message))]
        except RejectedMessage as error:
            self.counters.rejected[error.reason] += 1
            self._suspect(str(error), now, snapshot=True)
            return False
        for change in changes:
            if len(change.added):
                self._sink.store(self.handle, change.added)
                self.counters.blocks_stored += len(change.added)
            if len(change.removed):
                self._sink.remove(self.handle, change.removed)
                self.counters.blocks_removed += len(change.removed)
        self.seq = message.seq
        self.counters.applied += 1
        if self._lag_since is not None:
            self._lag_since = now if self.seq < self._told_seq else None
        if message.blocks != len(self._view) or message.digest != self._view.digest:
            self._suspect(f"digest disagrees after seq {message.seq}", now, snapshot=True)
            return False
        return True

    def _checked(self, events: list[Event]) -> list[Event]:
        """Refuse a message before any of its events is applied, if one of them can't be."""
        for event in events:
            if isinstance(event, Stored):
                if event.block_size != self.block_size:
                    raise RejectedMessage(
                        "block_size", f"a block of {event.block_size} tokens from a source of {self.block_size}"
                    )
                if len(event.engine_hashes) != len(event.sequence_hashes):
                    raise RejectedMessage("hash_count", "engine and sequence hashes differ in number")
            if isinstance(event, Cleared):
                continue
            if len(event.engine_hashes) % 8:
                raise RejectedMessage("packed_length", f"{len(event.engine_hashes)} bytes of hashes; each takes 8")
            if not 0 <= event.tier < TIERS:
                raise RejectedMessage("tier", f"tier {event.tier} is not in 0..{TIERS - 1}")
        return events

    def _apply_event(self, event: Event) -> Change:
        if isinstance(event, Stored):
            return self._view.store(
                unpack_hashes(event.engine_hashes), unpack_hashes(event.sequence_hashes), event.tier
            )
        if isinstance(event, Removed):
            return self._view.remove(unpack_hashes(event.engine_hashes), event.tier)
        assert isinstance(event, Cleared)
        held = self._view.device_hashes()
        self._view.clear()
        return Change(np.empty(0, dtype=np.uint64), held)
