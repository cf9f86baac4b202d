"""A digest of a set of blocks that needs no order: the wrapping u64 sum of a strong mix of each member.

The mix is the finalizer of SplitMix64 (Steele, Lea, Flood 2014) over the engine hash offset by its tier; adding or
removing a member changes the sum in O(1).
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@njit(inline="always")
def mix(engine_hash, tier):  # type: ignore[no-untyped-def]
    """A member's share of the digest; to be called from compiled code with u64 arguments."""
    h = engine_hash + (tier + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


# Hashes that were received are a read-only view of the message.
@njit(types.uint64(types.Array(types.uint64, 1, "C", readonly=True), types.uint64), cache=True)
def _sum_of_mixes(hashes, tier):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for i in range(len(hashes)):
        total += mix(hashes[i], tier)
    return total


def digest_of(hashes: NDArray[np.uint64], tier: int = 0) -> int:
    """The digest of distinct engine hashes of one tier; digests of disjoint sets add up (mod 2^64)."""
    return int(_sum_of_mixes(np.ascontiguousarray(hashes, dtype=np.uint64), np.uint64(tier)))


def digest_of_one(engine_hash: int, tier: int = 0) -> int:
    """The digest of a single member, in plain Python."""
    h = (engine_hash + (tier + 1) * _GOLDEN) & _MASK
    h = ((h ^ (h >> 30)) * _FIRST) & _MASK
    h = ((h ^ (h >> 27)) * _SECOND) & _MASK
    return h ^ (h >> 31)
