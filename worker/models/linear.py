"""Matrix products with fixed weights: plain, and with weights laid out once for the CPU's kernels.

On CPU in float32, the library behind `torch.nn.functional.linear` re-arranges weights at every call, which for
few rows (a decode step) costs as much as the product itself.  oneDNN takes weights that were arranged once, but
is slower for many rows (a prefill).  bench/linear.py measures where one passes the other.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`[N, in]` -> `[N, out]`, a new tensor."""

_TYPICAL_ROWS = 8
"""Rows for which oneDNN chooses the layout: a decode batch.  The result serves any number of rows."""
_MOST_ROWS_PACKED = 256
"""Above so many rows the plain product is as fast or faster."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, spend_memory: bool = True) -> Linear:
    """The fastest product with `weight` `[out, in]` on its device.

    Where packing helps, `spend_memory` keeps the weights in both layouts, each for the numbers of rows at which
    it is faster; without it the packed layout serves all.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _can_pack():
        return PlainLinear(weight, bias)
    packed = PackedLinear(weight, bias)
    return SwitchingLinear(packed, PlainLinear(weight, bias)) if spend_memory else packed


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


class SwitchingLinear:
    """Few rows to `packed`, many to `plain`: the same weights twice."""

    def __init__(self, packed: PackedLinear, plain: PlainLinear) -> None:
        self._packed = packed
        self._plain = plain

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed(rows) if rows.shape[0] <= _MOST_ROWS_PACKED else self._plain(rows)


def _can_pack() -> bool:
    # Operators that torch uses for its own compiled graphs; a build without oneDNN lacks them.
    operators = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )
