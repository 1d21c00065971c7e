"""The frozen head in fp8, and how many rows of logits are made at a time (its kernel: tests/gpu/test_head.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafter import loss as loss_module
from paceline.drafter.fused_head import has_kernel, head_in_fp8
from paceline.drafter.loss import frozen_head_loss, head_loss
from paceline.records import UserError


def random_head(V: int, H: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.empty(V, 1).uniform_(-4, 2, generator=generator)
    return (torch.randn(V, H, generator=generator) * sizes).bfloat16()


@pytest.mark.parametrize("V", [32, 37, 20_000])
def test_a_head_in_fp8_is_the_head_but_for_rounding(V: int) -> None:
    head = random_head(V, 48)
    head[5] = 0
    made = head_in_fp8(head)
    assert len(made.weight_WH) % 16 == 0
    assert 0 <= len(made.weight_WH) - V < 16
    back = made.weight_WH[:V].double() * made.scale_W1.double()[:V]
    # Rounding to 4 bits, and below the smallest normal number to a fixed step.
    bound = 2**-4 * head.double().abs() + 2**-10 * made.scale_W1.double()[:V]
    assert ((back - head.double()).abs() <= bound).all()
    # No row wastes more than half the range; a power of two is what bfloat16 holds exactly.
    filled = made.weight_WH[:V].float().abs().amax(1)
    assert ((filled >= 224) | (head.abs().amax(1) == 0)).all()
    assert (torch.frexp(made.scale_W1).mantissa == 0.5).all()
    assert torch.equal(made.steps_W.float(), made.scale_W1[:, 0])
    assert made.largest_step == made.scale_W1[:V].max()
    assert torch.equal(made.turned_HW.float(), made.weight_WH.float().T)
    assert made.turned_HW.is_contiguous()
    assert not made.weight_WH[V:].float().any()
    assert made.vocab == V


def test_a_row_of_zeros_takes_nothing_of_the_gradients_range() -> None:
    # Vocabularies are often padded with such rows, and the bound of a gradient in e4m3 goes by the largest step.
    head = torch.full((32, 16), 0.02).bfloat16()
    head[30:] = 0
    assert head_in_fp8(head).largest_step == 2.0**-14, "0.02 is 328 of these"


def test_a_width_that_the_fp8_product_does_not_take_is_refused() -> None:
    with pytest.raises(UserError, match=r"multiple of 16, got 40 .* train\.fp8 to off"):
        head_in_fp8(random_head(32, 40))


def test_a_cpu_has_no_kernel() -> None:
    assert not has_kernel(random_head(32, 16))


@pytest.mark.parametrize(
    ("kind", "row_bytes"),
    [("plain", 37 * 4), ("fused", 37 * 2), ("fp8", 48 * 3)],
)
def test_chunks_hold_no_more_bytes_than_allowed(monkeypatch: pytest.MonkeyPatch, kind: str, row_bytes: int) -> None:
    head = random_head(37, 16)
    seen: list[int] = []

    def recording(hidden: Tensor, given: Any, labels: Tensor, weights: Tensor, cap: float) -> Any:
        seen.append(len(hidden))
        return head_loss(hidden, head, labels, weights, cap)

    if kind != "plain":
        monkeypatch.setattr(loss_module, "fused_head_loss", recording)
    hidden, labels, weights = torch.randn(60, 16), torch.arange(60) % 37, torch.ones(60)
    given = head_in_fp8(head) if kind == "fp8" else head
    chunk: Callable[..., Any] = recording
    loss, hits, grad = frozen_head_loss(hidden, given, labels, weights, logits_bytes=row_bytes * 20, chunk=chunk)
    assert seen == [20, 20, 20]
    seen.clear()
    frozen_head_loss(hidden, given, labels, weights, logits_bytes=row_bytes * 20 - 1, chunk=chunk)
    assert seen == [15] * 4
    for made, expected in zip((loss, hits, grad), head_loss(hidden, head, labels, weights), strict=True):
        torch.testing.assert_close(made, expected)
