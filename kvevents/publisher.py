"""The engine's side of one source: takes DynamoHelper events on the engine's thread, never blocks, keeps the truth."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvevents.block_set import BlockSet
from kvevents.hashing import as_tokens, sequence_hashes
from kvevents.messages import Cleared, Removed, Stored, Tier, encode_event, encode_message, pack_hashes
from kvevents.types import SourceId

_MESSAGE_BYTES = 256 * 1024
"""A message is closed once it is half as long, so that it stays far below a server's max payload (1 MiB by default)."""


class SourceState(NamedTuple):
    """A source's place in its stream."""

    epoch: int
    seq: int
    blocks: int
    digest: int


class Snapshot(NamedTuple):
    """The whole set at one moment."""

    state: SourceState
    blocks: BlockSet


class EventPublisher:
    """One source's stream and the authoritative set behind it.

    `listener` and `end_step` are called on the engine's thread; `take`, `snapshot`, `events_since` and `state` on any.
    When the queue is full a message is dropped and counted: the hole in seq and the digest tell consumers, who ask
    for what they missed.

    Args:
        source: worker and data-parallel rank.
        model: the served model's name.
        block_size: tokens in a block.
        epoch: names this incarnation; None: the start time in ns.
        queue_messages: messages that may wait for the bus.
        ring_messages: messages kept for `events_since`; also bounded by `ring_bytes`.
        send_tokens: carry the token ids of stored blocks in the messages.
    """

    def __init__(
        self,
        source: SourceId,
        model: str,
        block_size: int,
        *,
        epoch: int | None = None,
        queue_messages: int = 4096,
        ring_messages: int = 4096,
        ring_bytes: int = 32 * 1024 * 1024,
        send_tokens: bool = True,
        lora: str = "",
        salt: str = "",
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block holds at least 1 token")
        if epoch is not None and not 1 <= epoch < 2**64:
            raise ValueError(f"epoch is {epoch}; it lies in 1..2^64-1, the start time in ns is a good one")
        self.source, self.model, self.block_size = source, model, block_size
        self.epoch = time.time_ns() if epoch is None else epoch
        self._lora, self._salt = lora, salt
        self._send_tokens = send_tokens
        self._message_bytes = _MESSAGE_BYTES
        self._lock = threading.Lock()
        self._seq = 0
        self._blocks = BlockSet()
        self._events: list[bytes] = []
        self._event_bytes = 0
        self._queue: deque[bytes] = deque()
        self._queue_messages = queue_messages
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_messages, self._ring_bytes, self._ring_size = ring_messages, ring_bytes, 0
        self._wake: Callable[[], None] | None = None
        self.messages = 0
        self.dropped = 0
        """Messages dropped because the queue was full."""
        self.rejected: dict[str, int] = {}
        """Payloads of the engine that could not be announced, by reason."""

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def listener(self, kind: str, payload: dict[str, Any]) -> None:
        """Hear one KV-cache event (a `KVEventListener` of the context).

        Raises:
            ValueError: unknown kind, or a payload whose counts disagree; it is counted in `rejected` as well.
        """
        if kind == "stored":
            self._stored(payload)
        elif kind == "removed":
            self._removed(payload)
        elif kind == "cleared":
            with self._lock:
                self._blocks.clear()
                self._append(encode_event(Cleared()))
        else:
            self._reject("kind", f"event kind {kind!r} is unknown; stored, removed and cleared are known")

    def end_step(self) -> None:
        """Close the engine step: what was heard since the last call leaves as one message (large steps: several)."""
        if self._events:
            with self._lock:
                self._close()
            self._notify()

    def _stored(self, payload: dict[str, Any]) -> None:
        engine = self._engine_hashes(payload)
        try:
            tokens = as_tokens(payload["token_ids"])
        except (KeyError, ValueError) as error:
            self._reject("tokens", f"stored: token_ids: {error}")
        if len(tokens) != len(engine) * self.block_size:
            self._reject(
                "token_count",
                f"stored: {len(engine)} blocks of {self.block_size} tokens need {len(engine) * self.block_size} "
                f"token_ids, got {len(tokens)}",
            )
        if len(set(payload["block_hashes"])) != len(engine):
            self._reject("duplicate_hash", "stored: block_hashes names a block twice")
        if "parent_hash" not in payload:
            self._reject("parent_hash", "stored: parent_hash is missing; None says that the blocks begin a prompt")
        parent = payload["parent_hash"] or None
        parent_sequence: int | None = None
        if parent is not None:
            parent_sequence = self._blocks.sequence_hash(parent)
            if parent_sequence is None:
                self._reject("unknown_parent", f"stored: parent_hash {parent} was never stored, or is removed")
        sequence = sequence_hashes(tokens, self.block_size, lora=self._lora, salt=self._salt, parent=parent_sequence)
        with self._lock:
            step = self._per_event(16 + 4 * self.block_size * self._send_tokens)
            for start in range(0, len(engine), step):
                part = slice(start, start + step)
                self._store_part(parent, engine[part], sequence[part], tokens[start * self.block_size :])
                parent = int(engine[part][-1])

    def _engine_hashes(self, payload: dict[str, Any]) -> NDArray[np.uint64]:
        try:
            return np.array(payload["block_hashes"], dtype=np.uint64)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            self._reject("block_hashes", f"block_hashes must be a list of numbers in 0..2^64-1 ({error!r})")

    def _store_part(
        self,
        parent: int | None,
        engine: NDArray[np.uint64],
        sequence: NDArray[np.uint64],
        tokens: NDArray[np.uint32],
    ) -> None:
        self._blocks.store(engine, sequence)
        packed = tokens[: len(engine) * self.block_size].astype("<u4", copy=False).tobytes()
        self._append(
            encode_event(
                Stored(
                    parent,
                    pack_hashes(engine),
                    pack_hashes(sequence),
                    self.block_size,
                    Tier.DEVICE,
                    self._lora,
                    self._salt,
                    packed if self._send_tokens else None,
                )
            )
        )

    def _removed(self, payload: dict[str, Any]) -> None:
        engine = self._engine_hashes(payload)
        with self._lock:
            step = self._per_event(8)
            for start in range(0, len(engine), step):
                part = engine[start : start + step]
                self._blocks.remove(part)
                self._append(encode_event(Removed(pack_hashes(part))))

    def _per_event(self, block_bytes: int) -> int:
        """Blocks in one event, so that two events fit a message."""
        return max(1, self._message_bytes // 2 // block_bytes)

    def _append(self, event: bytes) -> None:
        """Add an event that the set has taken in already; so a message is closed behind it, never before it."""
        self._events.append(event)
        self._event_bytes += len(event)
        if self._event_bytes > self._message_bytes // 2:
            self._close()

    def _close(self) -> None:
        self._seq += 1
        data = encode_message(self.epoch, self._seq, time.time(), self._events, len(self._blocks), self._blocks.digest)
        self._events, self._event_bytes = [], 0
        self.messages += 1
        self._ring.append((self._seq, data))
        self._ring_size += len(data)
        while len(self._ring) > self._ring_messages or self._ring_size > self._ring_bytes:
            self._ring_size -= len(self._ring.popleft()[1])
        if len(self._queue) >= self._queue_messages:
            self.dropped += 1
        else:
            self._queue.append(data)

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()

    def _reject(self, reason: str, detail: str) -> NoReturn:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        raise ValueError(detail)

    # -- any thread ------------------------------------------------------------------------------------------------

    def on_message(self, wake: Callable[[], None] | None) -> None:
        """Call `wake` (on the engine's thread) whenever a message waits."""
        self._wake = wake

    def fit(self, max_payload: int) -> None:
        """Keep messages from now on below what the bus can carry."""
        self._message_bytes = max(1024, min(_MESSAGE_BYTES, max_payload - 1024))

    @property
    def queued(self) -> int:
        """Messages that wait for the bus."""
        return len(self._queue)

    @property
    def blocks(self) -> int:
        """Members of the set, open events included."""
        return len(self._blocks)

    def take(self) -> bytes | None:
        """Remove and return the next message for the bus, or None."""
        try:
            return self._queue.popleft()
        except IndexError:
            return None

    def state(self) -> SourceState:
        """Epoch, seq, blocks and digest after the last closed message."""
        with self._lock:
            self._close_open_events()
            return SourceState(self.epoch, self._seq, len(self._blocks), self._blocks.digest)

    def snapshot(self) -> Snapshot:
        """A copy of the whole set, with the place in the stream that it stands for."""
        with self._lock:
            self._close_open_events()
            state = SourceState(self.epoch, self._seq, len(self._blocks), self._blocks.digest)
            return Snapshot(state, self._blocks.copy())

    def events_since(self, epoch: int, seq: int) -> list[bytes] | None:
        """The messages after `seq`, oldest first; None if the ring no longer holds them or the epoch is another."""
        with self._lock:
            if epoch != self.epoch or seq > self._seq:
                return None
            if seq == self._seq:
                return []
            if not self._ring or self._ring[0][0] > seq + 1:
                return None
            return [data for number, data in self._ring if number > seq]

    def check_integrity(self) -> None:
        """Assert that the authoritative set agrees with itself.

        Raises:
            AssertionError: what differs.
        """
        with self._lock:
            self._blocks.check_integrity()
            numbers = [number for number, _ in self._ring]
            assert numbers == list(range(self._seq - len(numbers) + 1, self._seq + 1)), "the ring has a hole"

    def _close_open_events(self) -> None:
        """The set already holds what an open step has heard, so a state can only be told at a closed message."""
        if self._events:
            self._close()
            self._notify()
