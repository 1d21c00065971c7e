"""A kernel that transposes bytes, tile by tile: for devices with Triton."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # rows and columns; a tile's 16 KiB turn round in the shared memory of a multiprocessor


@no_type_check
@triton.jit
def _transpose(source, to, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0)
    turned_inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(to + column[:, None] * rows + row[None, :], tl.trans(tile), mask=turned_inside)


def transpose_bytes(x_RC: Tensor) -> Tensor:
    """Return a contiguous matrix of bytes [R, C] as a contiguous one [C, R]."""
    rows, columns = x_RC.shape
    to_CR = torch.empty(columns, rows, dtype=x_RC.dtype, device=x_RC.device)
    grid = (triton.cdiv(rows, _TILE), triton.cdiv(columns, _TILE))
    _transpose[grid](x_RC, to_CR, rows, columns, TILE=_TILE)
    return to_CR
