"""What a source writes its blocks into; the router's index is one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvevents.types import SourceId


class IndexSink(Protocol):
    """One set of sequence hashes (u64) per source.

    All calls come from the event loop's thread; none awaits, so each is one step as seen by readers.
    """

    def open(self, source_id: SourceId, model: str, block_size: int) -> int:
        """Begin an empty set and return its handle.

        Raises:
            ValueError: block_size is below 1.
        """
        ...

    def store(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Add hashes; those already in change nothing."""
        ...

    def remove(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Take hashes out; absent ones change nothing."""
        ...

    def replace(self, source: int, hashes: NDArray[np.uint64]) -> None:
        """Swap the whole set in one step."""
        ...

    def drop(self, source: int) -> None:
        """End the set; its handle is never used again."""
        ...
