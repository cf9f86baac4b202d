"""The compiled tables behind a block set: members in order of arrival, and counted sequence hashes.

All functions work on plain arrays, so that a set is copied by copying arrays:

- `slots`   int32[2^k]: entry number + 1 by engine hash, 0 empty; open addressing, linear, no tombstones
- `entries` uint64[capacity, 3]: engine hash, sequence hash, 1 if it is a member; dead entries keep the order
- `held`    uint64[2^m, 2]: sequence hash, number of members that name it (0 empty)
- `head`    uint64[4]: entries used, members, digest, distinct sequence hashes held
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from kvevents.digest import mix

USED, LIVE, DIGEST, HELD = 0, 1, 2, 3

_HASHES = types.Array(types.uint64, 1, "C", readonly=True)
_SLOTS, _TABLE, _HEAD = types.int32[::1], types.uint64[:, ::1], types.uint64[::1]
_COUNTS = types.UniTuple(types.int64, 2)


def empty(capacity: int) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """Slots and entries for `capacity` members, at most half full."""
    return (
        np.zeros(1 << max(4, (2 * capacity - 1).bit_length()), dtype=np.int32),
        np.zeros((max(8, capacity), 3), dtype=np.uint64),
    )


def empty_held(capacity: int) -> NDArray[np.uint64]:
    """Room for `capacity` distinct sequence hashes, at most half full."""
    return np.zeros((1 << max(4, (2 * capacity - 1).bit_length()), 2), dtype=np.uint64)


@njit(inline="always")
def _home(key, mask):  # type: ignore[no-untyped-def]
    """Where a key's search begins (Fibonacci hashing: engines' ids may be small or in a row)."""
    return np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@njit(inline="always")
def _slot_of(slots, entries, key):  # type: ignore[no-untyped-def]
    """The slot of a key, or the empty one where it would go."""
    mask = len(slots) - 1
    at = _home(key, mask)
    while slots[at] and entries[slots[at] - 1, 0] != key:
        at = (at + 1) & mask
    return at


@njit(inline="always")
def _held_of(held, key):  # type: ignore[no-untyped-def]
    mask = len(held) - 1
    at = _home(key, mask)
    while held[at, 1] and held[at, 0] != key:
        at = (at + 1) & mask
    return at


@njit(inline="always")
def _hold(held, head, key):  # type: ignore[no-untyped-def]
    """Count a sequence hash up; True if it is new."""
    at = _held_of(held, key)
    fresh = held[at, 1] == 0
    held[at, 0] = key
    held[at, 1] += np.uint64(1)
    if fresh:
        head[HELD] += np.uint64(1)
    return fresh


@njit(inline="always")
def _release(held, head, key):  # type: ignore[no-untyped-def]
    """Count a held sequence hash down; True if it is gone."""
    at = _held_of(held, key)
    held[at, 1] -= np.uint64(1)
    if held[at, 1]:
        return False
    head[HELD] -= np.uint64(1)
    mask = len(held) - 1
    hole, at = at, (at + 1) & mask
    while held[at, 1]:
        # Whoever could not have its home because of the hole's owner moves up.
        if (at - _home(held[at, 0], mask)) & mask >= (at - hole) & mask:
            held[hole, 0], held[hole, 1] = held[at, 0], held[at, 1]
            hole = at
        at = (at + 1) & mask
    held[hole, 1] = np.uint64(0)
    return True


@njit(inline="always")
def _free_slot(slots, entries, hole):  # type: ignore[no-untyped-def]
    mask = len(slots) - 1
    at = (hole + 1) & mask
    while slots[at]:
        if (at - _home(entries[slots[at] - 1, 0], mask)) & mask >= (at - hole) & mask:
            slots[hole] = slots[at]
            hole = at
        at = (at + 1) & mask
    slots[hole] = 0


@njit(
    _COUNTS(_SLOTS, _TABLE, _TABLE, _HEAD, _HASHES, _HASHES, types.uint64, types.boolean, types.uint64[::1]), cache=True
)
def store(slots, entries, held, head, engine, sequence, tier, counted, out):  # type: ignore[no-untyped-def]
    """Add members; `out[:n]` are new sequence hashes, `out[n:n+m]` those that nobody names any more: returns n, m.

    There must be room for `len(engine)` more; `out` takes twice as many.  With `counted` False, `held` is left alone.
    """
    replaced = len(engine)
    added = 0
    for i in range(len(engine)):
        key, value = engine[i], sequence[i]
        slot = _slot_of(slots, entries, key)
        if slots[slot]:
            entry = slots[slot] - 1
            old = entries[entry, 1]
            if old == value:
                continue
            entries[entry, 1] = value
            out[replaced] = old
            replaced += 1
        else:
            entry = np.int64(head[USED])
            entries[entry, 0], entries[entry, 1], entries[entry, 2] = key, value, np.uint64(1)
            slots[slot] = entry + 1
            head[USED] += np.uint64(1)
            head[LIVE] += np.uint64(1)
            head[DIGEST] += mix(key, tier)
        if counted and _hold(held, head, value):
            out[added] = value
            added += 1
    if not counted:
        return 0, 0
    gone = 0
    for i in range(len(engine), replaced):
        if _release(held, head, out[i]):
            out[added + gone] = out[i]
            gone += 1
    return added, gone


@njit(types.int64(_SLOTS, _TABLE, _TABLE, _HEAD, _HASHES, types.uint64, types.boolean, types.uint64[::1]), cache=True)
def remove(slots, entries, held, head, engine, tier, counted, out):  # type: ignore[no-untyped-def]
    """Take members out, unknown ones change nothing; `out[:n]` are hashes that nobody names any more: returns n."""
    gone = 0
    for i in range(len(engine)):
        slot = _slot_of(slots, entries, engine[i])
        if not slots[slot]:
            continue
        entry = slots[slot] - 1
        _free_slot(slots, entries, slot)
        entries[entry, 2] = np.uint64(0)
        head[LIVE] -= np.uint64(1)
        head[DIGEST] -= mix(engine[i], tier)
        if counted and _release(held, head, entries[entry, 1]):
            out[gone] = entries[entry, 1]
            gone += 1
    return gone


@njit(types.int64(_SLOTS, _TABLE, types.uint64), cache=True)
def find(slots, entries, key):  # type: ignore[no-untyped-def]
    """The entry of a member, or -1."""
    return np.int64(slots[_slot_of(slots, entries, key)]) - 1


@njit(types.void(_TABLE, _HEAD, _SLOTS, _TABLE), cache=True)
def rebuild(entries, head, new_slots, new_entries):  # type: ignore[no-untyped-def]
    """Move the members into larger arrays, in their order, without the dead ones."""
    used = 0
    for entry in range(np.int64(head[USED])):
        if entries[entry, 2]:
            new_entries[used] = entries[entry]
            new_slots[_slot_of(new_slots, new_entries, entries[entry, 0])] = used + 1
            used += 1
    head[USED] = np.uint64(used)


@njit(types.void(_TABLE, _TABLE), cache=True)
def rebuild_held(held, new_held):  # type: ignore[no-untyped-def]
    """Move counted sequence hashes into a larger table."""
    for at in range(len(held)):
        if held[at, 1]:
            to = _held_of(new_held, held[at, 0])
            new_held[to, 0], new_held[to, 1] = held[at, 0], held[at, 1]
