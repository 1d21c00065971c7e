"""What lies between the two products of the frozen head, as one Triton kernel. Import it where Triton is.

One program takes one row and reads it twice: first for its maximum and the sum of its exponentials, then for the
gradient of its logits, which it writes as the second product reads it: in bfloat16 over the logits, or in e4m3.
Nothing is added up across programs, so results are the same bit for bit whenever they are computed.

Shapes: R rows, V vocabulary, W entries of a row (V, and what a head in fp8 is padded with), H width.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries at a time and warps: the fastest of four pairs on an H200, in bfloat16 and in fp8.
_BFLOAT16: dict[str, Any] = {"BLOCK": 4096, "num_warps": 8}
_E4M3: dict[str, Any] = {"BLOCK": 8192, "num_warps": 16}


def gradient_in_place(logits_RV: Tensor, labels_R: Tensor, weights_R: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return weight * cross-entropy and hits of each row, and write the gradient over the bfloat16 logits.

    Losses are float32. A row of weight 0 is not read: its loss and gradient are 0 and its hit is false.
    """
    R, V = logits_RV.shape
    losses_R, hits_R = _results(logits_RV)
    with torch.cuda.device_of(logits_RV):  # Triton launches on the current device
        _between[(R,)](
            logits_RV, labels_R, weights_R.float(), losses_R, hits_R, logits_RV, losses_R, losses_R, losses_R, 1.0,
            cap, V, V, CAPPED=cap != 0, FP8=False, **_BFLOAT16,
        )  # fmt: skip
    return losses_R, hits_R.view(torch.bool)


def gradient_in_e4m3(
    logits_RW: Tensor,
    labels_R: Tensor,
    weights_R: Tensor,
    cap: float,
    *,
    steps_W: Tensor,
    largest_step: float,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return losses, hits, and the gradient times `steps_W` in e4m3 with the float32 scale [R, 1] of each row.

    The label's own entry is apart, last, [R, 1] in float32 and without `steps_W`, and 0 in e4m3. It is about as large
    as all others together: in one scale with it, those of a flat distribution, 1/V each, would be e4m3's last bits.

    `steps_W` are the scales of the head's rows, none above `largest_step`: they belong to what the second product sums
    over and cannot be applied behind it. Entries from `vocab` on are no tokens: they are not read, and written as 0.
    """
    R, W = logits_RW.shape
    losses_R, hits_R = _results(logits_RW)
    grad_RW = torch.empty_like(logits_RW, dtype=torch.float8_e4m3fn)
    scale_R1, of_label_R1 = losses_R.new_empty(R, 1), losses_R.new_empty(R, 1)
    with torch.cuda.device_of(logits_RW):
        _between[(R,)](
            logits_RW, labels_R, weights_R.float(), losses_R, hits_R, grad_RW, scale_R1, of_label_R1, steps_W,
            largest_step, cap, vocab, W, CAPPED=cap != 0, FP8=True, **_E4M3,
        )  # fmt: skip
    return losses_R, hits_R.view(torch.bool), grad_RW, scale_R1, of_label_R1


def quantize_rows(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and the float32 scale [R, 1] of each row, by which it must be multiplied to be x again."""
    R, H = x_RH.shape
    x_RH = x_RH.contiguous()
    made_RH = torch.empty_like(x_RH, dtype=torch.float8_e4m3fn)
    scale_R1 = torch.empty(R, 1, dtype=torch.float32, device=x_RH.device)
    with torch.cuda.device_of(x_RH):
        _quantize[(R,)](x_RH, made_RH, scale_R1, H, BLOCK=triton.next_power_of_2(H), num_warps=4)
    return made_RH, scale_R1


def _results(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for losses and hits of rows."""
    new = logits_RV.new_empty
    return new(len(logits_RV), dtype=torch.float32), new(len(logits_RV), dtype=torch.uint8)


# Not to be wrapped by what checks shapes: Triton compiles the source, and looks names up around the function itself.
@no_type_check
@triton.jit
def _between(
    logits, labels, weights, losses, hits, grads, scales, of_label, steps, largest_step, cap, vocab, width,
    CAPPED: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    grads += row * width
    weight = tl.load(weights + row)
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)
    if weight == 0:
        for begin in range(0, width, BLOCK):
            at = begin + lanes
            tl.store(grads + at, tl.zeros([BLOCK], tl.float32).to(grads.dtype.element_ty), mask=at < width)
        tl.store(losses + row, 0.0)
        tl.store(hits + row, 0)
        if FP8:
            tl.store(scales + row, 1.0)
            tl.store(of_label + row, 0.0)
    else:
        # The label's logit, read before anything is written over it.
        right = tl.load(logits + label).to(tl.float32)
        if CAPPED:
            right = (1 - 2 / (1 + tl.exp(2 * right / cap))) * cap  # tanh
        # A bfloat16 number as an integer that sorts like it takes the upper half of 32 bits. Below it stands whether
        # the token is before the label, 2, the label, 1, or behind it, 0: so one maximum gives the largest logit and
        # whether the label is the first that has it.
        best = -2147483648
        top = float("-inf")
        sums = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, width, BLOCK):
            at = begin + lanes
            x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
            order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            order = (order & -65536) | tl.where(at < label, 2, tl.where(at == label, 1, 0))
            best = tl.maximum(best, tl.max(order, 0))
            upper = best & -65536
            highest = tl.where(upper < 0, upper ^ 0x7FFF0000, upper).to(tl.float32, bitcast=True)
            if CAPPED:
                highest = (1 - 2 / (1 + tl.exp(2 * highest / cap))) * cap
                x = tl.where(at < vocab, (1 - 2 / (1 + tl.exp(2 * x / cap))) * cap, float("-inf"))
            sums = sums * tl.exp(top - highest) + tl.exp(x - highest)
            top = highest
        hit = (best & 3) == 1
        log_sum = top + tl.log(tl.sum(sums, 0))
        tl.store(losses + row, weight * (log_sum - right))
        tl.store(hits + row, tl.where(hit, 1, 0))
        shrink = 1.0
        if FP8:
            # No p but the label's is above the best one, or above 1 - p of the label where this is the best. What is
            # added is above the rounding error of 1 - p.
            p = tl.exp(right - log_sum)
            most = tl.where(hit, tl.maximum(1 - p, 0.0) + 4e-6, tl.exp(top - log_sum))
            bound = most * largest_step * tl.abs(weight)
            own = (p - 1) * weight
            if CAPPED:
                own *= 1 - (right / cap) * (right / cap)
            tl.store(of_label + row, own)
            scale = bound / 448
            tl.store(scales + row, scale)
            shrink = 1 / scale
        for begin in range(0, width, BLOCK):
            at = begin + lanes
            y = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
            if CAPPED:
                bent = 1 - 2 / (1 + tl.exp(2 * y / cap))
                y = bent * cap
            grad = tl.exp(y - log_sum)
            if FP8:
                grad = tl.where(at == label, 0.0, grad) * weight
            else:
                grad = (grad - tl.where(at == label, 1.0, 0.0)) * weight
            if CAPPED:
                grad *= 1 - bent * bent
            if FP8:
                step = tl.load(steps + at, mask=at < vocab, other=0.0).to(tl.float32)  # 0: no token, no gradient
                grad = tl.clamp(grad * step * shrink, -448.0, 448.0)
            tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=at < width)


@no_type_check
@triton.jit
def _quantize(rows, made, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448, 1e-12)
    tl.store(scales + row, scale)
    tl.store(made + row * width + at, (x / scale).to(made.dtype.element_ty), mask=at < width)
