"""Products with frozen matrices on the fast path: in the target's own format, or in fp8.

In fp8 a matrix is quantized once, each row (an output) with a scale of its own, and activations as they come, each row
(a token) with its own. Values are e4m3, sums are made by the tensor cores, and what leaves is in the target's format.

Shapes: T tokens, N outputs, K inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.drafter.e4m3 import E4M3, TILE8, product8, quantize
from paceline.records import UserError

WIDEST8 = 32_768  # entries of a row that one kernel gates and quantizes
NEEDED8 = (8, 9)  # compute capability: Ada and Hopper are the first with fp8 products


class Matrix(NamedTuple):
    """A frozen matrix and its bias. With a scale for each output it is in fp8."""

    weight_NK: Tensor
    scale_N1: Tensor | None
    bias_N: Tensor | None


def product(x_TK: Tensor, matrix: Matrix) -> Tensor:
    """Return the rows of x times the transposed matrix, plus its bias, in x's format."""
    if matrix.scale_N1 is None:
        return nn.functional.linear(x_TK, matrix.weight_NK, matrix.bias_N)
    quantized_TK, scale_T1 = quantize(x_TK)
    return _product8(quantized_TK, scale_T1, matrix, x_TK.dtype)


def _product8(x_TK: Tensor, scale_T1: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    assert matrix.scale_N1 is not None
    made_TN = product8(x_TK, scale_T1, matrix.weight_NK, matrix.scale_N1, dtype)
    return made_TN if matrix.bias_N is None else made_TN + matrix.bias_N


def add_product_(x_TN: Tensor, read_TK: Tensor, matrix: Matrix) -> Tensor:
    """Add a product to x, in place, and return x; `matrix` is not in fp8.

    The product itself adds. Compiled it would not be in place, and x would be copied first.
    """
    x_TN.addmm_(read_TK, matrix.weight_NK.t())
    return x_TN if matrix.bias_N is None else x_TN.add_(matrix.bias_N)


def gated_product(gate_up_T2F: Tensor, matrix: Matrix) -> Tensor:
    """Return the rows silu(gate) * up times the transposed matrix, plus its bias, in their format."""
    if matrix.scale_N1 is None or gate_up_T2F.shape[1] > 2 * WIDEST8:
        return product(gated(gate_up_T2F), matrix)
    gated_TF, scale_T1 = gated8(gate_up_T2F)
    return _product8(gated_TF, scale_T1, matrix, gate_up_T2F.dtype)


def gated(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return nn.functional.silu(gate_TF) * up_TF


# An operator of its own, so that the compiler does not make it part of a kernel that reads every row twice.
@torch.library.custom_op("paceline::gated8", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)")
def gated8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of rows [T, 2F] in e4m3 [T, F] and the scale [T, 1] of each row; see quantize."""
    if x.device.type != "cuda":
        gate_TF, up_TF = x.float().chunk(2, dim=-1)
        return quantize(nn.functional.silu(gate_TF) * up_TF)
    from paceline.target.gate_kernel import gate_rows  # Triton comes with torch for GPUs alone

    with torch.cuda.device(x.device):
        return gate_rows(x)


@gated8.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    made_TF = x.new_empty(x.shape[0], x.shape[1] // 2, dtype=E4M3)
    return made_TF, x.new_empty(x.shape[0], 1, dtype=torch.float32)


def in_fp8(matrix: Matrix) -> Matrix:
    """Return a matrix in fp8."""
    return Matrix(*quantize(matrix.weight_NK), matrix.bias_N)


def has_fp8(device: torch.device) -> bool:
    """Return whether a GPU has products in fp8."""
    return torch.cuda.get_device_capability(device) >= NEEDED8


def check_fp8(device: torch.device, key: str) -> None:
    """Refuse a GPU without fp8 products; `key` says where they were asked for.

    Raises:
        UserError: its compute capability is too low.
    """
    if device.type == "cuda" and not has_fp8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"{key}: on needs a GPU of compute capability {NEEDED8[0]}.{NEEDED8[1]} or newer, and {device} "
            f"({torch.cuda.get_device_name(device)}) has {major}.{minor}. Set it to off, or use another GPU."
        )


def fits_fp8(weight_NK: Tensor) -> bool:
    """Return whether a matrix has sizes that the fp8 product takes."""
    return all(size % TILE8 == 0 for size in weight_NK.shape)
