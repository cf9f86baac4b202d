"""A source's blocks: engine hash -> sequence hash per tier, with count and digest kept as it changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvevents import block_table as table
from kvevents.digest import digest_of
from kvevents.messages import Tier

_MASK = 0xFFFFFFFFFFFFFFFF
_EMPTY = np.empty(0, dtype=np.uint64)
_SMALLEST = 32


class Change(NamedTuple):
    """Sequence hashes that the device tier holds from now on, and then those that it no longer holds."""

    added: NDArray[np.uint64]
    removed: NDArray[np.uint64]


_NO_CHANGE = Change(_EMPTY, _EMPTY)


class BlockSet:
    """The members (tier, engine hash) of one source, and which sequence hashes its device tier holds.

    Several engine hashes may name one sequence hash; it is held until the last of them goes.  Duplicates of a member
    count once, unknown removals change nothing: both would otherwise let the digest drift from the truth.
    """

    def __init__(self) -> None:
        self._tiers: dict[int, _TierSet] = {Tier.DEVICE: _TierSet(Tier.DEVICE)}

    def __len__(self) -> int:
        if len(self._tiers) == 1:  # asked after every message
            return self._tiers[Tier.DEVICE].count
        return sum(members.count for members in self._tiers.values())

    @property
    def digest(self) -> int:
        """The digest over all members."""
        if len(self._tiers) == 1:
            return self._tiers[Tier.DEVICE].digest
        return sum(members.digest for members in self._tiers.values()) & _MASK

    def sequence_hash(self, engine_hash: int, tier: int = Tier.DEVICE) -> int | None:
        """The sequence hash of a member, or None."""
        members = self._tiers.get(tier)
        return None if members is None else members.sequence_hash(engine_hash)

    def store(self, engine: NDArray[np.uint64], sequence: NDArray[np.uint64], tier: int = Tier.DEVICE) -> Change:
        """Add members; a member that is stored again under another sequence hash takes the new one."""
        members = self._tiers.get(tier)
        if members is None:
            members = self._tiers[tier] = _TierSet(tier)
        return members.store(engine, sequence)

    def remove(self, engine: NDArray[np.uint64], tier: int = Tier.DEVICE) -> Change:
        """Take members out; unknown ones change nothing."""
        members = self._tiers.get(tier)
        return _NO_CHANGE if members is None else members.remove(engine)

    def clear(self) -> None:
        self._tiers = {Tier.DEVICE: _TierSet(Tier.DEVICE)}

    def device_hashes(self) -> NDArray[np.uint64]:
        """Every sequence hash that the device tier holds."""
        return self._tiers[Tier.DEVICE].held_hashes()

    def members(self) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]]:
        """Per tier: engine hashes and sequence hashes, in the order in which they were stored (parents first)."""
        for tier, members in self._tiers.items():
            if members.count:
                yield (tier, *members.columns())

    def copy(self) -> BlockSet:
        """An independent copy; cheap (array copies), so that a writer is held up for a moment only."""
        twin = BlockSet()
        twin._tiers = {tier: members.copy() for tier, members in self._tiers.items()}
        return twin

    def check_integrity(self) -> None:
        """Assert that digest, counts and held hashes agree with the members.

        Raises:
            AssertionError: what differs.
        """
        for members in self._tiers.values():
            members.check_integrity()


class _TierSet:
    """One tier's members, in the arrays that `block_table` describes; only the device tier counts sequence hashes."""

    def __init__(self, tier: int) -> None:
        self.tier = int(tier)  # an enum's member would send every compiled call through a slow type resolution
        self._counted = tier == Tier.DEVICE
        self._slots, self._entries = table.empty(_SMALLEST)
        self._held = table.empty_held(_SMALLEST)
        self._head = np.zeros(4, dtype=np.uint64)
        self._room = 0
        """How many members surely fit before the arrays must be looked at again."""

    @property
    def count(self) -> int:
        return int(self._head[table.LIVE])

    @property
    def digest(self) -> int:
        return int(self._head[table.DIGEST])

    def sequence_hash(self, engine_hash: int) -> int | None:
        entry = table.find(self._slots, self._entries, engine_hash)
        return None if entry < 0 else int(self._entries[entry, 1])

    def store(self, engine: NDArray[np.uint64], sequence: NDArray[np.uint64]) -> Change:
        self._room -= len(engine)
        if self._room < 0:
            self._make_room(len(engine))
        out = np.empty(2 * len(engine), dtype=np.uint64)
        added, gone = table.store(
            self._slots, self._entries, self._held, self._head, engine, sequence, self.tier, self._counted, out
        )
        return Change(out[:added], out[added : added + gone])

    def remove(self, engine: NDArray[np.uint64]) -> Change:
        out = np.empty(len(engine), dtype=np.uint64)
        gone = table.remove(self._slots, self._entries, self._held, self._head, engine, self.tier, self._counted, out)
        return Change(_EMPTY, out[:gone])

    def held_hashes(self) -> NDArray[np.uint64]:
        return self._held[self._held[:, 1] > 0, 0]

    def columns(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Engine and sequence hashes in order of arrival."""
        used = self._entries[: int(self._head[table.USED])]
        live = used[used[:, 2] > 0]
        return np.ascontiguousarray(live[:, 0]), np.ascontiguousarray(live[:, 1])

    def copy(self) -> _TierSet:
        twin = _TierSet(self.tier)
        twin._slots, twin._entries = self._slots.copy(), self._entries.copy()
        twin._held, twin._head = self._held.copy(), self._head.copy()
        return twin

    def check_integrity(self) -> None:
        engine, sequence = self.columns()
        assert len(engine) == self.count == len(set(engine.tolist())), "members are miscounted"
        assert digest_of(engine, self.tier) == self.digest, "the digest has drifted from the members"
        assert np.count_nonzero(self._slots) == self.count, "slots and members differ in number"
        assert all(self.sequence_hash(e) == s for e, s in zip(engine.tolist(), sequence.tolist(), strict=True)), (
            "a member is not found"
        )
        if self._counted:
            names, counts = np.unique(sequence, return_counts=True)
            held = self._held[self._held[:, 1] > 0]
            order = np.argsort(held[:, 0])
            assert held[order, 0].tolist() == names.tolist(), "held sequence hashes differ from the members'"
            assert held[order, 1].tolist() == counts.tolist(), "shared sequence hashes are miscounted"
            assert int(self._head[table.HELD]) == len(names), "held sequence hashes are miscounted"

    def _make_room(self, count: int) -> None:
        """Grow, or close the gaps that removals left, so that `count` more fit."""
        if int(self._head[table.USED]) + count > len(self._entries):
            slots, entries = table.empty(2 * (self.count + count))
            table.rebuild(self._entries, self._head, slots, entries)
            self._slots, self._entries = slots, entries
        if self._counted and 2 * (int(self._head[table.HELD]) + count) > len(self._held):
            held = table.empty_held(2 * (int(self._head[table.HELD]) + count))
            table.rebuild_held(self._held, held)
            self._held = held
        self._room = len(self._entries) - int(self._head[table.USED]) - count
        if self._counted:
            self._room = min(self._room, len(self._held) // 2 - int(self._head[table.HELD]) - count)
