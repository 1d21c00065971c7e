"""Products of training in fp8: forward, the input's gradient and the weight's, with operands in e4m3.

Each operand has a scale a row of the product, so e4m3 has to span one row's entries and not a tensor's, gradients
included: what e5m2 gives up a bit of precision for is not needed. Scales are powers of two (see e4m3), because some
values are scaled twice.

What a product sums over differs between the three, and a scale may not vary along it. Instead of quantizing the same
matrix along its rows and along its columns, for which bfloat16 would be read four times, a matrix is quantized once and
its bytes are transposed. The scale that then varies along the sum goes into the other operand before it is quantized:

    y  = (x8 · w8ᵀ) s wᵀ                     x = s x8 with s a token, W = w w8 with w an output
    dx = (g8 · w8) u                         dy wᵀ = u g8 with u a token: quantized once, used twice
    dW = (g8ᵀ · z8) f / w                    s u x8 = z8 f with f an input: bytes again, scaled anew

Shapes: T tokens, N outputs, K inputs, R and I rows and inner length of an operand.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.e4m3 import E4M3, TILE8, power_of_two, product8, quantize_by_powers
from paceline.records import UserError

# The smallest scale of a weight's output, because its gradient is divided by it: the output's gradients must not
# underflow beside others. With 448 times this, 4e-4, an output is still of full precision.
_LEAST_WEIGHT = 2.0**-20


def linear8(x: Float[Tensor, "*T K"], weight_NK: Float[Tensor, "N K"]) -> Float[Tensor, "*T N"]:
    """Return x times the transposed weight, as forward and backward compute it in fp8, in x's format.

    Tokens, inputs and outputs must be multiples of 16 in number (`check_sizes`). Backward keeps one byte an entry of x
    and of the weight. On a GPU x is bfloat16, which is what the products give.
    """
    y_TN = _Linear8.apply(x.flatten(0, -2), weight_NK)
    return y_TN.unflatten(0, x.shape[:-1])


def halves8(x: Float[Tensor, "*T K"], weight_NK: Float[Tensor, "N K"]) -> tuple[Tensor, Tensor]:
    """Return both halves of `linear8`'s outputs: apart, their gradients need not be put together before quantizing."""
    first_TM, second_TM = _Halves8.apply(x.flatten(0, -2), weight_NK)
    return first_TM.unflatten(0, x.shape[:-1]), second_TM.unflatten(0, x.shape[:-1])


class _Halves8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        y_TN = _forward(ctx, x_TK, weight_NK)
        first_TM, second_TM = y_TN.chunk(2, dim=-1)
        return first_TM, second_TM

    @staticmethod
    def backward(ctx: Any, first_TM: Tensor, second_TM: Tensor) -> tuple[Tensor, Tensor]:
        w_1N = ctx.saved_tensors[-1].t()
        wide = [dy_TM.float() * w_1M for dy_TM, w_1M in zip((first_TM, second_TM), w_1N.chunk(2, dim=-1), strict=True)]
        largest_T1 = torch.maximum(*(half_TM.abs().amax(-1, keepdim=True) for half_TM in wide))
        u_T1 = power_of_two(largest_T1)
        g8_TN = torch.cat([(half_TM / u_T1).to(E4M3) for half_TM in wide], dim=-1)
        return _gradients(ctx, g8_TN, u_T1, first_TM.dtype)


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        return _forward(ctx, x_TK, weight_NK)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor, Tensor]:
        g8_TN, u_T1 = quantize_by_powers(dy_TN * ctx.saved_tensors[-1].t())
        return _gradients(ctx, g8_TN, u_T1, dy_TN.dtype)


def _forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    x8_TK, s_T1 = quantize_by_powers(x_TK)
    w8_NK, w_N1 = quantize_by_powers(weight_NK, least=_LEAST_WEIGHT)
    # Transposed here, so that it is these bytes that are kept and not what they could be made of again.
    ctx.save_for_backward(transposed(x8_TK), s_T1, transposed(w8_NK), w_N1)
    return _product(x8_TK, s_T1, w8_NK, w_N1, x_TK.dtype)


def _gradients(ctx: Any, g8_TN: Tensor, u_T1: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the input's gradient and the weight's, of the output's times w."""
    x8_KT, s_T1, w8_KN, w_N1 = ctx.saved_tensors
    ones_K1 = torch.ones_like(w8_KN[:, :1], dtype=torch.float32)
    dx_TK = _product(g8_TN, u_T1, w8_KN, ones_K1, dtype)
    z8_KT, f_K1 = quantize_by_powers(x8_KT.float() * (s_T1 * u_T1).t())
    return dx_TK, _product(transposed(g8_TN), 1 / w_N1, z8_KT, f_K1, dtype)


def _product(a_RI: Tensor, a_R1: Tensor, b_CI: Tensor, b_C1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (a times the transposed b), each row times its scale: [R, C], rounded to bfloat16 on the way.

    Of a sum over 16,384 tokens the fast way of adding loses 1 to 2 %, less than e4m3's own error, and unlike in the
    head's loss no entry of a sum is much larger than the others together.
    """
    made_RC = product8(a_RI, a_R1, b_CI, b_C1, torch.bfloat16)
    # Not `to` alone: torch 2.11 loses a compiled autograd.Function's gradient if its result's `to` changed nothing.
    return made_RC if dtype == made_RC.dtype else made_RC.to(dtype)


# Any layout is taken, so that the compiler hands over what a product reads and does not write another one like it.
@torch.library.custom_op(
    "paceline::transposed", mutates_args=(), schema="(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
def transposed(x: Tensor) -> Tensor:
    """Return a matrix of bytes transposed and contiguous.

    An operator of its own, so that the compiler neither makes it part of the kernel that quantizes, which would write a
    byte here and there, nor computes it again in backward.
    """
    if x.device.type != "cuda":
        return x.contiguous().view(torch.uint8).t().contiguous().view(x.dtype)
    from paceline.drafter.transpose import transpose_bytes  # Triton comes with torch for GPUs alone

    with torch.cuda.device(x.device):
        return transpose_bytes(x.contiguous().view(torch.uint8)).view(x.dtype)


@transposed.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def product_sizes(drafter: DrafterSettings, train: TrainSettings, hidden_size: int) -> dict[str, int]:
    """Return the sizes of the products of a drafter's step by the names that a person knows them by."""
    return {
        "the target's hidden size": hidden_size,
        "drafter.heads × head_dim": drafter.heads * drafter.head_dim,
        "drafter.kv_heads × head_dim": drafter.kv_heads * drafter.head_dim,
        "drafter.intermediate_size": drafter.intermediate_size,
        "train.context_slots": train.context_slots,
        "train.anchor_slots × (drafter.block_size - 1)": train.anchor_slots * (drafter.block_size - 1),
        "train.anchor_slots × drafter.block_size": train.anchor_slots * drafter.block_size,
    }


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Refuse sizes of a step that products in fp8 do not take; `sizes` has them by the name that a person knows.

    Raises:
        UserError: the first that is no multiple of 16.
    """
    for name, size in sizes.items():
        if size % TILE8:
            raise UserError(
                f"With train.fp8: on, {name} must be a multiple of {TILE8}, got {size:,}. Change it, or set train.fp8 "
                "to off."
            )
