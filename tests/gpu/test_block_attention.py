"""The attention kernels against dense float32 attention and flex_attention; the same bits every time, in a graph too.

Errors are relative, of a whole tensor by its norm and of its worst entry by the largest. bfloat16 rounds by up to
1 / 512: inputs, probabilities, score gradients and results are rounded, sums are not.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline import blocks
from paceline.drafter import block_attention as own
from paceline.drafter.attention import attend, fits_tiles, sparse
from paceline.drafter.block_attention import CUTS, Ranges
from paceline.runtime.capture import Captured, new_pool
from paceline.runtime.compiling import OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable", "hopper")]

DEVICE = torch.device("cuda:0")
C, Q = 640, 1024
NORM, WORST = 5e-3, 1.5e-2
NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the gradient of the output


@pytest.fixture
def hopper() -> None:
    if not own.available(DEVICE):
        pytest.skip("the kernels run on Hopper with Triton")


def inputs(heads: int, sharing: int, width: int, seed: int = 0) -> Inputs:
    """q as the step makes it, heads side by side; k in heads and v in slots, so strides differ."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    kv_heads, K = heads // sharing, C + Q

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()

    q, grad = (drawn(1, Q, heads, width).transpose(1, 2) for _ in range(2))
    return q, drawn(1, kv_heads, K, width), drawn(1, K, kv_heads, width).transpose(1, 2), grad


