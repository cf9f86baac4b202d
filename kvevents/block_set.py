"""A source's blocks: engine hash -> sequence hash per tier, with count and digest kept as it changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvevents.digest import digest_of
from kvevents.messages import Tier

_MASK = 0xFFFFFFFFFFFFFFFF
_EMPTY = np.empty(0, dtype=np.uint64)


class Change(NamedTuple):
    """Sequence hashes that the device tier holds from now on, and those that it no longer holds."""

    added: NDArray[np.uint64]
    removed: NDArray[np.uint64]


_NO_CHANGE = Change(_EMPTY, _EMPTY)


class BlockSet:
    """The members (tier, engine hash) of one source, and which sequence hashes its device tier holds.

    Several engine hashes may name one sequence hash; it is held until the last of them goes.  Duplicates of a member
    count once, unknown removals change nothing: both would otherwise let the digest drift from the truth.
    """

    def __init__(self) -> None:
        self._tiers: dict[int, dict[int, int]] = {}
        self._shared: dict[int, int] = {}
        """Sequence hash -> device members beyond the first that name it."""
        self._device_hashes: dict[int, int] = self._tiers.setdefault(Tier.DEVICE, {})
        self._held: set[int] = set()
        self.digest = 0

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def sequence_hash(self, engine_hash: int, tier: int = Tier.DEVICE) -> int | None:
        """The sequence hash of a member, or None."""
        members = self._tiers.get(tier)
        return members.get(engine_hash) if members is not None else None

    def store(self, engine: NDArray[np.uint64], sequence: NDArray[np.uint64], tier: int = Tier.DEVICE) -> Change:
        """Add members; a member that is stored again under another sequence hash takes the new one."""
        members = self._tiers.setdefault(tier, {})
        engine_ids, sequence_ids = engine.tolist(), sequence.tolist()
        fresh = [i for i, h in enumerate(engine_ids) if h not in members]
        if len(fresh) != len(engine_ids) or len(set(engine_ids)) != len(engine_ids):
            return self._store_with_known(members, engine_ids, sequence_ids, tier)
        self.digest = (self.digest + digest_of(engine, tier)) & _MASK
        members.update(zip(engine_ids, sequence_ids, strict=True))
        return Change(self._hold(sequence_ids), _EMPTY) if tier == Tier.DEVICE else _NO_CHANGE

    def remove(self, engine: NDArray[np.uint64], tier: int = Tier.DEVICE) -> Change:
        """Take members out; unknown ones change nothing."""
        members = self._tiers.get(tier)
        if not members:
            return _NO_CHANGE
        gone: list[int] = []
        released: list[int] = []
        for engine_hash in engine.tolist():
            sequence_hash = members.pop(engine_hash, None)
            if sequence_hash is not None:
                gone.append(engine_hash)
                released.append(sequence_hash)
        if not gone:
            return _NO_CHANGE
        self.digest = (self.digest - digest_of(np.array(gone, dtype=np.uint64), tier)) & _MASK
        return Change(_EMPTY, self._release(released)) if tier == Tier.DEVICE else _NO_CHANGE

    def clear(self) -> None:
        for members in self._tiers.values():
            members.clear()
        self._shared.clear()
        self._held.clear()
        self.digest = 0

    def device_hashes(self) -> NDArray[np.uint64]:
        """Every sequence hash that the device tier holds."""
        return np.fromiter(self._held, dtype=np.uint64, count=len(self._held))

    def members(self) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint64]]]:
        """Per tier: engine hashes and sequence hashes, in the order in which they were stored (parents first)."""
        for tier, members in self._tiers.items():
            if members:
                count = len(members)
                yield (
                    tier,
                    np.fromiter(members.keys(), dtype=np.uint64, count=count),
                    np.fromiter(members.values(), dtype=np.uint64, count=count),
                )

    def copy(self) -> BlockSet:
        """An independent copy; cheap (dictionary copies), so that a writer is held up for a moment only."""
        twin = BlockSet()
        twin._tiers = {tier: members.copy() for tier, members in self._tiers.items()}
        twin._device_hashes = twin._tiers[Tier.DEVICE]
        twin._shared = self._shared.copy()
        twin._held = self._held.copy()
        twin.digest = self.digest
        return twin

    def check_integrity(self) -> None:
        """Assert that digest, counts and held hashes agree with the members.

        Raises:
            AssertionError: what differs.
        """
        digest = sum(digest_of(engine, tier) for tier, engine, _ in self.members()) & _MASK
        assert digest == self.digest, "the digest has drifted from the members"
        counts: dict[int, int] = {}
        for sequence_hash in self._device_hashes.values():
            counts[sequence_hash] = counts.get(sequence_hash, 0) + 1
        assert set(counts) == self._held, "held sequence hashes differ from the members'"
        shared = {h: count - 1 for h, count in counts.items() if count > 1}
        assert shared == self._shared, "shared sequence hashes are miscounted"

    def _store_with_known(
        self, members: dict[int, int], engine_ids: list[int], sequence_ids: list[int], tier: int
    ) -> Change:
        added: list[int] = []
        held: list[int] = []
        released: list[int] = []
        for engine_hash, sequence_hash in zip(engine_ids, sequence_ids, strict=True):
            known = members.get(engine_hash)
            if known == sequence_hash:
                continue
            if known is None:
                added.append(engine_hash)
            else:
                released.append(known)
            members[engine_hash] = sequence_hash
            held.append(sequence_hash)
        if added:
            self.digest = (self.digest + digest_of(np.array(added, dtype=np.uint64), tier)) & _MASK
        if tier != Tier.DEVICE:
            return _NO_CHANGE
        return Change(self._hold(held), self._release(released))

    def _hold(self, sequence_ids: list[int]) -> NDArray[np.uint64]:
        held, fresh = self._held, []
        for sequence_hash in sequence_ids:
            if sequence_hash in held:
                self._shared[sequence_hash] = self._shared.get(sequence_hash, 0) + 1
            else:
                held.add(sequence_hash)
                fresh.append(sequence_hash)
        return np.array(fresh, dtype=np.uint64)

    def _release(self, sequence_ids: list[int]) -> NDArray[np.uint64]:
        gone = []
        for sequence_hash in sequence_ids:
            others = self._shared.get(sequence_hash, 0)
            if not others:
                self._held.discard(sequence_hash)
                gone.append(sequence_hash)
            elif others == 1:
                del self._shared[sequence_hash]
            else:
                self._shared[sequence_hash] = others - 1
        return np.array(gone, dtype=np.uint64)
