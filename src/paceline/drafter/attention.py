"""Attention of block slots over context and block slots: dense on any device, block-sparse where it is compiled.

Block-sparse is flex_attention, or kernels of our own where they run (`block_attention`). All take the geometry as
tensors, so one compiled kernel serves every micro-batch of the one shape.

Shapes: G groups, A blocks, B slots of a block, Q = A * B queries, C context slots, K = C + Q keys, N heads, M key/value
heads, E head width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from paceline import blocks
from paceline.config import DrafterSettings
from paceline.drafter import block_attention
from paceline.drafter.block_attention import Ranges

TILE = 128  # queries and keys of a tile of the block-sparse form


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Who sees whom, entry by entry."""

    mask_GQK: Bool[Tensor, "G Q K"]


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Who sees whom, as tiles and the rule inside a tile; one group."""

    tiles: BlockMask


Visibility = Dense | Sparse | Ranges


def fits_tiles(context_slots: int, anchor_slots: int, block_size: int) -> bool:
    """Return whether the one shape can be cut into tiles."""
    return TILE % block_size == 0 and context_slots % TILE == 0 and (anchor_slots * block_size) % TILE == 0


def block_sparse(
    start_A: Int[Tensor, " A"],
    anchor_A: Int[Tensor, " A"],
    context_slots: int,
    settings: DrafterSettings,
    dtype: torch.dtype,
) -> Sparse | Ranges:
    """Return the block-sparse form that is fastest here, for a drafter whose keys have this dtype; see `sparse`."""
    heads, kv_heads, width = settings.heads, settings.kv_heads, settings.head_dim
    if block_attention.available(start_A.device) and block_attention.fits(
        heads, kv_heads, width, settings.block_size, dtype
    ):
        cut, sharing = block_attention.CUTS[width], heads // kv_heads
        return block_attention.ranges(start_A, anchor_A, context_slots, settings.block_size, sharing=sharing, cut=cut)
    return sparse(start_A, anchor_A, context_slots, settings.block_size)


def sparse(start_A: Int[Tensor, " A"], anchor_A: Int[Tensor, " A"], context_slots: int, block_size: int) -> Sparse:
    """Return the block-sparse form of `blocks.block_mask` for one group whose blocks are all present.

    The tiles follow from the anchors' intervals alone and stay on their device; nothing is evaluated densely.
    """
    some, whole = blocks.block_tiles(start_A, anchor_A, context_slots, block_size, TILE)

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        in_context = (key >= start_A[block]) & (key < anchor_A[block])
        return torch.where(key < context_slots, in_context, (key - context_slots) // block_size == block)

    part_count, part_index = _listed(some & ~whole)
    full_count, full_index = _listed(whole)
    queries = len(start_A) * block_size
    tiles = BlockMask.from_kv_blocks(
        part_count,
        part_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(queries, context_slots + queries),
    )
    return Sparse(tiles)


def attend(
    q_GNQE: Float[Tensor, "G N Q E"],
    k_GMKE: Float[Tensor, "G M K E"],
    v_GMKE: Float[Tensor, "G M K E"],
    visibility: Visibility,
) -> Float[Tensor, "G N Q E"]:
    """Return each query's mean of the values it sees; zeros where it sees none."""
    if isinstance(visibility, Ranges):
        return block_attention.block_attention(q_GNQE, k_GMKE, v_GMKE, visibility)
    if isinstance(visibility, Sparse):
        return flex_attention(q_GNQE, k_GMKE, v_GMKE, block_mask=visibility.tiles, enable_gqa=True)
    groups = q_GNQE.shape[1] // k_GMKE.shape[1]
    k, v = k_GMKE.repeat_interleave(groups, dim=1), v_GMKE.repeat_interleave(groups, dim=1)
    out_GNQE = F.scaled_dot_product_attention(q_GNQE, k, v, attn_mask=visibility.mask_GQK[:, None])
    # Backends differ on a row without a key: some give NaN.
    return out_GNQE.where(visibility.mask_GQK.any(-1)[:, None, :, None], 0)


def _listed(tiles_RK: Bool[Tensor, "rows columns"]) -> tuple[Int[Tensor, "1 1 rows"], Int[Tensor, "1 1 rows columns"]]:
    """Return how many tiles of each row are set, and all columns with the set ones first."""
    count = tiles_RK.sum(-1, dtype=torch.int32)
    index = torch.argsort(tiles_RK.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], index[None, None]
