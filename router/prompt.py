"""A prompt as the router needs it: token ids, or the reason why there are none, and its sequence hashes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvevents.hashing import sequence_hashes

_NONE = np.empty(0, dtype=np.uint64)


@dataclass(slots=True)
class PromptTokens:
    """Token ids (uint32[n]) when the prompt could be tokenised; otherwise `why_not` says why and `count` is
    an estimate.
    """

    ids: NDArray[np.uint32] | None
    count: int
    why_not: str | None = None
    given: bool = False
    """The client sent the ids itself; nothing is added to the forwarded body."""
    salt: str = ""
    lora: str = ""
    _hashes: dict[int, NDArray[np.uint64]] = field(default_factory=dict)

    @classmethod
    def of(cls, ids: Sequence[int] | NDArray[np.uint32], **more: object) -> "PromptTokens":
        """From token ids."""
        array = np.asarray(ids, dtype=np.uint32)
        return cls(array, int(array.shape[0]), **more)  # type: ignore[arg-type]

    @classmethod
    def unknown(cls, estimate: int, why_not: str) -> "PromptTokens":
        """A prompt that cannot be hashed: it is routed by load alone."""
        return cls(None, estimate, why_not)

    def hashes(self, block_size: int) -> NDArray[np.uint64]:
        """Sequence hashes of the complete blocks, uint64[n]; computed once a block size.

        Empty without token ids.
        """
        if self.ids is None:
            return _NONE
        known = self._hashes.get(block_size)
        if known is None:
            known = sequence_hashes(self.ids, block_size, lora=self.lora, salt=self.salt)
            self._hashes[block_size] = known
        return known
