"""The prefix index in plain Python: a set of hashes per source.

Slow and obvious; the oracle of the property tests.
"""

from collections.abc import Sequence


class PlainIndex:
    """Same answers as `router.index.prefix_index.PrefixIndex`, from sets."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {}

    def store(self, source: int, hashes: Sequence[int]) -> None:
        self.held[source].update(hashes)

    def remove(self, source: int, hashes: Sequence[int]) -> None:
        self.held[source].difference_update(hashes)

    def replace(self, source: int, hashes: Sequence[int]) -> None:
        self.held[source] = set(hashes)

    def drop(self, source: int) -> None:
        self.held.pop(source, None)

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        depths = {}
        for source, blocks in self.held.items():
            depth = 0
            while depth < len(hashes) and hashes[depth] in blocks:
                depth += 1
            if depth:
                depths[source] = depth
        return depths


class MaskDict:
    """A dict of bitmasks, the natural single-threaded Python way; the other side of bench/index.py."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def store(self, source: int, hashes: Sequence[int]) -> None:
        masks, flag = self.masks, 1 << source
        for key in hashes:
            masks[key] = masks.get(key, 0) | flag

    def drop(self, source: int) -> None:
        keep = ~(1 << source)
        self.masks = {key: left for key, mask in self.masks.items() if (left := mask & keep)}

    def match(self, hashes: Sequence[int]) -> dict[int, int]:
        following, depths = -1, {}
        for depth, key in enumerate(hashes):
            bits = self.masks.get(key, 0) & following
            lost = bits ^ following if depth else 0
            while lost:
                low = lost & -lost
                depths[low.bit_length() - 1] = depth
                lost ^= low
            following = bits
            if not following:
                return depths
        while following > 0:
            low = following & -following
            depths[low.bit_length() - 1] = len(hashes)
            following ^= low
        return depths