def anchors(block: int, lengths: tuple[int, ...] = (50, 300, 3, 200), used: float = 0.8) -> tuple[Tensor, Tensor]:
    """Ascending anchors of samples end to end, the first of each at its start, which sees no context; unused blocks."""
    A = Q // block
    each, found, at = int(A * used) // len(lengths), [], 0
    for length in lengths:
        found += [(at, at + k * length // each) for k in range(each)]
        at += length
    found += [(0, 0)] * (A - len(found))
    start, anchor = torch.tensor(found, device=DEVICE).T.contiguous()
    return start, anchor


def tables(start: Tensor, anchor: Tensor, given: Inputs) -> Ranges:
    q, k = given[:2]
    sharing = q.shape[1] // k.shape[1]
    return own.ranges(start, anchor, C, Q // len(start), sharing=sharing, cut=CUTS[q.shape[-1]])


def dense(given: Inputs, start: Tensor, anchor: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (x.float().requires_grad_() for x in given[:3])
    sharing, A = q.shape[1] // k.shape[1], len(start)
    present = torch.ones(1, A, Q // A, dtype=torch.bool, device=DEVICE)
    mask = blocks.block_mask(start[None], anchor[None], present, C)
    scores = q @ k.repeat_interleave(sharing, 1).mT / q.shape[-1] ** 0.5
    out = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(sharing, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].float()))


def both_ways(call: Callable[..., Tensor], given: Inputs, *visibility: object) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = call(q, k, v, *visibility)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), given[3]))


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(found) == len(wanted)
    for name, a, b in zip(NAMES, found, wanted, strict=False):
        assert a.isfinite().all(), f"{name}: {int((~a.isfinite()).sum())} entries are not finite"
        apart = a.float() - b
        rows = apart.abs().amax((0, 1, 3)) > WORST * b.abs().max()
        where = f"{name}: wrong at slots {rows.nonzero().flatten().tolist()[:8]} of {len(rows)}"
        assert apart.norm() <= NORM * b.norm(), where
        assert apart.abs().max() <= WORST * b.abs().max(), where


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let results hold what no kernel may leave there."""
    empty = own._slots_first
    monkeypatch.setattr(own, "_slots_first", lambda like: empty(like).fill_(torch.nan))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("sharing", [1, 2, 4, 8])
@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_equals_dense_in_float32(block: int, sharing: int, width: int) -> None:
    heads = max(4, sharing)
    assert fits_tiles(C, Q // block, block)
    if not own.fits(heads, heads // sharing, width, block, torch.bfloat16):
        pytest.skip("a tile of rows would not hold whole blocks")
    given, (start, anchor) = inputs(heads, sharing, width), anchors(block)
    close(both_ways(attend, given, tables(start, anchor, given)), dense(given, start, anchor))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["unused", "one sample", "many samples", "in any order"])
def test_any_intervals_will_do(kind: str) -> None:
    given = inputs(8, 4, 128, seed=1)
    start, anchor = {
        "unused": lambda: anchors(16, used=0),
        "one sample": lambda: anchors(16, (C,), used=1),
        "many samples": lambda: anchors(16, (20,) * 32, used=1),
        "in any order": lambda: anchors(16),
    }[kind]()
    if kind == "in any order":
        order = torch.randperm(len(start), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        start, anchor = start[order], anchor[order]
    close(both_ways(attend, given, tables(start, anchor, given)), dense(given, start, anchor))


def test_large_scores_stay_finite() -> None:
    q, k, v, grad = inputs(8, 4, 128)
    given, (start, anchor) = (q * 30, k * 30, v, grad), anchors(16)
    found = both_ways(attend, given, tables(start, anchor, given))
    assert all(x.isfinite().all() for x in found)
    close(found[:1], dense(given, start, anchor)[:1])


def test_is_as_exact_as_flex_attention() -> None:
    given, (start, anchor) = inputs(8, 4, 128), anchors(16)
    wanted = dense(given, start, anchor)
    flex = torch.compile(attend, fullgraph=True, dynamic=False, options=OPTIONS)
    theirs = both_ways(flex, given, sparse(start, anchor, C, 16))
    ours = both_ways(attend, given, tables(start, anchor, given))
    for name, a, b, c in zip(NAMES, ours, theirs, wanted, strict=True):
        assert (a.float() - c).norm() <= 1.2 * (b.float() - c).norm(), name


def test_the_same_bits_every_time() -> None:
    given, (start, anchor) = inputs(32, 4, 128), anchors(16)
    first = both_ways(attend, given, tables(start, anchor, given))
    for _ in range(10):
        again = both_ways(attend, given, tables(start, anchor, given))
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_gradients_that_are_spread_out_in_memory() -> None:
    """That of a sum has strides of zero."""
    q, k, v, _ = inputs(8, 4, 128)
    given, (start, anchor) = (q, k, v, torch.ones((), device=DEVICE).bfloat16().expand(q.shape)), anchors(16)
    close(both_ways(attend, given, tables(start, anchor, given)), dense(given, start, anchor))


def test_compiled_in_one_graph_and_captured_with_its_tables() -> None:
    given, (start, anchor) = inputs(8, 4, 128), anchors(16)

    def projected(q: Tensor, k: Tensor, v: Tensor, seen: Ranges) -> Tensor:
        """What surrounds attention in a layer."""
        return (attend(q * 0.5, k * 2, v, seen).transpose(1, 2).flatten(2) * 1.0).unflatten(2, (8, -1)).transpose(1, 2)

    compiled = torch.compile(projected, fullgraph=True, dynamic=False, options=OPTIONS)

    def step() -> tuple[Tensor, ...]:
        return both_ways(compiled, given, tables(start, anchor, given))

    close(step(), dense(given, start, anchor))
    kept: list[Tensor] = []

    def work() -> None:
        kept[:] = step()

    replay = Captured(work, pool=new_pool(DEVICE))
    for seed, lengths in ((1, (300, 340)), (2, (100,) * 6), (3, (C,))):
        fresh = inputs(8, 4, 128, seed)
        for buffer, values in zip((*given, start, anchor), (*fresh, *anchors(16, lengths)), strict=True):
            buffer.copy_(values)
        replay()
        torch.cuda.synchronize()
        close(tuple(kept), dense(given, start, anchor))
        assert all(torch.equal(a, b) for a, b in zip(kept, step(), strict=True))


def test_what_is_registered_with_torch_is_what_runs() -> None:
    given, (start, anchor) = inputs(8, 4, 128), anchors(16)
    seen = tables(start, anchor, given)
    geometry = (seen.start_A, seen.anchor_A, seen.forward_X5, seen.queries_X5, seen.context_Y5)
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(own._forward, (q, k, v, *geometry), test_utils=checks)
    out, lse = own._forward(*given[:3], *geometry)
    rest = (*given[:3], out, lse, *geometry[:2], *geometry[3:])
    torch.library.opcheck(own._backward, (given[3], *rest), test_utils=checks[:1] + checks[2:3])
