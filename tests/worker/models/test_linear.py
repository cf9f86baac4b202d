"""The products with fixed weights agree, whichever layout serves them."""

import pytest
import torch

from worker.models.linear import Linear, PackedLinear, PlainLinear, SwitchingLinear, make_linear

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(70, 33, generator=GENERATOR)
BIAS = torch.randn(70, generator=GENERATOR)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 256, 257, 300])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize(
    "make",
    [
        PackedLinear,
        lambda weight, bias: SwitchingLinear(PackedLinear(weight, bias), PlainLinear(weight, bias)),
        lambda weight, bias: make_linear(weight, bias, spend_memory=False),
        make_linear,
    ],
    ids=["packed", "switching", "one layout", "chosen"],
)
def test_every_layout_gives_the_plain_product(rows: int, bias: torch.Tensor | None, make: type[PackedLinear]) -> None:
    linear: Linear = make(WEIGHT, bias)
    given = torch.randn(rows, 33, generator=GENERATOR)
    with torch.inference_mode():
        found = linear(given)
    expected = given.double() @ WEIGHT.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


def test_inputs_that_are_not_contiguous_are_taken() -> None:
    given = torch.randn(8, 66, generator=GENERATOR)[:, ::2]
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(WEIGHT, None)(given), given @ WEIGHT.T, atol=1e-4, rtol=0)


def test_other_types_are_served_plainly() -> None:
    linear = make_linear(WEIGHT.bfloat16(), BIAS.bfloat16())
    assert isinstance(linear, PlainLinear)
    assert linear(torch.ones(2, 33, dtype=torch.bfloat16)).dtype == torch.bfloat16
