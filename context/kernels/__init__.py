"""The kernels in pairs, torch and Triton, with one signature each; the backend is chosen by device at run time."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

from context.attention import AttentionMetadata


class KernelBackend(Protocol):
    """What a backend offers; the conformance suite runs over every implementation."""

    def append(
        self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, block_idx: Tensor, local_pos: Tensor
    ) -> None:
        """Write token i of key, value `[tokens, kv heads, head_dim]` to keys, values[block_idx[i], local_pos[i]].

        Padding tokens share one slot of the dummy block; which of them stays there does not matter.
        """
        ...

    def step(self, metadata: AttentionMetadata, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Causal attention of every real token over its request's cached tokens and itself.

        Args:
            query: `[tokens, 1, heads, head_dim]`, at least the step's real tokens.
            keys, values: a layer's blocks `[pool, block size, kv heads, head_dim]`, this step's tokens appended.
            scale: multiplies the scores.

        Returns:
            The shape of `query`; rows behind the real tokens are zero.
        """
        ...


_ENVIRONMENT = "WARMROUTE_KERNELS"


def backend_for(device: torch.device) -> KernelBackend:
    """Triton on CUDA, torch elsewhere; the environment variable WARMROUTE_KERNELS=torch|triton overrides.

    Raises:
        ValueError: the variable names neither.
    """
    name = os.environ.get(_ENVIRONMENT) or ("triton" if device.type == "cuda" else "torch")
    if name == "torch":
        from context.kernels.torch_backend import TORCH

        return TORCH
    if name == "triton":
        from context.kernels.triton_backend import TRITON

        return TRITON
    raise ValueError(f"{_ENVIRONMENT} is {name!r}; it must be 'torch' or 'triton'")
