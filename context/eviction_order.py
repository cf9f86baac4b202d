"""Which cached block goes next: a heap of cached leaves with lazy deletion.

Only blocks without cached children stand in the heap, so a parent is never taken before its children; a block enters
when it becomes a leaf and leaves when it is taken or found stale.  Every entry costs O(log n) once, so eviction grows
with what is evicted and not with what is cached.
"""

from __future__ import annotations

import heapq

_SLACK = 64


class EvictionOrder:
    """A priority queue of (timestamp, block id): the oldest first, lower ids before higher ones of equal age."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._age: dict[int, int] = {}
        """The timestamp under which a block stands in the heap now; other entries of that block are stale."""

    def __len__(self) -> int:
        return len(self._age)

    def __contains__(self, block: int) -> bool:
        return block in self._age

    def add(self, block: int, timestamp: int) -> None:
        """Enter a block that has become a cached leaf, or move it to a new timestamp."""
        if self._age.get(block) == timestamp:
            return
        self._age[block] = timestamp
        heapq.heappush(self._heap, (timestamp, block))
        if len(self._heap) > 2 * len(self._age) + _SLACK:
            self._heap = [(age, member) for member, age in self._age.items()]
            heapq.heapify(self._heap)

    def discard(self, block: int) -> None:
        """Take a block out, if it is in."""
        self._age.pop(block, None)

    def pop(self) -> int | None:
        """Remove and return the next block, or None if there is none."""
        while self._heap:
            timestamp, block = heapq.heappop(self._heap)
            if self._age.get(block) == timestamp:
                del self._age[block]
                return block
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._age.clear()
