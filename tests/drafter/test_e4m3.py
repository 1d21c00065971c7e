"""Rows in e4m3 by either rule, against every number that e4m3 has, and their product against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.drafter.e4m3 import E4M3, product8, quantize, quantize_by_powers

NUMBERS = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()].unique()


def rows(spread: float = 10.0) -> Tensor:
    """Rows whose sizes differ by many powers of e, and last one of every bfloat16 number that is finite."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(64, 32, generator=generator) * (torch.randn(64, 1, generator=generator) * spread).exp()
    each = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    each = each[each.isfinite()][::7, None] * torch.linspace(0, 1, 32)
    return torch.cat([drawn, each])


def nearest(values: Tensor) -> Tensor:
    """Return e4m3's numbers that are next to these."""
    at = torch.searchsorted(NUMBERS, values).clamp(1, len(NUMBERS) - 1)
    below, above = NUMBERS[at - 1], NUMBERS[at]
    return torch.where((values - below).abs() <= (above - values).abs(), below, above)


@pytest.mark.parametrize("rule", [quantize, quantize_by_powers])
def test_each_value_becomes_the_nearest_number_of_e4m3(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    values = rows()
    made, scale = rule(values)
    assert made.dtype == E4M3
    true = values.double() / scale
    assert true.abs().max() <= 448 * (1 + 1e-6), "nothing has to be cut off, which not every torch does"
    slack = 1e-6 * true.abs()  # of a division in float32
    assert ((made.double() - true).abs() <= (nearest(true) - true).abs() + slack).all()


def test_a_scale_uses_all_of_the_format_and_a_power_of_two_at_least_half() -> None:
    values = rows()
    largest = values.abs().amax(1)
    fits = (largest > 1e-9) & (largest < 1e38)
    assert (quantize(values)[0][fits].float().abs().amax(1) == 448).all()
    made, scale = quantize_by_powers(values[fits])
    assert (made.float().abs().amax(1) >= 224).all()
    assert (torch.frexp(scale).mantissa == 0.5).all()


@pytest.mark.parametrize("rule", [quantize, quantize_by_powers])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(rule: Callable[..., tuple[Tensor, Tensor]]) -> None:
    values = torch.ones(4, 16)
    values[0], values[1, 3], values[2, 4] = 0, torch.inf, torch.nan
    made, scale = rule(values)
    back = made.float() * scale
    assert scale[0] > 0
    assert not back[0].any()
    assert torch.equal(back[3], values[3])
    assert not back[1, 3].isfinite()
    assert not back[2].isfinite().any()


@pytest.mark.parametrize("largest", [448.0, 449.0, 1.0, 1.75, 1.76, 3e-5, 6e4])
def test_powers_are_the_smallest_that_fit(largest: float) -> None:
    values = torch.tensor([[largest, -largest / 3, 0.0]])
    quantized, scale = quantize_by_powers(values)
    assert torch.frexp(scale).mantissa.item() == 0.5
    assert 224 < largest / scale.item() <= 448
    assert (quantized.double() * scale - values.double()).norm() <= 2**-4 * values.double().norm()


def test_a_value_that_is_scaled_twice_by_powers_is_rounded_once() -> None:
    values = rows(2.0)[:64, :16]
    quantized, scale = quantize_by_powers(values)
    back = quantized.float() * scale
    again, other = quantize_by_powers(back.t())
    torch.testing.assert_close(again.float() * other, back.t(), rtol=0, atol=2.0**-10 * other.max())


def test_a_product_is_that_of_the_numbers_that_are_held() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, 64, generator=generator) for size in (16, 48))
    a8, b8 = quantize(a), quantize_by_powers(b)
    wanted = (a8[0].double() * a8[1]) @ (b8[0].double() * b8[1]).T
    torch.testing.assert_close(product8(*a8, *b8, torch.float32).double(), wanted, rtol=1e-5, atol=1e-5)
