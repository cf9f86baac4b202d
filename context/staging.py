"""One CPU buffer and one device buffer for everything a step's kernels read: one copy a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGN = 16


class Field(NamedTuple):
    """One array in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class StagingBuffer:
    """Lays fields out in one byte buffer (pinned where the device is a GPU) and mirrors it on the device.

    On a CPU device both sides are the same memory, so the copy costs nothing and views never go stale.
    """

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        offsets: list[int] = []
        size = 0
        for field in fields:
            offsets.append(size)
            nbytes = field.dtype.itemsize * int(np.prod(field.shape))
            size += -(-nbytes // _ALIGN) * _ALIGN
        self.nbytes = size
        on_cpu = device.type == "cpu"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=not on_cpu)
        self._device = self._host if on_cpu else torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, torch.Tensor] = {}
        self.device: dict[str, torch.Tensor] = {}
        for field, offset in zip(fields, offsets, strict=True):
            self.host[field.name] = self._view(self._host, field, offset)
            self.device[field.name] = self._view(self._device, field, offset)

    @staticmethod
    def _view(buffer: torch.Tensor, field: Field, offset: int) -> torch.Tensor:
        nbytes = field.dtype.itemsize * int(np.prod(field.shape))
        return buffer[offset : offset + nbytes].view(field.dtype).view(field.shape)

    def numpy(self, name: str) -> NDArray:
        """The host side of a field, as numpy."""
        return self.host[name].numpy()

    def transfer(self) -> None:
        """Copy the whole buffer to the device, blocking (the host side is written in place by the next step)."""
        if self._device is not self._host:
            self._device.copy_(self._host)
