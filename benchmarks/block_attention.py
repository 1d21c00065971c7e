"""Time the attention kernels of a training step beside flex_attention. Usage: python benchmarks/block_attention.py

One CUDA device (Hopper), under 100 s. Every line is one kernel with one set of tiles (see `Tiles`): milliseconds of one
layer of Qwen3-8B's drafter (A = 1,024, B = 16, C = 6,144, 32 heads, 8 key/value heads of 128) on two samples of 3,072
tokens and on twelve of 500, and its error on a small shape against dense float32, relative to the largest value. What
cannot be launched, as more shared memory than there is, says so. The best belong into
`paceline.drafter.block_attention.CUTS`.

Tiles are compiled in processes side by side, which leave the code in Triton's cache.
"""

import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline import blocks
from paceline.drafter import attention
from paceline.drafter import block_attention as own
from paceline.drafter.block_attention import CUTS, Tiles
from paceline.runtime.compiling import OPTIONS

HEADS, KV_HEADS, WIDTH, B = 32, 8, 128, 16
PROCESSES = 12
REPEATS = 20
TILES: dict[str, list[tuple[int, int, int, int]]] = {
    "forward": [
        (128, 64, 4, 2),
        (128, 64, 8, 3),
        (128, 32, 4, 3),
        (64, 64, 4, 2),
    ],
    "queries": [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 3),
    ],
    "context": [
        (64, 128, 8, 3),
        (64, 128, 8, 2),
        (32, 64, 4, 3),
        (64, 64, 4, 2),
    ],
}


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one layer as the step makes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    start_A: Tensor
    anchor_A: Tensor
    context_slots: int

    @property
    def pairs(self) -> int:
        """Queries times what each sees."""
        return int((self.anchor_A - self.start_A).sum()) * B + len(self.start_A) * B * B


def case(lengths: list[int], anchors: int, blocks_in_all: int, context: int, heads: int, kv_heads: int) -> Case:
    """Return random inputs for samples end to end with so many sorted anchors each; blocks behind them are unused."""
    generator = torch.Generator().manual_seed(0)
    start, anchor, at = [], [], 0
    for length in lengths:
        drawn = torch.randperm(length - 1, generator=generator)[:anchors].sort().values + 1
        start += [at] * len(drawn)
        anchor += (drawn + at).tolist()
        at += length
    unused = [0] * (blocks_in_all - len(start))
    Q = blocks_in_all * B

    def drawn_on_device(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    torch.manual_seed(0)
    return Case(
        q=drawn_on_device(1, Q, heads, WIDTH).transpose(1, 2),
        k=drawn_on_device(1, kv_heads, context + Q, WIDTH),
        v=drawn_on_device(1, kv_heads, context + Q, WIDTH),
        grad=drawn_on_device(1, Q, heads, WIDTH).transpose(1, 2),
        start_A=torch.tensor(start + unused, device="cuda"),
        anchor_A=torch.tensor(anchor + unused, device="cuda"),
        context_slots=context,
    )


def small() -> Case:
    """Return a case for comparing and compiling: all of a tile's numbers are multiples as in the large ones."""
    return case([300, 400, 200], 20, 64, 1024, HEADS, KV_HEADS)


class Run:
    """The three kernels on a case; each may be launched alone once all have run."""

    def __init__(self, given: Case) -> None:
        self.case = given
        self.out, self.lse = torch.empty(0), torch.empty(0)
        self.gradients = tuple(own._slots_first(x) for x in (given.q, given.k, given.v))
        self.delta = torch.empty(0)
        for name in TILES:
            self.launch(name, getattr(CUTS[WIDTH], name))()

    def launch(self, name: str, tiles: Tiles) -> Callable[[], None]:
        """Return what launches one kernel with these tiles."""
        from paceline.drafter import block_kernels

        given = self.case
        cut = replace(CUTS[WIDTH], **{name: tiles})
        sharing = given.q.shape[1] // given.k.shape[1]
        seen = own.ranges(given.start_A, given.anchor_A, given.context_slots, B, sharing=sharing, cut=cut)
        tables = seen.start_A, seen.anchor_A

        def forward() -> None:
            self.out, self.lse = own.forward(given.q, given.k, given.v, *tables, seen.forward_X5, tiles)
            self.delta = torch.empty_like(self.lse) if self.delta.shape != self.lse.shape else self.delta

        def all_given() -> block_kernels.Given:
            read = (given.grad, given.q, given.k, given.v, self.out, self.lse, self.delta)
            return block_kernels.Given(*read, *tables)

        def queries() -> None:
            block_kernels.backward_queries(all_given(), *self.gradients, seen.queries_X5, tiles)

        def context() -> None:
            block_kernels.backward_context(all_given(), *self.gradients[1:], seen.context_Y5, tiles)

        return {"forward": forward, "queries": queries, "context": context}[name]

    def results(self) -> tuple[Tensor, ...]:
        """Return the output and the gradients of q, k and v."""
        return (self.out, *self.gradients)


def compile_tiles(name: str, tiles: tuple[int, ...]) -> str:
    """Compile and launch in this process; return why it does not work, or nothing."""
    try:
        Run(small()).launch(name, Tiles(*tiles))()
        torch.cuda.synchronize()
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:70]
    return ""


