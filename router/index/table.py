"""Compiled open-addressing table: sequence hash -> 64-bit membership; insert, remove, match, migrate, sweep.

A table is a u64 array of shape [capacity, 2]: column 0 is the key (a sequence hash), column 1 the
membership bits of up to 64 sources.  A slot is *occupied* when its bits are not zero, *free* when key and
bits are zero, and a *tombstone* when only the bits are zero, so that every u64 is a legal key.  Probing is
linear from a multiplicative hash; the capacity is a power of two.

While a table grows there are two: `new` takes all inserts, `old` is drained a few slots at a time, and an
entry lives in exactly one of them.  `meta` (int64[META_SIZE]) carries the counters; the functions below are
its only writers.
"""

import numba
import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]
I64Array = NDArray[np.int64]

LIVE, TOMBSTONES, OLD_LIVE, DRAIN_AT, SWEEP_AT = 0, 1, 2, 3, 4
"""Entries in `new`; tombstones in `new`; entries left in `old`; next slot of `old` to drain; next slot of
`new` to sweep.
"""
COUNTS = 8
"""meta[COUNTS + bit]: blocks held by that bit's source."""
META_SIZE = COUNTS + 64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_TOMB_KEY_FOR_ZERO = np.uint64(1)


@numba.njit(cache=True, inline="always")
def _home(key, mask):  # type: ignore[no-untyped-def]
    """First slot to look at for a key; folds the high half in so that small masks see every bit."""
    mixed = key * _GOLDEN
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))


@numba.njit(cache=True, inline="always")
def _find(table, key):  # type: ignore[no-untyped-def]
    """Slot of a key, or -1."""
    capacity = table.shape[0]
    if capacity == 0:
        return -1
    mask = capacity - 1
    slot = _home(key, mask)
    for _ in range(capacity):
        if table[slot, 1] == _ZERO:
            if table[slot, 0] == _ZERO:
                return -1
        elif table[slot, 0] == key:
            return slot
        slot = (slot + 1) & mask
    return -1


@numba.njit(cache=True, inline="always")
def _find_or_place(table, key):  # type: ignore[no-untyped-def]
    """(slot, found): the key's slot, or the slot where it belongs (the first tombstone on its path, else a
    free one).
    """
    capacity = table.shape[0]
    mask = capacity - 1
    slot = _home(key, mask)
    place = -1
    for _ in range(capacity):
        if table[slot, 1] == _ZERO:
            if table[slot, 0] == _ZERO:
                return (slot if place < 0 else place), False
            if place < 0:
                place = slot
        elif table[slot, 0] == key:
            return slot, True
        slot = (slot + 1) & mask
    return place, False


@numba.njit(cache=True, inline="always")
def _insert(table, meta, key, bits):  # type: ignore[no-untyped-def]
    """Put a key that the table does not hold.

    The caller keeps the table below its load limit, so a place exists.
    """
    slot, _ = _find_or_place(table, key)
    if table[slot, 0] != _ZERO:
        meta[TOMBSTONES] -= 1
    table[slot, 0] = key
    table[slot, 1] = bits
    meta[LIVE] += 1


@numba.njit(cache=True, inline="always")
def _vacate(table, slot):  # type: ignore[no-untyped-def]
    """Empty a slot.

    Returns the change in tombstones: it frees the slot (and tombstones before it) when the next one is
    free.
    """
    mask = table.shape[0] - 1
    table[slot, 1] = _ZERO
    after = (slot + 1) & mask
    if table[after, 1] != _ZERO or table[after, 0] != _ZERO:
        if table[slot, 0] == _ZERO:
            table[slot, 0] = _TOMB_KEY_FOR_ZERO
        return 1
    table[slot, 0] = _ZERO
    change = 0
    slot = (slot - 1) & mask
    while table[slot, 1] == _ZERO and table[slot, 0] != _ZERO:
        table[slot, 0] = _ZERO
        change -= 1
        slot = (slot - 1) & mask
    return change


@numba.njit(cache=True)
def drain(new, old, meta, retired, slots):  # type: ignore[no-untyped-def]
    """Move entries from up to `slots` slots of `old` to `new`, without their retired bits.

    Returns True when `old` is empty.
    """
    at = meta[DRAIN_AT]
    end = min(at + slots, old.shape[0])
    for slot in range(at, end):
        if old[slot, 1] == _ZERO:
            continue
        key = old[slot, 0]
        bits = old[slot, 1] & ~retired
        old[slot, 1] = _ZERO
        if key == _ZERO:
            old[slot, 0] = _TOMB_KEY_FOR_ZERO
        meta[OLD_LIVE] -= 1
        if bits != _ZERO:
            _insert(new, meta, key, bits)
    meta[DRAIN_AT] = end
    return end == old.shape[0]


@numba.njit(cache=True)
def sweep(table, meta, retired, slots):  # type: ignore[no-untyped-def]
    """Clear retired bits in up to `slots` slots.  Returns True when the pass over the table is complete."""
    at = meta[SWEEP_AT]
    end = min(at + slots, table.shape[0])
    keep = ~retired
    for slot in range(at, end):
        bits = table[slot, 1]
        if bits & retired:
            bits &= keep
            if bits == _ZERO:
                meta[LIVE] -= 1
                meta[TOMBSTONES] += _vacate(table, slot)
            else:
                table[slot, 1] = bits
    meta[SWEEP_AT] = end
    return end == table.shape[0]


