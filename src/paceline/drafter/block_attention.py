"""Attention of block slots by kernels of our own, for bfloat16 on Hopper: a query sees one interval and its block.

A query of block a sees context keys start_A[a] <= key < anchor_A[a] and the slots of its own block. Query heads that
share a key/value head lie side by side in a tile's rows: row = query * R + head. So a tile of rows spans few blocks,
little of it is masked, and its blocks' own keys belong to this tile alone.

For each tile the tiles on the other side that it meets are a run: `first` to `behind`, of which `inner_first` to
`inner_behind` are seen whole and need no mask. Runs are made of any intervals. Where anchors are sorted, as the loader
lays them (sample behind sample, anchors ascending), runs hold hardly a tile in vain; elsewhere many,
which are masked.

Nothing is added atomically: the same inputs give the same bits. The kernels are in `block_kernels`, which needs Triton
and is imported where they run.

Shapes: A blocks, B slots of a block, Q = A * B queries, C context slots, K = C + Q keys, N heads, M key/value heads,
R = N / M heads that share one, E head width, X and Y tiles of either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: rows and keys of a tile, warps, and loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The tiles of the three kernels. Measured by `benchmarks/block_attention.py`."""

    forward: Tiles
    queries: Tiles  # gradients of queries, and of the blocks' own keys and values
    context: Tiles  # gradients of the context's keys and values


