"""A kernel for what a gated MLP hands to its last product in fp8, which reads every row once: for devices with Triton.

The compiler's own reads a row twice, for its largest value and then to divide by it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.drafter.e4m3 import E4M3

_EACH = 1024  # entries a warp
_WARPS = (4, 16)


def gate_rows(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up of rows [T, 2F] in e4m3 [T, F] and the float32 scale [T, 1] of each row; see quantize."""
    T, F = len(gate_up_T2F), gate_up_T2F.shape[1] // 2
    made_TF = torch.empty(T, F, dtype=E4M3, device=gate_up_T2F.device)
    scale_T1 = torch.empty(T, 1, dtype=torch.float32, device=gate_up_T2F.device)
    block = triton.next_power_of_2(F)
    warps = min(max(_WARPS[0], block // _EACH), _WARPS[1])
    _gate[(T,)](gate_up_T2F.contiguous(), made_TF, scale_T1, F, BLOCK=block, num_warps=warps)
    return made_TF, scale_T1


# Not to be wrapped by what checks shapes: Triton compiles the source, and looks names up around the function itself.
@no_type_check
@triton.jit
def _gate(rows, made, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(rows + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    x = gate / (1 + tl.exp(-gate)) * up
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448, 1e-12)
    tl.store(scales + row, scale)
    tl.store(made + row * width + at, (x / scale).to(made.dtype.element_ty), mask=inside)
