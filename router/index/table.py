"""Compiled hash table: sequence hash -> 64-bit membership; store, remove, match, drain, sweep.

A table has two arrays.  `entries` (uint64[n, 2]) holds key and membership bits of up to 64 sources in the
order of arrival, so that the blocks of a chain mostly lie side by side and a match reads them in a row
instead of probing for each.  `slots` (int32, a power of two) maps a key to its entry: linear probing, 0 =
free, -1 = tombstone, else entry number + 1.  An entry without bits is unused: in the newer table it is
linked into a free list through its key.

While a table grows there are two: `new` takes all inserts, `old` is drained some entries at a time, and a
key lives in exactly one of them.  `meta` (int64[META_SIZE]) carries the counters; the functions below are
its only writers.
"""

import numba
import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]
I64Array = NDArray[np.int64]

LIVE, USED, FREE, TOMBSTONES = 0, 1, 2, 3
"""Of `new`: keys; entries ever used; head of the free list (entry number, -1 = none); tombstones among the
slots.
"""
OLD_LIVE, OLD_USED, DRAIN_AT, SWEEP_AT = 4, 5, 6, 7
"""Of `old`: keys left; entries; next entry to drain.  Of `new`: next entry to sweep."""
COUNTS = 8
"""meta[COUNTS + bit]: blocks held by that bit's source."""
META_SIZE = COUNTS + 64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_FREE_SLOT = _ZERO
_TOMBSTONE = _ONE


def new_meta() -> I64Array:
    """Counters of an empty table."""
    meta = np.zeros(META_SIZE, dtype=np.int64)
    meta[FREE] = -1
    return meta


@numba.njit(cache=True, inline="always")
def _mix(key):  # type: ignore[no-untyped-def]
    """Spread a key: the low bits choose the slot (they see the high half too), the upper 32 give the tag."""
    mixed = key * _GOLDEN
    return mixed ^ (mixed >> np.uint64(32))


@numba.njit(cache=True, inline="always")
def _entry_at(slots, slot):  # type: ignore[no-untyped-def]
    """The entry that a used slot points to."""
    return np.int64(slots[slot] & np.uint32(slots.shape[0] - 1)) - 2


@numba.njit(cache=True, inline="always")
def _find(entries, slots, key):  # type: ignore[no-untyped-def]
    """Slot of a key that has members, or -1."""
    capacity = slots.shape[0]
    mask = np.uint64(capacity - 1)
    mixed = _mix(key)
    slot = mixed & mask
    for _ in range(capacity):
        value = np.uint64(slots[slot])
        if value == _FREE_SLOT:
            return np.int64(-1)
        if value != _TOMBSTONE and (value ^ (mixed >> np.uint64(32))) & ~mask == _ZERO:
            entry = np.int64(value & mask) - 2
            if entries[entry, 0] == key and entries[entry, 1] != _ZERO:
                return np.int64(slot)
        slot = (slot + _ONE) & mask
    return np.int64(-1)


@numba.njit(cache=True, inline="always")
def _insert(entries, slots, meta, key, bits):  # type: ignore[no-untyped-def]
    """Put a key that the table does not hold; the caller keeps the table below its limit.

    Returns the entry.
    """
    entry = meta[FREE]
    if entry >= 0:
        meta[FREE] = np.int64(entries[entry, 0]) - 1
    else:
        entry = meta[USED]
        meta[USED] += 1
    entries[entry, 0] = key
    entries[entry, 1] = bits
    mask = np.uint64(slots.shape[0] - 1)
    mixed = _mix(key)
    slot = mixed & mask
    while np.uint64(slots[slot]) > _TOMBSTONE:
        slot = (slot + _ONE) & mask
    if np.uint64(slots[slot]) == _TOMBSTONE:
        meta[TOMBSTONES] -= 1
    slots[slot] = np.uint32((mixed >> np.uint64(32)) & ~mask) | np.uint32(entry + 2)
    meta[LIVE] += 1
    return entry