@numba.njit(cache=True)
def store(new, old, meta, hashes, bit):  # type: ignore[no-untyped-def]
    """Set one source's bit on every hash; a hash that is set already is left alone.

    Returns occupied plus tombstone slots of `new`.
    """
    flag = _ONE << np.uint64(bit)
    draining = meta[OLD_LIVE] > 0
    added = 0
    for i in range(hashes.shape[0]):
        key = hashes[i]
        slot, found = _find_or_place(new, key)
        if found:
            if not new[slot, 1] & flag:
                new[slot, 1] |= flag
                added += 1
            continue
        if draining:
            behind = _find(old, key)
            if behind >= 0:
                if not old[behind, 1] & flag:
                    old[behind, 1] |= flag
                    added += 1
                continue
        if new[slot, 0] != _ZERO:
            meta[TOMBSTONES] -= 1
        new[slot, 0] = key
        new[slot, 1] = flag
        meta[LIVE] += 1
        added += 1
    meta[COUNTS + bit] += added
    return meta[LIVE] + meta[TOMBSTONES]


@numba.njit(cache=True)
def remove(new, old, meta, hashes, bit):  # type: ignore[no-untyped-def]
    """Clear one source's bit on every hash; absent ones are left alone.  Returns how many it held."""
    flag = _ONE << np.uint64(bit)
    keep = ~flag
    draining = meta[OLD_LIVE] > 0
    gone = 0
    for i in range(hashes.shape[0]):
        key = hashes[i]
        slot = _find(new, key)
        if slot >= 0:
            bits = new[slot, 1]
            if bits & flag:
                gone += 1
                if bits == flag:
                    meta[LIVE] -= 1
                    meta[TOMBSTONES] += _vacate(new, slot)
                else:
                    new[slot, 1] = bits & keep
        elif draining:
            slot = _find(old, key)
            if slot >= 0 and old[slot, 1] & flag:
                gone += 1
                old[slot, 1] &= keep
                if old[slot, 1] == _ZERO:
                    meta[OLD_LIVE] -= 1
                    if key == _ZERO:
                        old[slot, 0] = _TOMB_KEY_FOR_ZERO
    meta[COUNTS + bit] -= gone
    return gone


@numba.njit(cache=True)
def match(new, old, meta, hashes, live, owners, found):  # type: ignore[no-untyped-def]
    """Longest prefix of `hashes` held by each live bit.  Returns how many bits hold at least the first block.

    found (int64[64, 2]) gets one row (owner, depth) for each of them.  The walk ends at the first block
    that no live source still follows, so its cost is the longest match, not the prompt.
    """
    draining = meta[OLD_LIVE] > 0
    length = hashes.shape[0]
    following = live
    count = 0
    for depth in range(length):
        key = hashes[depth]
        bits = _ZERO
        slot = _find(new, key)
        if slot >= 0:
            bits = new[slot, 1]
        elif draining:
            slot = _find(old, key)
            if slot >= 0:
                bits = old[slot, 1]
        left = following & ~bits
        if left != _ZERO:
            if depth > 0:
                count = _record(owners, found, count, left, depth)
            following &= bits
            if following == _ZERO:
                return count
    if length > 0:
        count = _record(owners, found, count, following, length)
    return count


@numba.njit(cache=True, inline="always")
def _record(owners, found, count, bits, depth):  # type: ignore[no-untyped-def]
    """One row of `found` for every bit that is set.  Returns the new count."""
    bit = 0
    while bits != _ZERO:
        if bits & _ONE:
            found[count, 0] = owners[bit]
            found[count, 1] = depth
            count += 1
        bits >>= _ONE
        bit += 1
    return count


@numba.njit(cache=True)
def keys_of(table, flag):  # type: ignore[no-untyped-def]
    """Keys whose membership has any of the bits in `flag`: u64[n], in slot order."""
    count = 0
    for slot in range(table.shape[0]):
        if table[slot, 1] & flag:
            count += 1
    out = np.empty(count, dtype=np.uint64)
    at = 0
    for slot in range(table.shape[0]):
        if table[slot, 1] & flag:
            out[at] = table[slot, 0]
            at += 1
    return out


@numba.njit(cache=True)
def audit(table, counts):  # type: ignore[no-untyped-def]
    """(occupied, tombstones, unreachable) of a table; adds each bit's members to counts (int64[64])."""
    occupied, tombstones, unreachable = 0, 0, 0
    for slot in range(table.shape[0]):
        bits = table[slot, 1]
        if bits == _ZERO:
            if table[slot, 0] != _ZERO:
                tombstones += 1
            continue
        occupied += 1
        if _find(table, table[slot, 0]) != slot:
            unreachable += 1
        for bit in range(64):
            if bits & (_ONE << np.uint64(bit)):
                counts[bit] += 1
    return occupied, tombstones, unreachable


def compile_all() -> None:
    """Compile or load every function above for the types in use, so that no request waits for it."""
    new, old = np.zeros((1024, 2), dtype=np.uint64), np.zeros((1024, 2), dtype=np.uint64)
    meta, hashes = np.zeros(META_SIZE, dtype=np.int64), np.arange(4, dtype=np.uint64)
    store(new, old, meta, hashes, 0)
    match(new, old, meta, hashes, _ONE, np.zeros(64, dtype=np.int64), np.zeros((64, 2), dtype=np.int64))
    remove(new, old, meta, hashes, 0)
    drain(new, old, meta, _ZERO, 16)
    sweep(new, meta, _ONE, 16)
    keys_of(new, _ONE)
    audit(new, np.zeros(64, dtype=np.int64))