def dense(given: Case) -> tuple[Tensor, ...]:
    """Return output and gradients in float32, entry by entry."""
    q, k, v = (x.float().requires_grad_() for x in (given.q, given.k, given.v))
    A, sharing = len(given.start_A), q.shape[1] // k.shape[1]
    present = torch.ones(1, A, B, dtype=torch.bool, device="cuda")
    mask = blocks.block_mask(given.start_A[None], given.anchor_A[None], present, given.context_slots)
    scores = q @ k.repeat_interleave(sharing, 1).mT / WIDTH**0.5
    out = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v.repeat_interleave(sharing, 1)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), given.grad.float()))


def worst(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    """Return each tensor's largest error relative to its largest value; infinite where it is not finite."""
    errors = [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)]
    return [error if error == error else float("inf") for error in errors]


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the device."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


class Flex:
    """flex_attention on a case, compiled."""

    def __init__(self, given: Case) -> None:
        self.seen = attention.sparse(given.start_A, given.anchor_A, given.context_slots, B)
        self.call = torch.compile(attention.attend, fullgraph=True, dynamic=False, options=OPTIONS)
        self.inputs = tuple(x.detach().requires_grad_() for x in (given.q, given.k, given.v))
        self.grad, self.out = given.grad, self.forward()
        self.backward()

    def forward(self) -> Tensor:
        """Return the output."""
        return self.call(*self.inputs, self.seen)

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of the first output."""
        return torch.autograd.grad(self.out, self.inputs, self.grad, retain_graph=True)


def lines() -> Iterator[str]:
    """Yield the table."""
    began = time.monotonic()
    work = [(name, tiles) for name, listed in TILES.items() for tiles in listed]
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        tried = {pool.submit(compile_tiles, *one): one for one in work}
        cases = [
            case(lengths, anchors, 1024, 6144, HEADS, KV_HEADS)
            for lengths, anchors in (([3072] * 2, 512), ([500] * 12, 85))
        ]
        flexes = [Flex(given) for given in cases]
        failed = {tried[future]: future.result() for future in as_completed(tried)}
    flex = [(milliseconds(one.forward), milliseconds(one.backward)) for one in flexes]
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}; compiled after {time.monotonic() - began:.0f} s"
    little, runs = Run(small()), [Run(given) for given in cases]
    wanted = dense(little.case)
    yield f"default tiles, errors of out, dq, dk, dv: {', '.join(f'{e:.1e}' for e in worst(little.results(), wanted))}"
    yield f"{'kernel':8} {'rows keys warps stages':<23} {'2 x 3072':>9} {'12 x 500':>9}  error"
    best: dict[str, tuple[float, float]] = {}
    for name, tiles in work:
        cut = f"{name:8} {'{:4} {:4} {:5} {:6}'.format(*tiles):<23}"
        if failed[name, tiles]:
            yield f"{cut} {failed[name, tiles]}"
            continue
        little.launch(name, Tiles(*tiles))()
        error = max(worst(little.results(), wanted))
        little.launch(name, getattr(CUTS[WIDTH], name))()
        times = tuple(milliseconds(run.launch(name, Tiles(*tiles))) for run in runs)
        best[name] = min(best.get(name, times), times)
        yield f"{cut} {times[0]:9.3f} {times[1]:9.3f}  {error:.1e}"
    for i, (given, (forward, back)) in enumerate(zip(cases, flex, strict=True)):
        product = 2 * given.pairs * HEADS * WIDTH / 1e9
        rows = {"flex": (forward, back), "own": (best["forward"][i], best["queries"][i] + best["context"][i])}
        for who, (a, b) in rows.items():
            rates = f"{2 * product / a:.0f} and {5 * product / b:.0f} TFLOP/s"
            yield f"{('2 x 3072', '12 x 500')[i]} {who:4} forward {a:.3f} ms, backward {b:.3f} ms: {rates} useful"
    seen = partial(own.ranges, sharing=HEADS // KV_HEADS, cut=CUTS[WIDTH])
    tables = milliseconds(lambda: seen(cases[0].start_A, cases[0].anchor_A, cases[0].context_slots, B))
    yield f"tables of a micro-batch, eager: {tables:.3f} ms; all of this took {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    if not own.available(torch.device("cuda:0")):
        sys.exit("This needs a Hopper GPU with Triton: run it there.")
    for line in lines():
        print(line, flush=True)
