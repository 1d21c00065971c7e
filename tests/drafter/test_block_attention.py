"""The geometry of the attention kernels against the dense mask. What the kernels compute of it is tested on a GPU."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline import blocks
from paceline.drafter import block_attention as own
from paceline.drafter.attention import Sparse, block_sparse
from paceline.drafter.block_attention import Cut, Ranges, Tiles

C, A = 512, 32


def geometry(lengths: list[int], per_sample: int, used: int, mixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors of samples laid end to end, then unused blocks; with `mixed` in any order."""
    found, at = [], 0
    for length in lengths:
        found += [(at, at + (k + 1) * length // (per_sample + 1)) for k in range(per_sample)]
        at += length
    found = (found[:used] + [(0, 0)] * A)[:A]
    if mixed:
        random.Random(0).shuffle(found)
    return torch.tensor([start for start, _ in found]), torch.tensor([anchor for _, anchor in found])


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) <= C),
    st.integers(1, 12),
    st.integers(0, A),
    st.sampled_from([4, 8, 16, 32]),
    st.sampled_from([(32, 64), (64, 32), (128, 64), (8, 128)]),
    st.booleans(),
)
def test_runs_hold_what_the_dense_mask_shows(
    lengths: list[int], per_sample: int, used: int, block: int, tile: tuple[int, int], mixed: bool
) -> None:
    start, anchor = geometry(lengths, per_sample, used, mixed)
    mask = blocks.block_mask(start[None], anchor[None], torch.ones(1, A, block, dtype=torch.bool), C)[0, :, :C]
    cells = mask.unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1])).transpose(1, 2).flatten(2)
    some, whole = own.context_tiles(start, anchor, C, block, *tile)
    assert torch.equal(some, cells.any(-1))
    assert torch.equal(whole, cells.all(-1))
    for any_XY, all_XY in ((some, whole), (some.T, whole.T)):
        table = own.runs(any_XY, all_XY).tolist()
        assert sorted(row[0] for row in table) == list(range(len(any_XY)))
        sizes = [behind - first for _, first, _, _, behind in table]
        assert sizes == sorted(sizes, reverse=True)
        for number, first, inner_first, inner_behind, behind in table:
            seen = any_XY[number].nonzero().flatten().tolist()
            assert 0 <= first <= inner_first <= inner_behind <= behind <= any_XY.shape[1]
            assert (first, behind) == ((seen[0], seen[-1] + 1) if seen else (0, 0))
            assert all_XY[number, inner_first:inner_behind].all()
            full = all_XY[number].nonzero().flatten().tolist()
            if full and full[-1] - full[0] + 1 == len(full):
                assert (inner_first, inner_behind) == (full[0], full[-1] + 1)
            else:
                assert inner_first == inner_behind


def test_each_kernel_has_a_table_of_its_own_tiles() -> None:
    start, anchor = geometry([200, 250], 10, 20, mixed=False)
    cut = Cut(Tiles(128, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 128, 4, 2))
    seen = own.ranges(start, anchor, C, 16, sharing=4, cut=cut)
    assert len(seen.forward_X5) == A * 16 // 32
    assert len(seen.queries_X5) == A * 16 // 16
    assert len(seen.context_Y5) == C // 128
    assert seen.forward_X5[:, 4].max() == -(-int(anchor.max()) // 64)
    assert seen.context_Y5[:, 4].max() == 20 * 16 // 8
    assert {table.dtype for table in (seen.start_A, seen.anchor_A, seen.forward_X5, seen.context_Y5)} == {torch.int32}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block", "dtype", "known"),
    [
        (32, 8, 128, 16, torch.bfloat16, True),
        (8, 4, 64, 32, torch.bfloat16, True),
        (64, 8, 128, 16, torch.bfloat16, True),
        (64, 8, 128, 32, torch.bfloat16, False),  # a tile of rows would hold half a block
        (9, 3, 64, 16, torch.bfloat16, False),
        (32, 2, 128, 4, torch.bfloat16, False),
        (32, 8, 96, 16, torch.bfloat16, False),
        (32, 8, 128, 16, torch.float32, False),
    ],
)
def test_heads_that_the_kernels_know(
    heads: int, kv_heads: int, head_dim: int, block: int, dtype: torch.dtype, known: bool
) -> None:
    assert own.fits(heads, kv_heads, head_dim, block, dtype) is known


def test_without_a_hopper_gpu_flex_attention_is_what_runs() -> None:
    from paceline.bench.shapes import SHAPES

    start, anchor = geometry([200, 250], 10, 20, mixed=False)
    settings = SHAPES["small"].drafter
    assert own.fits(settings.heads, settings.kv_heads, settings.head_dim, settings.block_size, torch.bfloat16)
    assert not own.available(torch.device("cpu"))
    assert isinstance(block_sparse(start, anchor, C, settings, torch.bfloat16), Sparse)


def test_results_lie_in_memory_as_the_products_want_them() -> None:
    """Shapes and strides as the compiler is told; that kernels keep to them is tested on a GPU."""
    start, anchor = geometry([200, 250], 10, 20, mixed=False)
    seen = own.ranges(start, anchor, C, 16, sharing=2, cut=own.CUTS[64])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Ranges(*(mode.from_tensor(getattr(seen, name)) for name in Ranges.__slots__))
        q = torch.empty(1, 4, A * 16, 64, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(1, 2, C + A * 16, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = own.block_attention(q, k, v, fake)
        assert out.shape == q.shape
        assert out.transpose(1, 2).is_contiguous()
        for gradient, x in zip(torch.autograd.grad(out, (q, k, v), torch.empty_like(out)), (q, k, v), strict=True):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
            assert gradient.transpose(1, 2).is_contiguous()
