"""Prefixes of prompts that were just placed: siblings of a burst find each other before the first stored
event arrives.

Each source has two generations of blocks; every `ttl_s` the older one is forgotten, so a prediction lives
between one and two `ttl_s` and memory is bounded by what was placed in that time.  The exact index never
sees these blocks.
"""

import numpy as np
from numpy.typing import NDArray

from router.index.catalog import IndexKey
from router.index.prefix_index import PrefixIndex


class PredictedPrefixes:
    """Blocks that sources are about to hold, per index key.  One owner: the event loop's thread."""

    def __init__(self, ttl_s: float) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; it must be above 0 seconds")
        self._ttl_s = ttl_s
        self._rotate_at = 0.0
        self._current: dict[IndexKey, PrefixIndex] = {}
        self._previous: dict[IndexKey, PrefixIndex] = {}

    def add(self, key: IndexKey, source: int, hashes: NDArray[np.uint64], now: float) -> None:
        """Expect a source (the exact index's handle) to hold a prompt's blocks soon."""
        self._rotate(now)
        index = self._current.setdefault(key, PrefixIndex())
        if not index.has_source(source):
            index.add_source(source)
        index.store(source, hashes)

    def match(self, key: IndexKey, hashes: NDArray[np.uint64], now: float) -> dict[int, int]:
        """Handle -> leading blocks expected."""
        self._rotate(now)
        depths: dict[int, int] = {}
        for generation in (self._previous, self._current):
            index = generation.get(key)
            if index is not None:
                for source, depth in index.match(hashes).as_dict().items():
                    depths[source] = max(depth, depths.get(source, 0))
        return depths

    def forget(self, source: int) -> None:
        """A source has left or lost its cache: expect nothing of it."""
        for generation in (self._previous, self._current):
            for index in generation.values():
                index.drop(source)

    def _rotate(self, now: float) -> None:
        if now >= self._rotate_at:
            stale = now >= self._rotate_at + self._ttl_s
            self._previous = {} if stale else self._current
            self._current = {}
            self._rotate_at = now + self._ttl_s
