"""Matrix products with fixed weights: plain, and with weights laid out once for the CPU's kernels.

On CPU in float32, the library behind `torch.nn.functional.linear` re-arranges weights at every call, which for
a handful of rows, a decode step, costs as much as the product itself.  oneDNN takes weights that were
arranged once; bench/linear.py compares both.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[N, in]` -> `[N, out]`, a new tensor."""

_TYPICAL_ROWS = 8
"""Rows for which the layout is chosen: a decode batch.  The result serves any number of rows."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest product with `weight` `[out, in]` on its device.  `weight` need not be kept afterwards."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_pack():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


class PlainLinear:
    """`torch.nn.functional.linear`, on any device in any type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)


class PackedLinear:
    """oneDNN's product with weights in its own layout; CPU and float32 only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self._packed, self._bias, "none", [], "")


def _can_pack() -> bool:
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )
