"""The frozen head's loss with a Triton kernel between its two products, in bfloat16 or with both products in fp8.

In fp8 hidden states are quantized row by row, and so is the gradient of the logits, by a bound that the kernel knows
before it writes it. The second product sums over the vocabulary, so the scales of the head's rows do not come out of
it: the kernel multiplies them into the gradient first. They are powers of two, which makes that exact. The label's part
of the gradient, as large as all the rest, is no part of this: it is added from the head as it was given.

Shapes: R rows, H width, V vocabulary, W = V rounded up to what the fp8 product takes.
"""

import importlib.util
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.drafter.e4m3 import E4M3, TILE8, product8, quantize_by_powers
from paceline.records import UserError

_SLAB = 8192  # rows that are quantized at a time
# The smallest scale of a row, that of zeros: the bound of a gradient that follows from it is far from underflow, and a
# row whose largest value is 448 times this, 4e-10, is of full precision.
_LEAST_ROW = 2.0**-40


class FrozenHead8(NamedTuple):
    """A head in e4m3, once for each product, made by `head_in_fp8`. Rows behind the vocabulary are 0."""

    weight_WH: Tensor  # e4m3
    turned_HW: Tensor  # the same numbers as the second product reads them
    scale_W1: Tensor  # float32: what the rows are to be multiplied by, powers of two
    steps_W: Tensor  # the scales in bfloat16, which holds them exactly
    ones_H1: Tensor  # float32: the second product wants scales, too
    largest_step: float
    plain_VH: Tensor  # as it was given: labels' own rows are added from here
    vocab: int


def head_in_fp8(head_VH: Float[Tensor, "V H"]) -> FrozenHead8:
    """Quantize a head, each row with a scale of its own; waits for the device.

    Raises:
        UserError: the fp8 product does not take its width.
    """
    V, H = head_VH.shape
    if H % TILE8:
        raise UserError(
            f"A head in fp8 must have a width that is a multiple of {TILE8}, got {H} from the target: set train.fp8 to "
            "off."
        )
    W = -(-V // TILE8) * TILE8
    scale_W1 = torch.ones(W, 1, device=head_VH.device)
    weight_WH = torch.zeros(W, H, dtype=E4M3, device=head_VH.device)
    for at in range(0, V, _SLAB):
        part = slice(at, min(V, at + _SLAB))
        weight_WH[part], scale_W1[part] = quantize_by_powers(head_VH[part], least=_LEAST_ROW)
    return FrozenHead8(
        weight_WH=weight_WH,
        turned_HW=weight_WH.view(torch.uint8).t().contiguous().view(E4M3),
        scale_W1=scale_W1,
        steps_W=scale_W1[:, 0].bfloat16(),
        ones_H1=torch.ones(H, 1, device=head_VH.device),
        largest_step=float(scale_W1[:V].max()),
        plain_VH=head_VH,
        vocab=V,
    )


def has_kernel(head_VH: Tensor) -> bool:
    """Return whether `fused_head_loss` takes a head that is not in fp8: in bfloat16, on a GPU, where Triton is."""
    there = head_VH.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return there and head_VH.dtype == torch.bfloat16


@torch.no_grad()
def fused_head_loss(
    hidden_RH: Float[Tensor, "R H"],
    head: Tensor | FrozenHead8,
    labels_R: Int[Tensor, " R"],
    weights_R: Float[Tensor, " R"],
    cap: float = 0.0,
) -> tuple[Float[Tensor, ""], Bool[Tensor, " R"], Float[Tensor, "R H"]]:
    """Return what `loss.head_loss` does, for a bfloat16 head or one in fp8 on a GPU with Triton.

    Different is that a row of weight 0 is no hit, and that of logits which a soft cap makes equal the larger one is the
    best. Nothing here is compiled by torch, and nothing waits for the device, so it can be captured.
    """
    # Where there is no GPU there may be no Triton.
    from paceline.drafter.head_kernel import gradient_in_e4m3, gradient_in_place, quantize_rows

    if not isinstance(head, FrozenHead8):
        logits_RV = hidden_RH.to(head.dtype) @ head.T
        losses_R, hits_R = gradient_in_place(logits_RV, labels_R, weights_R, cap)
        return losses_R.sum(), hits_R, (logits_RV @ head).to(hidden_RH.dtype)
    quantized_RH, scale_R1 = quantize_rows(hidden_RH)
    logits_RW = product8(quantized_RH, scale_R1, head.weight_WH, head.scale_W1, torch.bfloat16)
    losses_R, hits_R, grad_RW, scale_R1, of_label_R1 = gradient_in_e4m3(
        logits_RW, labels_R, weights_R, cap, steps_W=head.steps_W, largest_step=head.largest_step, vocab=head.vocab
    )
    # In 14 bits small entries of a sum over a vocabulary would be lost behind large ones; a sum over a width does.
    grad_RH = product8(grad_RW, scale_R1, head.turned_HW, head.ones_H1, torch.bfloat16, fast_sum=False)
    grad_RH = torch.addcmul(grad_RH.float(), of_label_R1, head.plain_VH[labels_R].float())
    return losses_R.sum(), hits_R, grad_RH.to(hidden_RH.dtype)
