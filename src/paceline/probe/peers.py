"""Probes of several GPUs at once: copies between every pair, and a sum over all of them from one thread."""

import itertools
import time

import torch

from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.nets import use
from paceline.probe.threads import in_worker

COPY_BYTES, COPIES = 256 << 20, 5
SUM_BYTES = 64 << 20


def copies_between_all_pairs(bench: Bench) -> Finding:
    """Copy from every GPU to every other one, compare and time."""
    count = bench.devices
    speeds: list[list[float | None]] = [[None] * count for _ in range(count)]
    staged: list[str] = []  # pairs without direct access: their copies go through host memory
    failed: list[str] = []
    for source, target in itertools.permutations(range(count), 2):
        try:
            speeds[source][target] = float(f"{_copy_speed(source, target):.4g}")
            if not torch.cuda.can_device_access_peer(source, target):
                staged.append(f"{source}→{target}")
        except Exception as error:
            failed.append(f"{source}→{target} {tell(error)}")
    known = [speed for row in speeds for speed in row if speed is not None]
    text = f"{len(known)} pairs, {min(known):.0f} to {max(known):.0f} GB/s" if known else "no pair"
    text += f"; without direct access: {', '.join(staged)}" if staged else ""
    text += f"; failed: {'; '.join(failed)}" if failed else ""
    return Finding("refused" if failed else "degraded" if staged else "ok", text, {"gb_s": speeds})


def _copy_speed(source: int, target: int) -> float:
    """Return GB/s of a copy, after the first one was compared."""
    words = COPY_BYTES // 4
    here = torch.arange(words, dtype=torch.int32, device=f"cuda:{source}")
    there = torch.zeros(words, dtype=torch.int32, device=f"cuda:{target}")
    there.copy_(here)
    if not torch.equal(there, torch.arange(words, dtype=torch.int32, device=f"cuda:{target}")):
        raise ArithmeticError("the copy holds other values than its source")
    _synchronize(source, target)
    began = time.perf_counter()
    for _ in range(COPIES):
        there.copy_(here)
    _synchronize(source, target)
    return COPIES * COPY_BYTES / (time.perf_counter() - began) / 1e9


def _synchronize(*devices: int) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def sum_over_all(bench: Bench) -> Finding:
    """Sum a tensor over all GPUs through NCCL from one worker thread of one process."""
    from torch.cuda import nccl

    def body() -> tuple[bool, float]:
        use(torch.device("cuda", 0))
        parts = [torch.full((SUM_BYTES // 4,), float(i + 1), device=f"cuda:{i}") for i in range(bench.devices)]
        _synchronize(*range(bench.devices))
        nccl.all_reduce(parts)
        _synchronize(*range(bench.devices))
        wanted = float(sum(range(1, bench.devices + 1)))
        right = all(bool((part == wanted).all()) for part in parts)
        began = time.perf_counter()
        nccl.all_reduce(parts)
        _synchronize(*range(bench.devices))
        return right, (time.perf_counter() - began) * 1e3

    right, ms = in_worker(body)
    version = ".".join(map(str, nccl.version()))
    text = f"NCCL {version}: {SUM_BYTES >> 20} MiB over {bench.devices} GPUs in {ms:.1f} ms"
    if not right:
        return Finding("refused", f"wrong sum; {text}", {"nccl": version, "ms": ms})
    return Finding("ok", text, {"nccl": version, "ms": round(ms, 2)})