@numba.njit(cache=True, inline="always")
def _delete(entries, slots, meta, slot):  # type: ignore[no-untyped-def]
    """Take the key at a slot out of `new`: its entry joins the free list, its slot is freed or becomes a
    tombstone.
    """
    entry = _entry_at(slots, slot)
    entries[entry, 0] = np.uint64(meta[FREE] + 1)
    entries[entry, 1] = _ZERO
    meta[FREE] = entry
    meta[LIVE] -= 1
    mask = slots.shape[0] - 1
    if np.uint64(slots[(slot + 1) & mask]) != _FREE_SLOT:
        slots[slot] = np.uint32(1)
        meta[TOMBSTONES] += 1
        return
    slots[slot] = np.uint32(0)
    before = (slot - 1) & mask
    while np.uint64(slots[before]) == _TOMBSTONE:
        slots[before] = np.uint32(0)
        meta[TOMBSTONES] -= 1
        before = (before - 1) & mask


@numba.njit(cache=True)
def store(entries, slots, old_entries, old_slots, meta, hashes, bit):  # type: ignore[no-untyped-def]
    """Set one source's bit on every hash; one that is set already is left alone.

    Returns `new`'s fill in slots.
    """
    flag = _ONE << np.uint64(bit)
    draining = meta[OLD_LIVE] > 0
    added = 0
    entry = np.int64(-2)
    for i in range(hashes.shape[0]):
        key = hashes[i]
        entry += 1
        beside = 0 <= entry < meta[USED] and entries[entry, 0] == key and entries[entry, 1] != _ZERO
        if not beside:
            slot = _find(entries, slots, key)
            entry = _entry_at(slots, slot) if slot >= 0 else np.int64(-1)
        if entry >= 0:
            if not entries[entry, 1] & flag:
                entries[entry, 1] |= flag
                added += 1
            continue
        if draining:
            slot = _find(old_entries, old_slots, key)
            if slot >= 0:
                behind = _entry_at(old_slots, slot)
                if not old_entries[behind, 1] & flag:
                    old_entries[behind, 1] |= flag
                    added += 1
                entry = np.int64(-2)
                continue
        entry = _insert(entries, slots, meta, key, flag)
        added += 1
    meta[COUNTS + bit] += added
    return meta[LIVE] + meta[TOMBSTONES]


@numba.njit(cache=True)
def remove(entries, slots, old_entries, old_slots, meta, hashes, bit):  # type: ignore[no-untyped-def]
    """Clear one source's bit on every hash; absent ones are left alone.  Returns how many it held."""
    flag = _ONE << np.uint64(bit)
    draining = meta[OLD_LIVE] > 0
    gone = 0
    for i in range(hashes.shape[0]):
        key = hashes[i]
        slot = _find(entries, slots, key)
        if slot >= 0:
            entry = _entry_at(slots, slot)
            bits = entries[entry, 1]
            if bits & flag:
                gone += 1
                if bits == flag:
                    _delete(entries, slots, meta, slot)
                else:
                    entries[entry, 1] = bits & ~flag
        elif draining:
            slot = _find(old_entries, old_slots, key)
            if slot >= 0 and old_entries[_entry_at(old_slots, slot), 1] & flag:
                entry = _entry_at(old_slots, slot)
                gone += 1
                old_entries[entry, 1] &= ~flag
                if old_entries[entry, 1] == _ZERO:
                    meta[OLD_LIVE] -= 1
    meta[COUNTS + bit] -= gone
    return gone


@numba.njit(cache=True)
def match(entries, slots, old_entries, old_slots, meta, hashes, live, owners, found):  # type: ignore[no-untyped-def]
    """Longest prefix of `hashes` held by each live bit.  Returns how many bits hold at least the first block.

    found (int64[64, 2]) gets one row (owner, depth) for each of them.  The walk ends at the first block
    that no live source still follows, so its cost is the longest match, not the prompt.
    """
    draining = meta[OLD_LIVE] > 0
    length = hashes.shape[0]
    following = live
    count = 0
    entry = np.int64(-2)
    for depth in range(length):
        key = hashes[depth]
        bits = _ZERO
        entry += 1
        if 0 <= entry < meta[USED] and entries[entry, 0] == key and entries[entry, 1] != _ZERO:
            bits = entries[entry, 1]
        else:
            slot = _find(entries, slots, key)
            if slot >= 0:
                entry = _entry_at(slots, slot)
                bits = entries[entry, 1]
            else:
                entry = np.int64(-2)
                if draining:
                    slot = _find(old_entries, old_slots, key)
                    if slot >= 0:
                        bits = old_entries[_entry_at(old_slots, slot), 1]
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
def drain(entries, slots, old_entries, meta, retired, number):  # type: ignore[no-untyped-def]
    """Move up to `number` entries of `old` to `new`, without their retired bits.

    Returns True when none is left.
    """
    end = min(meta[DRAIN_AT] + number, meta[OLD_USED])
    for entry in range(meta[DRAIN_AT], end):
        if old_entries[entry, 1] == _ZERO:
            continue
        bits = old_entries[entry, 1] & ~retired
        old_entries[entry, 1] = _ZERO
        meta[OLD_LIVE] -= 1
        if bits != _ZERO:
            _insert(entries, slots, meta, old_entries[entry, 0], bits)
    meta[DRAIN_AT] = end
    return end == meta[OLD_USED]


