"""The block pool's memory: one buffer for keys and values of all layers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KVCacheBuffer:
    """Owns `buffer` `[2 (key, value), layers, pool_size, block_size, kv heads, head_dim]`.

    The buffer starts zeroed, so that padding reads finite numbers; on a CPU its pages are taken on first touch.
    """

    def __init__(
        self,
        num_layers: int,
        pool_size: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, pool_size, block_size, num_kv_heads, head_dim)
        if device.type == "cpu":
            # numpy asks the system for zero pages; torch would write them all, seconds for a large cache.
            nbytes = math.prod(shape) * dtype.itemsize
            self.buffer = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
        else:
            self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(self.buffer[0, layer], self.buffer[1, layer]) for layer in range(num_layers)]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return self.nbytes // self.buffer.shape[2]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views `[pool_size, block_size, kv heads, head_dim]` of a layer's keys and values (0-based)."""
        return self._layers[layer]
