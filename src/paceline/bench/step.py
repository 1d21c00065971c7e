"""`paceline bench step`: the drafter's step under every policy, in a worker thread as in a run.

Each policy is measured in a process of its own, so that none finds memory or compiled code of another.
"""

import multiprocessing
import statistics
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
    started_s = time.time() - asked
    if policy != "eager":
        warm_compiler(work.device)
    peak = _matrix_peak(work.device) if torch.device(work.device).type == "cuda" else None
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        try:
            row = pool.submit(_measure, work, policy, peak).result()
            return row | {"first_step_s": round(started_s + row["first_step_s"], 1), "started_s": round(started_s, 1)}
        except Exception as error:
            raise RunError(f"The step failed: {type(error).__name__}: {str(error) or '<empty message>'}") from error


def _measure(work: Work, policy: Policy, peak: float | None) -> dict[str, Any]:
    shape, device = work.shape, torch.device(work.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    wire = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    began = time.perf_counter()
    drafter = Drafter(shape.drafter, shape.hidden_size).initialise(0).to(device)
    generator = torch.Generator(device=device).manual_seed(1)
    embed = torch.randn(shape.vocab_size, shape.hidden_size, device=device, generator=generator).to(wire) * 0.02
    step = DrafterStep(
        drafter, FrozenEnds(embed, embed.clone()), shape.train_settings(work.dtype), policy=policy, alarm=print
    )
    built_s = time.perf_counter() - began
    step.warm()
    warm_s = time.perf_counter() - began - built_s
    batches = feature_batches(shape, device, wire)
    began_steps = time.perf_counter()
    _one(step, batches[0])
    _wait(device)
    first_step_s = built_s + warm_s + time.perf_counter() - began_steps
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    with forbid_recompiles(), _beside(work):
        times = _times(step, batches, work.steps, device)
    flops = [shape.flops(b.tokens.lengths, _visible(b), len(b.tokens.blocks.anchor_K)) for b in batches]
    median = statistics.median(times)
    rate = statistics.mean(flops) / median
    return {
        "policy": policy,
        "shape": shape.name,
        "step_ms": round(1e3 * median, 3),
        "blocks_per_s": round(statistics.mean(len(b.tokens.blocks.anchor_K) for b in batches) / median, 1),
        "tflops": round(rate / 1e12, 2),
        "peak_share": round(rate / peak, 4) if peak else None,
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if cuda else None,
        "reserved_gib": round(torch.cuda.memory_reserved(device) / 2**30, 3) if cuda else None,
        "reserved_growth_gib": round((torch.cuda.memory_reserved(device) - reserved) / 2**30, 3) if cuda else None,
        "recompiles": step.recompiles,
        "built_s": round(built_s, 1),
        "warm_s": round(warm_s, 1),
        "first_step_s": round(first_step_s, 1),
        "batches": len(batches),
        "steps": work.steps,
        "noise": work.noise,
        "hog": work.hog,
    }


def _one(step: DrafterStep, batch: FeatureBatch) -> None:
    step.load(batch)
    step.micro()
    step.update(1e-5)
    step.clear()


def _times(step: DrafterStep, batches: list[FeatureBatch], count: int, device: torch.device) -> list[float]:
    """Return seconds a step. On a GPU all batches are queued and then waited for, as a run queues them."""
    group = len(batches) if device.type == "cuda" else 1
    times = []
    for at in range(0, count, group):
        began = time.perf_counter()
        for i in range(group):
            _one(step, batches[(at + i) % len(batches)])
        _wait(device)
        times.append((time.perf_counter() - began) / group)
    return times


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


def _visible(batch: FeatureBatch) -> int:
    own = batch.tokens.blocks
    return int((own.anchor_K - own.start_K).sum())


def _matrix_peak(device: str) -> float:
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
