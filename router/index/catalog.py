"""One prefix index per (model, block size), behind one set of source handles: where the event plane writes
what workers hold.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.index.prefix_index import NO_MATCH, Match, PrefixIndex


class IndexKey(NamedTuple):
    """What makes two prompts comparable: the served model's name and the tokens in a block."""

    model: str
    block_size: int


class IndexCatalog:
    """Implements kvevents' `IndexSink`.

    Handles are never reused: whatever arrives late for a dropped source is counted, not applied.

    Not thread-safe: the event loop's thread owns it.
    """

    def __init__(self) -> None:
        self._indexes: dict[IndexKey, PrefixIndex] = {}
        self._home: dict[int, PrefixIndex] = {}
        self._keys: dict[int, IndexKey] = {}
        self._next_handle = 0
        self.late_writes = 0
        """Writes that named a dropped or unknown source."""

    def open(self, source_id: object, model: str, block_size: int) -> int:
        """A fresh, empty source of a model.

        `source_id` is for the caller's own bookkeeping.  Raises ValueError for block_size < 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size of {source_id} is {block_size}; a block holds at least 1 token")
        key = IndexKey(model, block_size)
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = PrefixIndex()
        handle = self._next_handle
        self._next_handle += 1
        index.add_source(handle)
        self._home[handle] = index
        self._keys[handle] = key
        return handle

    def store(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Add blocks to a source; idempotent."""
        index = self._home.get(source)
        if index is None:
            self.late_writes += 1
            return
        index.store(source, hashes)

    def remove(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Take blocks from a source; absent ones change nothing."""
        index = self._home.get(source)
        if index is None:
            self.late_writes += 1
            return
        index.remove(source, hashes)

    def replace(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Swap a source's whole set in one step."""
        index = self._home.get(source)
        if index is None:
            self.late_writes += 1
            return
        index.replace(source, hashes)

    def drop(self, source: int) -> None:
        """Forget a source for good.  Dropping it again changes nothing."""
        index = self._home.pop(source, None)
        if index is None:
            return
        index.drop(source)
        key = self._keys.pop(source)
        if not index.sources:
            del self._indexes[key]

    def match(self, key: IndexKey, hashes: NDArray[np.uint64]) -> Match:
        """Longest prefix per source of one model and block size; empty when nothing of that kind is known."""
        index = self._indexes.get(key)
        if index is None:
            return NO_MATCH
        return index.match(hashes)

    def upkeep(self) -> bool:
        """One bounded step of upkeep in every index.  Returns True while there is more to do."""
        return any(list(map(PrefixIndex.upkeep, self._indexes.values())))

    def blocks_of(self, source: int) -> int:
        """Blocks that a source holds; 0 when it is not open."""
        index = self._home.get(source)
        return 0 if index is None else index.blocks_of(source)

    def indexes(self) -> dict[IndexKey, PrefixIndex]:
        """The indexes, for metrics and checks."""
        return dict(self._indexes)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every index agrees with itself."""
        for index in self._indexes.values():
            index.check_integrity()
