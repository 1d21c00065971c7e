"""Products of training in fp8 against float64, gradients included; and what is refused."""

import pytest
import torch
from torch import Tensor

from paceline.drafter.e4m3 import E4M3
from paceline.drafter.float8 import check_sizes, halves8, linear8, transposed
from paceline.records import UserError

T, K, N = 96, 64, 48


def drawn(*size: int, spread: float, seed: int) -> Tensor:
    """Normal entries in rows whose sizes differ by some powers of e, in what bfloat16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * (torch.randn(size[0], 1, generator=generator) * spread).exp()
    return values.bfloat16().float()


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def both(spread: float, scale: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Output, gradient of the input and of the weight in fp8, and the same in float64."""
    x, weight = drawn(T, K, spread=spread, seed=1), drawn(N, K, spread=0.3 * spread, seed=2) * 0.02
    weight, dy = weight.bfloat16().float(), drawn(T, N, spread=spread, seed=3) * scale
    dy = dy.bfloat16().float()
    leaves = [x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    y = linear8(leaves[0].view(2, T // 2, K), leaves[1])
    found = [y.flatten(0, 1), *torch.autograd.grad(y, leaves, dy.bfloat16().view_as(y))]
    x, weight, dy = x.double(), weight.double(), dy.double()
    return found, [x @ weight.T, dy @ weight, dy.T @ x]


@pytest.mark.parametrize("spread", [0.0, 1.5])
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_a_product_and_its_gradients_are_near_those_of_float64(spread: float, scale: float) -> None:
    found, wanted = both(spread, scale)
    for name, own, truth in zip(("y", "dx", "dW"), found, wanted, strict=True):
        assert own.dtype == torch.bfloat16
        # An entry of e4m3 is off by 2^-4 at most and by some 2.6 % in the mean; the two of a product are independent.
        assert off(own, truth) <= 0.05, name


def test_halves_are_those_of_the_product_and_so_are_gradients() -> None:
    x, weight, dy = drawn(T, K, spread=1.0, seed=1), drawn(N, K, spread=0.5, seed=2), drawn(T, N, spread=1.0, seed=3)
    dy[:, : N // 2] *= 100  # the scale is that of both halves
    results = []
    for product in (linear8, lambda x, weight: torch.cat(halves8(x, weight), -1)):
        leaves = [x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
        y = product(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy.bfloat16())])
    assert all(torch.equal(whole, halved) for whole, halved in zip(*results, strict=True))


def test_each_row_of_a_product_and_each_outputs_gradient_is_as_precise_as_the_largest() -> None:
    found, wanted = both(1.5)
    for own, truth in ((found[0], wanted[0]), (found[1], wanted[1]), (found[2], wanted[2]), (found[2].T, wanted[2].T)):
        assert max(off(row, true) for row, true in zip(own, truth, strict=True)) <= 0.12


def test_outputs_whose_weights_are_zero_have_a_gradient_of_full_precision() -> None:
    x, dy = drawn(T, K, spread=0.0, seed=1), drawn(T, N, spread=0.0, seed=3)
    weight = drawn(N, K, spread=0.0, seed=2)
    weight[3] = 0
    leaf = weight.bfloat16().requires_grad_()
    [found] = torch.autograd.grad(linear8(x.bfloat16(), leaf), [leaf], dy.bfloat16())
    assert off(found[3], (dy.double().T @ x.double())[3]) <= 0.2


def test_rows_of_zeros_and_columns_of_zeros_give_zeros() -> None:
    x, weight = drawn(T, K, spread=0.0, seed=1), drawn(N, K, spread=0.0, seed=2)
    x[5], x[:, 7] = 0, 0
    leaves = [x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    y = linear8(*leaves)
    dy = torch.ones_like(y)
    dy[9] = 0
    dx, dw = torch.autograd.grad(y, leaves, dy)
    assert not any(part.any() for part in (y[5], dx[9], dw[:, 7]))
    assert all(made.isfinite().all() for made in (y, dx, dw))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x, weight = drawn(T, K, spread=0.0, seed=1), drawn(N, K, spread=0.0, seed=2)
    x[5, 6] = value
    leaf = weight.bfloat16().requires_grad_()
    y = linear8(x.bfloat16(), leaf)
    assert not y[5].isfinite().any()
    assert y[6].isfinite().all()
    [dw] = torch.autograd.grad(y, [leaf], torch.ones_like(y))
    assert not dw[:, 6].isfinite().any()


@pytest.mark.usefixtures("traceable")
def test_the_compiled_product_is_the_plain_one() -> None:
    def made(x: Tensor, weight: Tensor) -> Tensor:
        return linear8(x * 2, weight) * 2

    x, weight = drawn(T, K, spread=1.0, seed=1).bfloat16(), drawn(N, K, spread=0.3, seed=2).bfloat16() * 0.02
    dy, results = drawn(T, N, spread=1.0, seed=3).bfloat16(), []
    for call in (made, torch.compile(made, fullgraph=True, dynamic=False)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = call(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for plain, compiled in zip(*results, strict=True):
        assert off(compiled, plain.double()) <= 1e-3


def test_bytes_are_transposed() -> None:
    values = torch.arange(96).view(6, 16).to(torch.uint8).view(E4M3)
    turned = transposed(values)
    assert turned.is_contiguous()
    assert torch.equal(turned.view(torch.uint8), values.view(torch.uint8).t())


def test_sizes_that_products_do_not_take_are_named() -> None:
    check_sizes({"hidden_size": 64})
    with pytest.raises(UserError, match=r"^With train.fp8: on, drafter.head_dim must be a multiple of 16, got 24\."):
        check_sizes({"hidden_size": 64, "drafter.head_dim": 24})
