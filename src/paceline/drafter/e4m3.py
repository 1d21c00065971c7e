"""Matrices in e4m3 with a scale for each row, and their product: what everything that is in fp8 is made with.

There are two rules for a scale. A product that multiplies a row's sums by its scale takes any number, and the one that
puts the row's largest value at e4m3's largest uses all of the format (`quantize`). Where a scale goes into another
value that is rounded again, into a bfloat16 number or into a byte, it is a power of two (`quantize_by_powers`): to
divide by it is exact unless that underflows, and a value that is scaled twice is rounded once.

Divided by its scale no value is above 448, e4m3's largest, by more than float32's rounding, so nothing has to be cut
off, which casts of torch do or do not do. A row that holds what is not finite has values that are no numbers.

Shapes: R and C rows, I inner length.
"""

import torch
from jaxtyping import Float
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TILE8 = 16  # entries: what torch._scaled_mm wants lengths to be multiples of
_LARGEST = torch.finfo(E4M3).max
# The smallest scale there is; below it float32 would lose what values are divided by. A row of zeros has it.
_LEAST = 1e-12
# The smallest power of two; below it values underflow. A row of zeros has it.
LEAST_POWER = 2.0**-100
# Floats as whole numbers: of a largest value 2^e m, 1 <= m < 2, the scale is 2^(e-8), or twice that where m > 1.75,
# for e4m3 ends at 448 = 1.75 * 2^8.
_ABOVE_MANTISSA, _EXPONENT, _OF_LARGEST = 0x1FFFFF, 0x7F800000, 2.0**-8


def quantize(x_RI: Float[Tensor, "R I"]) -> tuple[Float[Tensor, "R I"], Float[Tensor, "R 1"]]:
    """Return x in e4m3 and the float32 scale of each row, by which it must be multiplied to be x again.

    `head_kernel.quantize_rows` is this in one kernel, for where torch compiles nothing.
    """
    wide_RI = x_RI.float()
    scale_R1 = (wide_RI.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST)
    return (wide_RI / scale_R1).to(E4M3), scale_R1


def quantize_by_powers(
    x_RI: Float[Tensor, "R I"], *, least: float = LEAST_POWER
) -> tuple[Float[Tensor, "R I"], Float[Tensor, "R 1"]]:
    """Return x in e4m3 and the scale of each row, the smallest power of two that fits but at least `least`."""
    wide_RI = x_RI.float()
    scale_R1 = power_of_two(wide_RI.abs().amax(-1, keepdim=True), least)
    return (wide_RI / scale_R1).to(E4M3), scale_R1


def power_of_two(largest_R1: Float[Tensor, "R 1"], least: float = LEAST_POWER) -> Float[Tensor, "R 1"]:
    """Return the scales of rows whose largest values, in float32, are these."""
    bits_R1 = (largest_R1.view(torch.int32) + _ABOVE_MANTISSA) & _EXPONENT
    return (bits_R1.view(torch.float32) * _OF_LARGEST).clamp_min(least)


def product8(
    a_RI: Tensor, a_R1: Tensor, b_CI: Tensor, b_C1: Tensor, dtype: torch.dtype, *, fast_sum: bool = True
) -> Tensor:
    """Return a times the transposed b, each row times its scale: [R, C] in `dtype`, bfloat16 on a GPU.

    Hopper adds in some 14 bits with `fast_sum`, and in float32 without.
    """
    return torch._scaled_mm(a_RI, b_CI.t(), scale_a=a_R1, scale_b=b_C1.t(), out_dtype=dtype, use_fast_accum=fast_sum)
