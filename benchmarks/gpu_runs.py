"""Whole runs with random weights on several devices, and what is compared of them: shared by the scripts for GPUs."""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.pipeline import PipelineWork, Whole, micro_batches
from paceline.observe.console import Console
from paceline.recipes.bench_pipeline import run_whole
from paceline.records import FeatureBatch, RunError
from paceline.target.replica import TargetReplica
from paceline.train.step import DrafterStep

BIN_COUNT = 96  # characters of a timeline
SHADES = " .:#"


def devices(kind: str, count: int) -> tuple[str, ...]:
    """Return names of so many devices; those of a CPU differ in name only."""
    return tuple(f"{kind}:{index}" for index in range(count))


def work_of(
    kind: str,
    targets: Sequence[str],
    drafters: Sequence[str],
    *,
    steps: int,
    per_step: int | None = None,
    shape: str | None = None,
    fp8: bool = False,
) -> PipelineWork:
    """Return a run at the Qwen3-8B shape, captured and in bfloat16, or on a CPU at the tiny one."""
    gpu = kind == "cuda"
    return PipelineWork(
        name=shape or ("qwen3-8b" if gpu else "tiny"),
        targets=tuple(targets),
        drafters=tuple(drafters),
        dtype="bfloat16" if gpu else "float32",
        policy="captured" if gpu else "eager",
        steps=steps,
        fp8=fp8,
        batches_per_step=per_step,
    )


def run(work: PipelineWork, **more: Any) -> tuple[Whole, float]:
    """Run it, and return what it told and its samples a second behind warm-up; `more` is that of run_whole."""
    batches = micro_batches(work)
    whole, warm = run_whole(work, batches, Console(json=True), **more)
    stamps = whole.stamps[warm - 1 : warm + work.steps]
    samples = sum(len(batch.tokens.lengths) for batch in batches) / len(batches)
    return whole, work.step_batches * samples * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses, over the steps that both made."""
    both = list(zip(one, other, strict=False))
    if not both or not all(math.isfinite(a) and math.isfinite(b) for a, b in both):
        return math.inf
    return max(abs(a - b) / abs(a) for a, b in both)


def same_weights(whole: Whole) -> bool:
    """Return whether all ranks hold the same bits."""
    first, *others = ([p.detach().cpu() for p in drafter.parameters()] for drafter in whole.drafters)
    return all(torch.equal(a, b) for own in others for a, b in zip(first, own, strict=True))


class Window:
    """torch's profiler over some steps of a run; to be called behind each, in one thread."""

    def __init__(self, first: int, last: int, trace: Path) -> None:
        """It begins behind step `first` and ends behind `last`; what it saw goes to `trace`, as Chrome reads it."""
        self._first, self._last, self._trace = first, last, trace
        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[kind])

    def __call__(self, steps: int) -> None:
        """Learn how many steps are made."""
        if steps == self._first:
            self._profile.start()
        elif steps == self._last:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def copied(events: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the bytes of each copy by its kind: DtoH, HtoD, DtoD, PtoP."""
    found: dict[str, list[int]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy" and (kind := re.match(r"Memcpy (\w+)", event["name"])):
            found.setdefault(kind[1], []).append(int(event["args"]["bytes"]))
    return found


def busy_bins(events: Sequence[dict[str, Any]], bins: int = BIN_COUNT) -> dict[int, list[float]]:
    """Return for each GPU in which share of every bin of the trace's time a kernel ran on it."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return {}
    first = min(event["ts"] for event in kernels)
    width = (max(event["ts"] + event["dur"] for event in kernels) - first) / bins
    found: dict[int, list[float]] = {}
    ends: dict[int, float] = {}  # up to where a GPU's time is counted: kernels of several streams overlap
    for event in sorted(kernels, key=lambda event: event["ts"]):
        gpu = int(event["args"]["device"])
        own = found.setdefault(gpu, [0.0] * bins)
        begin, end = max(event["ts"] - first, ends.get(gpu, 0.0)), event["ts"] + event["dur"] - first
        ends[gpu] = max(end, ends.get(gpu, 0.0))
        for at in range(int(begin / width), min(bins, int(end / width) + 1)):
            own[at] += max(0.0, min(end, (at + 1) * width) - max(begin, at * width)) / width
    return found


def timeline(bins: dict[int, list[float]]) -> str:
    """Return a line a GPU: the more of its time a kernel ran, the darker."""
    return "\n".join(
        f"GPU {gpu} |{''.join(SHADES[min(3, int(4 * share))] for share in own)}|" for gpu, own in sorted(bins.items())
    )


def at_once(bins: dict[int, list[float]]) -> float:
    """Return the least share of the time in which all GPUs ran kernels at once, by bins: what is busy beyond taking
    turns."""
    return sum(max(0.0, sum(shares) - len(shares) + 1) for shares in zip(*bins.values(), strict=True)) / BIN_COUNT


class Broken:
    """A target replica, the one on a device, fails at its n-th micro-batch of a run, and from then on.

    `how` is raise, or oom: all that is left of its GPU's memory is taken by a tensor; on a CPU torch's error is raised.
    """

    def __init__(self, how: str, device: str, at: int) -> None:
        self._how, self._device, self._at = how, device, at
        self._seen, self._hog = 0, []  # type: ignore[var-annotated]
        self._features = TargetReplica._features

    def __enter__(self) -> "Broken":
        broken = self

        def features(replica: TargetReplica, tokens: Any) -> torch.Tensor:
            if replica.device == broken._device:
                broken._seen += 1
                if broken._seen >= broken._at:
                    broken._break(replica)
            return broken._features(replica, tokens)

        TargetReplica._features = features  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        TargetReplica._features = self._features  # type: ignore[method-assign]
        self._hog.clear()

    def _break(self, replica: TargetReplica) -> None:
        if self._how == "raise":
            raise RuntimeError("device lost")
        where = torch.device(self._device)
        if where.type != "cuda":
            replica._whole = _no_room  # type: ignore[method-assign]
            return
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()
        size = 1 << 30
        while size >= 512:  # until nothing is left in torch's allocator either
            try:
                self._hog.append(torch.empty(size, dtype=torch.uint8, device=where))
            except torch.OutOfMemoryError:
                size //= 2


def _no_room(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("a tensor hog")


class RankBroken:
    """The n-th update that any drafter rank makes on a device raises."""

    def __init__(self, device: str, at: int) -> None:
        self._device, self._at, self._seen = torch.empty(0, device=device).device, at, 0
        self.raised_at: float | None = None  # by the monotonic clock
        self._update, self._lock = DrafterStep.update, threading.Lock()

    def __enter__(self) -> "RankBroken":
        broken = self

        def update(step: DrafterStep, *given: Any) -> None:
            with broken._lock:
                broken._seen += step.buffers.features_CD.device == broken._device
                if broken._seen == broken._at:
                    broken.raised_at = time.monotonic()
                    raise RuntimeError("device lost")
            broken._update(step, *given)

        DrafterStep.update = update  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        DrafterStep.update = self._update  # type: ignore[method-assign]


def error_of(one: Callable[[], object]) -> RunError | None:
    """Return the error that ends a run; None where none does."""
    try:
        one()
    except RunError as error:
        return error
    return None


def feature_bytes(batches: Sequence[FeatureBatch]) -> int:
    """Return the bytes of a micro-batch's features; all have as many."""
    (size,) = {batch.nbytes for batch in batches}
    return size
