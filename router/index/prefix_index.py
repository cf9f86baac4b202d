"""Which source holds which prefix, for one model and block size: exact longest-prefix match over any number
of sources.

Sources live in groups of 64; each group is one compiled table (`table.py`) with a membership bit per
source, and a match visits a group only as deep as one of its sources still follows the prompt.  A whole
source is dropped or replaced in constant time: its bit is *retired* (masked out of every answer at once)
and swept out of the table a few thousand slots at a time, before it is reused.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.index import table as t

_MIN_CAPACITY = 1 << 10
_MAX_FILL = 0.7
_BATCH = 4096
"""Hashes handled by one compiled call, so that the table can grow between calls."""
_DRAIN_PER_HASH = 8
_LEAST_DRAIN = 64
"""Entries of a growing table that move with each stored hash, and at least with each store."""
_UPKEEP_ENTRIES = 4096
"""Entries drained or swept by one idle step: some tens of microseconds."""


class Match(NamedTuple):
    """Sources that hold at least the first block: handles int64[n] and the length of the prefix that each
    holds, int64[n] blocks.
    """

    sources: NDArray[np.int64]
    depths: NDArray[np.int64]

    def as_dict(self) -> dict[int, int]:
        """Handle -> blocks."""
        return dict(zip(self.sources.tolist(), self.depths.tolist(), strict=True))


NO_MATCH = Match(np.empty(0, np.int64), np.empty(0, np.int64))
"""What a prompt gets that no source has begun."""


class IntegrityError(AssertionError):
    """The index contradicts itself; the message names the group, what was counted and what is stored."""


class _Table(NamedTuple):
    """The two arrays of one table (`table.py`)."""

    entries: NDArray[np.uint64]
    slots: NDArray[np.uint32]

    @classmethod
    def of_capacity(cls, slots: int) -> "_Table":
        return cls(np.zeros((int(slots * _MAX_FILL) + 1, 2), np.uint64), np.zeros(slots, np.uint32))

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.slots.nbytes


_NO_TABLE = _Table(np.zeros((0, 2), np.uint64), np.zeros(0, np.uint32))


@dataclass(slots=True)
class _Group:
    """One table and the owners of its 64 bits."""

    new: _Table = field(default_factory=lambda: _Table.of_capacity(_MIN_CAPACITY))
    old: _Table = _NO_TABLE
    meta: NDArray[np.int64] = field(default_factory=t.new_meta)
    owners: NDArray[np.int64] = field(default_factory=lambda: np.full(64, -1, dtype=np.int64))
    live: int = 0
    retired: int = 0
    sweeping: int = 0
    filled: int = 0
    limit: int = int(_MIN_CAPACITY * _MAX_FILL)

    def take_bit(self, handle: int) -> int | None:
        """A bit for a source, or None when all 64 are live or not yet swept."""
        free = ~(self.live | self.retired) & (2**64 - 1)
        if not free:
            return None
        bit = (free & -free).bit_length() - 1
        self.live |= 1 << bit
        self.owners[bit] = handle
        return bit

    def retire_bit(self, bit: int) -> None:
        """Hide a source at once; its bits are cleared by later upkeep."""
        self.live &= ~(1 << bit)
        self.owners[bit] = -1
        if self.meta[t.COUNTS + bit]:
            self.retired |= 1 << bit
            self.meta[t.COUNTS + bit] = 0

    def store(self, hashes: NDArray[np.uint64], bit: int) -> None:
        """Set the bit on every hash; drains a growing table in step, so that no single call pays for the
        growth.
        """
        if self.filled + hashes.shape[0] > self.limit:
            self._grow(hashes.shape[0])
        self.filled = t.store(*self.new, *self.old, self.meta, hashes, bit)
        if self.old is not _NO_TABLE:
            self._drain(max(_LEAST_DRAIN, _DRAIN_PER_HASH * hashes.shape[0]))

    def upkeep(self, number: int) -> bool:
        """Drain or sweep up to `number` entries.  Returns True while there is more to do."""
        if self.old is not _NO_TABLE:
            self._drain(number)
            return True
        if not self.retired:
            return False
        if not self.sweeping:
            self.sweeping, self.meta[t.SWEEP_AT] = self.retired, 0
        if t.sweep(*self.new, self.meta, np.uint64(self.sweeping), number):
            self.retired &= ~self.sweeping
            self.sweeping = 0
            self._shrink_if_sparse()
        self.filled = int(self.meta[t.LIVE] + self.meta[t.TOMBSTONES])
        return bool(self.retired) or self.old is not _NO_TABLE

    def _grow(self, incoming: int) -> None:
        if self.old is not _NO_TABLE:
            self._drain(self.old.entries.shape[0])
            if self.filled + incoming <= self.limit:
                return
        self._rebuild(int(self.meta[t.LIVE]) + incoming)

    def _shrink_if_sparse(self) -> None:
        capacity = self.new.slots.shape[0]
        if capacity > _MIN_CAPACITY and self.meta[t.LIVE] < capacity // 8:
            self._rebuild(int(self.meta[t.LIVE]))

    def _rebuild(self, entries: int) -> None:
        """Start to move everything into a table that `entries` fill to at most one half; tombstones stay
        behind.
        """
        capacity = max(_MIN_CAPACITY, 1 << max(0, 2 * entries - 1).bit_length())
        self.old, self.new = self.new, _Table.of_capacity(capacity)
        self.meta[t.OLD_LIVE], self.meta[t.OLD_USED] = self.meta[t.LIVE], self.meta[t.USED]
        self.meta[[t.LIVE, t.USED, t.TOMBSTONES, t.DRAIN_AT]] = 0
        self.meta[t.FREE] = -1
        self.sweeping = 0
        self.filled, self.limit = 0, int(capacity * _MAX_FILL)

    def _drain(self, number: int) -> None:
        if t.drain(*self.new, self.old.entries, self.meta, np.uint64(self.retired), number):
            self.old = _NO_TABLE
        self.filled = int(self.meta[t.LIVE] + self.meta[t.TOMBSTONES])


class PrefixIndex:
    """Block membership of many sources, keyed by sequence hash.

    Not thread-safe: one owner, the event loop's thread.

    Every method is atomic between awaits.  Hash arrays are uint64[n], contiguous; other dtypes raise
    TypeError.
    """

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._places: dict[int, tuple[_Group, int]] = {}
        self._next_handle = 0
        self._found = np.zeros((64, 2), dtype=np.int64)

    def add_source(self, handle: int | None = None) -> int:
        """Open an empty source and return its handle (the next free int unless given).

        Raises ValueError when it is open already.
        """
        if handle is None:
            handle = self._next_handle
        if handle in self._places:
            raise ValueError(f"source {handle} is open already; drop it first")
        self._next_handle = max(self._next_handle, handle + 1)
        self._places[handle] = self._new_place(handle)
        return handle

    def has_source(self, handle: int) -> bool:
        """Whether a handle is open."""
        return handle in self._places

    def store(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Add blocks to a source; those it holds already change nothing.

        Raises KeyError for an unknown handle.
        """
        group, bit = self._places[source]
        if hashes.shape[0] <= _BATCH:
            group.store(_checked(hashes), bit)
            return
        for start in range(0, hashes.shape[0], _BATCH):
            group.store(_checked(hashes[start : start + _BATCH]), bit)

    def remove(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Take blocks from a source; those it does not hold change nothing.

        Raises KeyError for an unknown handle.
        """
        group, bit = self._places[source]
        t.remove(*group.new, *group.old, group.meta, _checked(hashes), bit)

    def replace(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Swap a source's whole set for another in one step: the new set is built beside the old, which
        serves until the swap.
        """
        before, old_bit = self._places[source]
        self._places[source] = self._new_place(source)
        self.store(source, hashes)
        before.retire_bit(old_bit)

    def drop(self, source: int) -> None:
        """Forget a source and close its handle, in constant time.  An unknown handle changes nothing."""
        place = self._places.pop(source, None)
        if place is not None:
            place[0].retire_bit(place[1])

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """Longest prefix of `hashes` (one prompt's sequence hashes, in order) that each source holds
        without a hole.
        """
        hashes = _checked(hashes)
        rows = []
        for group in self._groups:
            if group.live:
                live, found = np.uint64(group.live), self._found
                count = t.match(*group.new, *group.old, group.meta, hashes, live, group.owners, found)
                if count:
                    rows.append(found[:count].copy())
        if not rows:
            return NO_MATCH
        table = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return Match(table[:, 0], table[:, 1])

    def upkeep(self, number: int = _UPKEEP_ENTRIES) -> bool:
        """One bounded step of clearing dropped sources and finishing growth.

        Returns True while there is more to do.
        """
        more = False
        for group in self._groups:
            more |= group.upkeep(number)
        return more

    def blocks_of(self, source: int) -> int:
        """How many blocks a source holds.  Raises KeyError for an unknown handle."""
        group, bit = self._places[source]
        return int(group.meta[t.COUNTS + bit])

    def hashes_of(self, source: int) -> NDArray[np.uint64]:
        """Every block of a source, uint64[n], in no particular order; a scan of its table.

        Raises KeyError for an unknown handle.
        """
        group, bit = self._places[source]
        flag = np.uint64(1 << bit)
        return np.concatenate(
            [
                t.keys_of(group.new.entries, group.meta[t.USED], flag),
                t.keys_of(group.old.entries, group.old.entries.shape[0] and group.meta[t.OLD_USED], flag),
            ]
        )

    @property
    def sources(self) -> list[int]:
        """Handles of the open sources."""
        return list(self._places)

    @property
    def worker_blocks(self) -> int:
        """Sum over sources of the blocks that each holds."""
        return sum(int(group.meta[t.COUNTS :].sum()) for group in self._groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(group.new.nbytes + group.old.nbytes + group.meta.nbytes for group in self._groups)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless counters, owners, reachability and membership agree.

        Scans every table: for tests and idle time.
        """
        for number, group in enumerate(self._groups):
            _check_group(number, group)
        for handle, (group, bit) in self._places.items():
            if group.owners[bit] != handle or not group.live >> bit & 1:
                raise IntegrityError(f"source {handle} does not own its bit {bit}")

    def _new_place(self, handle: int) -> tuple[_Group, int]:
        for group in self._groups:
            bit = group.take_bit(handle)
            if bit is not None:
                return group, bit
        group = _Group()
        self._groups.append(group)
        bit = group.take_bit(handle)
        assert bit is not None
        return group, bit


def _checked(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    if hashes.dtype != np.uint64:
        raise TypeError(f"hashes must be uint64, got {hashes.dtype}; use numpy.asarray(hashes, dtype=numpy.uint64)")
    return hashes


def _check_group(number: int, group: _Group) -> None:
    counts, meta = np.zeros(64, dtype=np.int64), group.meta
    keys, unreachable, tombstones = t.audit(*group.new, meta[t.USED], counts)
    behind = group.old is not _NO_TABLE
    old_keys, old_unreachable, _ = t.audit(*group.old, meta[t.OLD_USED] if behind else 0, counts)
    stored = {
        "keys": (keys, int(meta[t.LIVE])),
        "free entries": (t.free_entries(group.new.entries, meta), int(meta[t.USED] - meta[t.LIVE])),
        "tombstones": (tombstones, int(meta[t.TOMBSTONES])),
        "keys left behind": (old_keys, int(meta[t.OLD_LIVE])),
        "unreachable keys": (unreachable + old_unreachable, 0),
        "live and retired bits": (group.live & group.retired, 0),
    }
    for bit in range(64):
        if not group.retired >> bit & 1:
            stored[f"blocks of bit {bit}"] = (int(counts[bit]), int(group.meta[t.COUNTS + bit]))
    for what, (seen, expected) in stored.items():
        if seen != expected:
            raise IntegrityError(f"group {number}: {what}: counted {seen}, expected {expected}")
