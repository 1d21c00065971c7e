"""How fast something ran and what that is of the device: shared by the measurements of step and target."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.bench.shapes import Shape
from paceline.drafter.flops import useful_flops
from paceline.records import FeatureBatch


def wait(device: torch.device) -> None:
    """Return once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def round_times(one: Callable[[int], object], size: int, count: int, device: torch.device) -> tuple[list[float], int]:
    """Return seconds a call, each the mean over a round, and the calls made: whole rounds, `count` or a few more.

    A round calls `one` with 0..size-1. It is queued and then waited for, as a run queues its work.
    """
    times = []
    for _ in range(0, count, size):
        began = time.perf_counter()
        for i in range(size):
            one(i)
        wait(device)
        times.append((time.perf_counter() - began) / size)
    return times, len(times) * size


def matrix_peak(device: torch.device) -> float | None:
    """Return the operations a second of a large bfloat16 matrix product here; None where that says nothing."""
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    times, _ = round_times(lambda _: a @ a, 20, 20, device)
    return 2 * 8192**3 / times[0]


def rates(flops: float, seconds: float, device: torch.device) -> dict[str, Any]:
    """Return useful operations, how many of them a second, and what share that is of the peak measured here and now."""
    peak, rate = matrix_peak(device), flops / seconds
    return {
        "useful_tflop": round(flops / 1e12, 6),
        "tflops": round(rate / 1e12, 2),
        "matrix_peak_tflops": round(peak / 1e12, 1) if peak else None,
        "peak_share": round(rate / peak, 4) if peak else None,
    }


def step_figures(shape: Shape, batches: list[FeatureBatch], seconds: float, device: torch.device) -> dict[str, Any]:
    """Return what steps over these micro-batches reached, which took so many seconds each."""
    own = [batch.tokens.blocks for batch in batches]
    flops = useful_flops(
        shape.drafter,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tokens=sum(batch.tokens.num_tokens for batch in batches),
        visible=sum(int((blocks.anchor_K - blocks.start_K).sum()) for blocks in own),
        blocks=sum(len(blocks.anchor_K) for blocks in own),
    )
    return {
        "step_ms": round(1e3 * seconds, 3),
        "blocks_per_s": round(statistics.mean(len(blocks.anchor_K) for blocks in own) / seconds, 1),
        "tokens_per_s": round(statistics.mean(batch.tokens.num_tokens for batch in batches) / seconds, 1),
        **rates(flops / len(batches), seconds, device),
    }


def gib(size: int) -> float:
    """Return bytes in GiB, rounded for a table."""
    return round(size / 2**30, 3)