CUTS = {
    64: Cut(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
    128: Cut(Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
}


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """What each tile of the three kernels meets, longest run first: tile, first, inner_first, inner_behind, behind."""

    start_A: Int[Tensor, " A"]
    anchor_A: Int[Tensor, " A"]
    forward_X5: Int[Tensor, "X 5"]
    queries_X5: Int[Tensor, "X2 5"]
    context_Y5: Int[Tensor, "Y 5"]


@cache
def available(device: torch.device) -> bool:
    """Return whether the kernels run here: on Hopper, whose shared memory they are cut for, with Triton."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and find_spec("triton") is not None
    )


def fits(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels know heads of this kind, in whole tiles (see `attention.fits_tiles`)."""
    sharing = heads // kv_heads
    if dtype != torch.bfloat16 or head_dim not in CUTS or sharing not in (1, 2, 4, 8):
        return False
    cut = CUTS[head_dim]
    # A tile of rows holds whole blocks, with all heads that share their keys.
    return all(tiles.rows // sharing % block_size == 0 for tiles in (cut.forward, cut.queries))


def ranges(
    start_A: Int[Tensor, " A"],
    anchor_A: Int[Tensor, " A"],
    context_slots: int,
    block_size: int,
    *,
    sharing: int,
    cut: Cut,
) -> Ranges:
    """Return the runs of every kernel's tiles, on the anchors' device and without waiting for it."""

    def tiles(of: Tiles) -> tuple[Tensor, Tensor]:
        return context_tiles(start_A, anchor_A, context_slots, block_size, of.rows // sharing, of.keys)

    some_YX, whole_YX = (part.T for part in tiles(cut.context))
    return Ranges(
        start_A.to(torch.int32),
        anchor_A.to(torch.int32),
        runs(*tiles(cut.forward)),
        runs(*tiles(cut.queries)),
        runs(some_YX, whole_YX),
    )


def context_tiles(
    start_A: Int[Tensor, " A"],
    anchor_A: Int[Tensor, " A"],
    context_slots: int,
    block_size: int,
    tile_queries: int,
    tile_keys: int,
) -> tuple[Bool[Tensor, "X Y"], Bool[Tensor, "X Y"]]:
    """Return which tiles of queries by context keys hold something to see, and which hold nothing else.

    Tiles hold whole blocks, or blocks whole tiles of queries.
    """
    pieces, per_tile = max(1, block_size // tile_queries), max(1, tile_queries // block_size)
    start_XI1, anchor_XI1 = (x.repeat_interleave(pieces).view(-1, per_tile, 1) for x in (start_A, anchor_A))
    low_Y = torch.arange(0, context_slots, tile_keys, device=start_A.device)
    some = (start_XI1 < low_Y + tile_keys) & (anchor_XI1 > low_Y) & (start_XI1 < anchor_XI1)
    whole = (start_XI1 <= low_Y) & (anchor_XI1 >= low_Y + tile_keys)
    return some.any(1), whole.all(1)


def runs(some_XY: Bool[Tensor, "X Y"], whole_XY: Bool[Tensor, "X Y"]) -> Int[Tensor, "X 5"]:
    """Return each row's tile number and run, longest first: what lies outside of inner is to be masked.

    Where whole tiles have a gap between them, all are outside.
    """
    first_X, behind_X = _extent(some_XY)
    inner_first_X, inner_behind_X = _extent(whole_XY)
    gap_X = (inner_behind_X - inner_first_X != whole_XY.sum(-1)) | (inner_behind_X == 0)
    inner_first_X, inner_behind_X = (torch.where(gap_X, behind_X, x) for x in (inner_first_X, inner_behind_X))
    # Programs start in this order, and a long one that starts last would run alone.
    tile_X = torch.argsort(behind_X - first_X, descending=True, stable=True)
    columns = (first_X, inner_first_X, inner_behind_X, behind_X)
    return torch.stack([tile_X, *(column[tile_X] for column in columns)], dim=-1).to(torch.int32)


def _extent(set_XY: Bool[Tensor, "X Y"]) -> tuple[Int[Tensor, " X"], Int[Tensor, " X"]]:
    """Return where each row's set entries begin, and where none follows; 0 and 0 where none is set."""
    place_Y = torch.arange(set_XY.shape[1], device=set_XY.device)
    behind_X = torch.where(set_XY, place_Y + 1, 0).amax(-1)
    return torch.where(set_XY, place_Y, set_XY.shape[1]).amin(-1).minimum(behind_X), behind_X


def block_attention(
    q_1NQE: Float[Tensor, "1 N Q E"],
    k_1MKE: Float[Tensor, "1 M K E"],
    v_1MKE: Float[Tensor, "1 M K E"],
    seen: Ranges,
) -> Float[Tensor, "1 N Q E"]:
    """Return each query's mean of the values it sees.

    Inputs may have any strides but one in E. Output and gradients lie in memory as [slot, head, E], the layout of the
    products on either side.
    """
    tables = (seen.start_A, seen.anchor_A, seen.forward_X5, seen.queries_X5, seen.context_Y5)
    return _forward(q_1NQE, k_1MKE, v_1MKE, *tables)[0]


def forward(
    q_1NQE: Tensor, k_1MKE: Tensor, v_1MKE: Tensor, start_A: Tensor, anchor_A: Tensor, runs_X5: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Return the attention and each row's log2-sum-exp2, rows as in the kernels: `block_attention` without autograd."""
    from paceline.drafter import block_kernels

    q, k, v = map(_dense_rows, (q_1NQE, k_1MKE, v_1MKE))
    out, lse_MR = _forward_like(q, k)
    block_kernels.forward(q, k, v, out, lse_MR, start_A, anchor_A, runs_X5, tiles)
    return out, lse_MR


def backward(
    grad_1NQE: Tensor,
    saved: Sequence[Tensor],
    start_A: Tensor,
    anchor_A: Tensor,
    queries_X5: Tensor,
    context_Y5: Tensor,
    cut: Cut,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `saved` are these, the output and log2-sum-exp2."""
    from paceline.drafter import block_kernels

    q, k, v, out, lse_MR = saved
    grad, q, k, v = map(_dense_rows, (grad_1NQE, q, k, v))
    given = block_kernels.Given(grad, q, k, v, out, lse_MR, torch.empty_like(lse_MR), start_A, anchor_A)
    gradients = _slots_first(q), _slots_first(k), _slots_first(v)
    block_kernels.backward_queries(given, *gradients, queries_X5, cut.queries)  # and leaves what the next one reads
    block_kernels.backward_context(given, *gradients[1:], context_Y5, cut.context)
    return gradients


def _slots_first(like: Tensor) -> Tensor:
    """Return an empty tensor of this shape, heads by slots, that lies in memory slot by slot."""
    G, N, Q, E = like.shape
    return like.new_empty(G, Q, N, E).transpose(1, 2)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_like(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    N, Q, M = q.shape[1], q.shape[2], k.shape[1]
    return _slots_first(q), q.new_empty(M, Q * N // M, dtype=torch.float32)


_TABLES = "Tensor start, Tensor anchor, Tensor forward, Tensor queries, Tensor context"
_LIBRARY = "paceline::block_attention"


@torch.library.custom_op(
    _LIBRARY, mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_TABLES}) -> (Tensor, Tensor)"
)
@no_type_check  # torch reads the schema alone
def _forward(q, k, v, start, anchor, forward_runs, queries, context):
    return forward(q, k, v, start, anchor, forward_runs, CUTS[q.shape[-1]].forward)


@torch.library.custom_op(
    f"{_LIBRARY}_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor start, Tensor anchor, "
    "Tensor queries, Tensor context) -> (Tensor, Tensor, Tensor)",
)
@no_type_check
def _backward(grad, q, k, v, out, lse, start, anchor, queries, context):
    return backward(grad, (q, k, v, out, lse), start, anchor, queries, context, CUTS[q.shape[-1]])


@_forward.register_fake
@no_type_check
def _(q, k, v, *tables):
    return _forward_like(q, k)


@_backward.register_fake
@no_type_check
def _(grad, q, k, v, *rest):
    return _slots_first(q), _slots_first(k), _slots_first(v)


@no_type_check
def _keep(ctx, inputs, output):
    q, k, v, start, anchor, _, queries, context = inputs
    ctx.save_for_backward(q, k, v, *output, start, anchor, queries, context)


@no_type_check
def _differentiate(ctx, grad, _):
    gradients = _backward(grad, *ctx.saved_tensors)
    return *gradients, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
