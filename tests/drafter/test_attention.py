"""The two forms of attention against each other and against a loop over what a query sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import blocks
from paceline.drafter.attention import TILE, Dense, attend, fits_tiles, sparse

C, B = 3 * TILE, 16
A = 2 * TILE // B


def geometry(lengths: list[int], per_sample: int, used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors of samples laid end to end; slots behind `used` are unused: they start and end at 0."""
    start, anchor, at = [], [], 0
    for length in lengths:
        for k in range(per_sample):
            start.append(at)
            anchor.append(at + max(1, (k + 1) * length // (per_sample + 1)))
        at += length
    pad = [0] * A
    return torch.tensor((start[:used] + pad)[:A]), torch.tensor((anchor[:used] + pad)[:A])


def dense_mask(start: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    return blocks.block_mask(start[None], anchor[None], torch.ones(1, len(start), B, dtype=torch.bool), C)


@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) <= C),
    st.integers(1, 9),
    st.integers(0, A),
)
def test_tiles_are_those_of_the_dense_mask(lengths: list[int], per_sample: int, used: int) -> None:
    start, anchor = geometry(lengths, per_sample, used)
    some, whole = blocks.block_tiles(start, anchor, C, B, TILE)
    tiles = dense_mask(start, anchor)[0].unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    assert torch.equal(some, tiles.any(3).any(1))
    assert torch.equal(whole, tiles.all(3).all(1))


def qkv(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, A * B, 16), (1, 2, C + A * B, 16), (1, 2, C + A * B, 16))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.usefixtures("traceable")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("used", [0, 5, A])
def test_sparse_equals_dense(used: int) -> None:
    """Forward only: flex_attention has no backward on a CPU; the GPU tests compare gradients."""
    start, anchor = geometry([90, 200, 60], 7, used)
    q, k, v = qkv()
    dense = attend(q, k, v, Dense(dense_mask(start, anchor)))
    assert fits_tiles(C, A, B)
    torch.testing.assert_close(attend(q, k, v, sparse(start, anchor, C, B)), dense, rtol=1e-4, atol=1e-5)


def test_dense_equals_a_loop() -> None:
    start, anchor = geometry([90, 200, 60], 7, 21)
    q, k, v = qkv()
    mask = dense_mask(start, anchor)
    out = attend(q, k, v, Dense(mask))
    for query in (0, 17, 100, 255):
        for head in range(4):
            seen = mask[0, query]
            scores = k[0, head // 2, seen] @ q[0, head, query] / 4
            torch.testing.assert_close(out[0, head, query], scores.softmax(0) @ v[0, head // 2, seen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(dtype: torch.dtype, autocast: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(dtype))
    mask = torch.rand(1, A * B, C + A * B, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[:, 7] = False
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attend(q, k, v, Dense(mask))
    assert torch.equal(out[:, :, 7], torch.zeros_like(out[:, :, 7]))
    assert out.isfinite().all()
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert torch.equal(gradients[0][:, :, 7], torch.zeros_like(gradients[0][:, :, 7]))