@numba.njit(cache=True)
def sweep(entries, slots, meta, retired, number):  # type: ignore[no-untyped-def]
    """Clear retired bits in up to `number` entries.

    Returns True when the pass over the table is complete.
    """
    end = min(meta[SWEEP_AT] + number, meta[USED])
    for entry in range(meta[SWEEP_AT], end):
        bits = entries[entry, 1]
        if bits & retired:
            if bits & ~retired:
                entries[entry, 1] = bits & ~retired
            else:
                _delete(entries, slots, meta, _find(entries, slots, entries[entry, 0]))
    meta[SWEEP_AT] = end
    return end == meta[USED]


@numba.njit(cache=True)
def keys_of(entries, used, flag):  # type: ignore[no-untyped-def]
    """Keys whose membership has any of the bits in `flag`: uint64[n], in the order of the entries."""
    count = 0
    for entry in range(used):
        if entries[entry, 1] & flag:
            count += 1
    out = np.empty(count, dtype=np.uint64)
    at = 0
    for entry in range(used):
        if entries[entry, 1] & flag:
            out[at] = entries[entry, 0]
            at += 1
    return out


@numba.njit(cache=True)
def audit(entries, slots, used, counts):  # type: ignore[no-untyped-def]
    """(keys, keys that a probe does not lead to, tombstones); adds each bit's members to counts
    (int64[64]).
    """
    keys, unreachable, tombstones = 0, 0, 0
    for entry in range(used):
        bits = entries[entry, 1]
        if bits == _ZERO:
            continue
        keys += 1
        slot = _find(entries, slots, entries[entry, 0])
        if slot < 0 or _entry_at(slots, slot) != entry:
            unreachable += 1
        for bit in range(64):
            if bits & (_ONE << np.uint64(bit)):
                counts[bit] += 1
    for slot in range(slots.shape[0]):
        if np.uint64(slots[slot]) == _TOMBSTONE:
            tombstones += 1
    return keys, unreachable, tombstones


@numba.njit(cache=True)
def free_entries(entries, meta):  # type: ignore[no-untyped-def]
    """Length of the free list, or -1 when it holds a used entry or runs in a circle."""
    count, entry = 0, meta[FREE]
    while entry >= 0:
        if entries[entry, 1] != _ZERO or count > meta[USED]:
            return -1
        count += 1
        entry = np.int64(entries[entry, 0]) - 1
    return count


def compile_all() -> None:
    """Compile or load every function above for the types in use, so that no request waits for it."""
    entries, old_entries = np.zeros((16, 2), dtype=np.uint64), np.zeros((16, 2), dtype=np.uint64)
    slots, old_slots = np.zeros(32, dtype=np.uint32), np.zeros(32, dtype=np.uint32)
    both = (entries, slots, old_entries, old_slots)
    owners, found, counts = np.zeros(64, np.int64), np.zeros((64, 2), np.int64), np.zeros(64, np.int64)
    meta, own = new_meta(), np.arange(4, dtype=np.uint64)
    received = own.copy()
    received.flags.writeable = False  # what a decoder hands out is a view of the message: another type to numba
    for hashes in (own, received):
        store(*both, meta, hashes, 0)
        match(*both, meta, hashes, _ONE, owners, found)
        remove(*both, meta, hashes, 0)
    drain(entries, slots, old_entries, meta, _ZERO, 16)
    sweep(entries, slots, meta, _ONE, 16)
    keys_of(entries, 0, _ONE)
    audit(entries, slots, 0, counts)
    free_entries(entries, meta)
