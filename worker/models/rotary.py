"""Rotary position embedding: frequencies, their scaling, the table of cosines and sines, and the rotation."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, those between blended (Llama 3.1).

    A frequency is low when fewer than `low_freq_factor` of its periods fit into `original_max_position`
    tokens, high when more than `high_freq_factor` do.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own, as GGUF files store it; one a pair of channels."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians a token, float64 `[head_dim / 2]`."""
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        return plain / torch.tensor(scaling.factors, dtype=torch.float64)
    periods = scaling.original_max_position * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((periods - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return plain * keep + plain / scaling.factor * (1.0 - keep)


class RotaryTable:
    """Cosines and sines of every position, `[max_position, head_dim / 2]` each, on `device` in `dtype`."""

    def __init__(
        self, frequencies: torch.Tensor, max_position: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float64), frequencies)
        self._cos = angles.cos().to(device=device, dtype=dtype)
        self._sin = angles.sin().to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of `positions` `[N]`, each `[N, 1, head_dim / 2]`: one row for all heads of a token."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` `[N, heads, head_dim]` in place; channel i pairs with channel i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
