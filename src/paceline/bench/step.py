"""`paceline bench step`: the drafter's step under every policy, in a worker thread as in a run.

Each policy is measured in a process of its own, so that none finds memory of another. Code that was compiled before is
found again, in this run or an earlier one; `compiled` and `found` count both.
"""

import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import Shape
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.flops import useful_flops
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.records import FeatureBatch, RunError
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.train.step import DrafterStep


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured, with how much beside it."""

    shape: Shape
    device: str
    dtype: str
    steps: int
    noise: int  # threads that run forwards of a small model meanwhile
    hog: bool  # a thread that holds the interpreter


def bench_step(work: Work, policies: Sequence[Policy], console: Console) -> list[dict[str, Any]]:
    """Measure each policy and return a row for each.

    Raises:
        RunError: a policy failed; its cause is told.
    """
    rows = []
    for policy in policies:
        console.stage(f"{work.shape.name} {policy}")
        row = _in_process(work, policy)
        rows.append(row)
        console.line("  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items() if key != "shape"))
    return rows


def _in_process(work: Work, policy: Policy) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_in_thread, work, policy, time.time()).result()
        except BrokenProcessPool as error:
            raise RunError(f"The process of policy {policy} died: it was killed, or it crashed.") from error


def _in_thread(work: Work, policy: Policy, asked: float) -> dict[str, Any]:
    """Measure in a worker thread; `asked` is when the process was asked for, by the clock on the wall."""
    if policy != "eager":
        warm_compiler(work.device)
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        try:
            return pool.submit(_measure, work, policy, asked).result()
        except Exception as error:
            raise RunError(f"The step failed: {type(error).__name__}: {str(error) or '<empty message>'}") from error


def _measure(work: Work, policy: Policy, asked: float) -> dict[str, Any]:
    shape, device = work.shape, torch.device(work.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    wire = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    began = time.perf_counter()
    step = _step(work, policy, wire)
    built = time.perf_counter()
    step.warm()
    warm = time.perf_counter()
    batches = feature_batches(shape, device, wire)
    drawn_s = time.perf_counter() - warm
    _one(step, batches[0])
    _wait(device)
    first_step_s = time.time() - asked - drawn_s  # a run's features come from its targets
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    with forbid_recompiles(), _beside(work):
        times, count = _times(step, batches, work.steps, device)
    memory = _memory(device, reserved) if cuda else dict.fromkeys(("peak_gib", "reserved_gib", "reserved_growth_gib"))
    median = statistics.median(times)
    rate = statistics.mean(_flops(shape, batch) for batch in batches) / median
    return {
        "policy": policy,
        "shape": shape.name,
        "step_ms": round(1e3 * median, 3),
        "blocks_per_s": round(statistics.mean(len(b.tokens.blocks.anchor_K) for b in batches) / median, 1),
        "tflops": round(rate / 1e12, 2),
        "peak_share": round(rate / _matrix_peak(device), 4) if cuda else None,
        **memory,
        "recompiles": step.recompiles,
        "first_step_s": round(first_step_s, 1),
        "built_s": round(built - began, 1),
        "warm_s": round(warm - built, 1),
        **_compiled(),
        "batches": len(batches),
        "steps": count,
        "noise": work.noise,
        "hog": work.hog,
    }


def _step(work: Work, policy: Policy, wire: torch.dtype) -> DrafterStep:
    shape, device = work.shape, torch.device(work.device)
    drafter = Drafter(shape.drafter, shape.hidden_size).initialise(0).to(device)
    generator = torch.Generator(device=device).manual_seed(1)
    embed = torch.randn(shape.vocab_size, shape.hidden_size, device=device, generator=generator).to(wire) * 0.02
    ends = FrozenEnds(embed, embed.clone())
    return DrafterStep(drafter, ends, shape.train_settings(work.dtype), policy=policy, alarm=_warn)


def _warn(guard: str) -> None:
    print(guard, file=sys.stderr)


def _memory(device: torch.device, before: int) -> dict[str, float]:
    now = torch.cuda.memory_reserved(device)
    sizes = {
        "peak_gib": torch.cuda.max_memory_allocated(device),
        "reserved_gib": now,
        "reserved_growth_gib": now - before,
    }
    return {name: round(size / 2**30, 3) for name, size in sizes.items()}


def _compiled() -> dict[str, int]:
    """Return how many graphs this process compiled, and how many it found compiled."""
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return {"compiled": seen["fxgraph_cache_miss"], "found": seen["fxgraph_cache_hit"]}


def _one(step: DrafterStep, batch: FeatureBatch) -> None:
    step.load(batch)
    step.micro()
    step.update(1e-5)
    step.clear()


def _times(step: DrafterStep, batches: list[FeatureBatch], count: int, device: torch.device) -> tuple[list[float], int]:
    """Return seconds a step, each the mean over all batches, and the steps made: whole rounds, `count` or a few more.

    A round is queued and then waited for, as a run queues its steps.
    """
    group = len(batches)
    times = []
    for at in range(0, count, group):
        began = time.perf_counter()
        for i in range(group):
            _one(step, batches[(at + i) % len(batches)])
        _wait(device)
        times.append((time.perf_counter() - began) / group)
    return times, len(times) * group


class _beside:
    """Threads that work while the block lasts: forwards of a small model, or Python that never lets go."""

    def __init__(self, work: Work) -> None:
        self._stop = threading.Event()
        targets: list[Callable[[], None]] = [lambda: _forwards(work.device, self._stop)] * work.noise
        if work.hog:
            targets.append(lambda: _spin(self._stop))
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _forwards(device: str, stop: threading.Event) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(30)]).to(device)
    x = torch.zeros(64, 256, device=device)
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    with torch.inference_mode(), torch.cuda.stream(stream):
        while not stop.is_set():
            model(x)
            if stream is not None:
                stream.synchronize()


def _spin(stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1


def _flops(shape: Shape, batch: FeatureBatch) -> float:
    own = batch.tokens.blocks
    return useful_flops(
        shape.drafter,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tokens=batch.tokens.num_tokens,
        visible=int((own.anchor_K - own.start_K).sum()),
        blocks=len(own.anchor_K),
    )


def _matrix_peak(device: torch.device) -> float:
    """Return the operations a second of a large bfloat16 matrix product here."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize(device)
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
