"""Where a step's time goes on a GPU. Usage: python benchmarks/step_profile.py [SHAPE] [SETTING=VALUE ...]

A captured step in a worker thread, as `paceline bench step` measures it, under torch's profiler: the kernels of some
steps, summed by what they are for, against the wall time of the same steps. `state=bf16` keeps weights and moments in
bfloat16; everything else is a setting of the section `train`, as in `logits_mib=512`.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.bench.weights import random_drafter, random_ends
from paceline.bench.work import CLIP, RATE
from paceline.config import TrainSettings
from paceline.runtime.compiling import warm_compiler
from paceline.train.step import DrafterStep

DEVICE = "cuda:0"
ROUNDS = 3
OTHER = "other"
# What a kernel's name holds, in this order, and what such a kernel is for.
KINDS = (
    ("matrix products", ("nvjet", "cutlass", "gemm", "cublas", "xmma", "splitKreduce")),
    ("attention, backward", ("flex_attention_backward", "_backward_queries", "_backward_context")),
    ("between the head's products", ("_between", "log_softmax")),
    ("quantizing", ("fp8", "float8", "e4m3", "_quantize", "_transpose", "_gate")),
    ("element-wise, norms, update", ("triton_", "elementwise", "reduce", "multi_tensor", "CatArray")),
    ("attention, forward", ("flex_attention", "flash", "_forward")),
    ("copies and clearing", ("memcpy", "memset", "fill")),
)


def kind_of(name: str) -> str:
    """Return what a kernel is for."""
    return next((kind for kind, parts in KINDS if any(part.lower() in name.lower() for part in parts)), OTHER)


def built(name: str, changes: dict[str, str]) -> tuple[DrafterStep, list[Any]]:
    """Return the warm step and micro-batches at the shape."""
    shape, device = SHAPES[name], torch.device(DEVICE)
    drafter = random_drafter(shape, device)
    narrow = changes.pop("state", "") == "bf16"
    settings = shape.train_settings("bfloat16").model_dump() | {"clip": CLIP} | changes
    train = TrainSettings.model_validate(settings)
    if narrow:  # "float32" is: no working copy beside the weights, whatever these are
        drafter, train = drafter.bfloat16(), train.model_copy(update={"dtype": "float32"})
    step = DrafterStep(drafter, random_ends(shape, device, torch.bfloat16), train, policy="captured", alarm=print)
    step.warm()
    return step, feature_batches(shape, device, torch.bfloat16)


def measure(name: str, changes: dict[str, str]) -> dict[str, Any]:
    """Return milliseconds a step: by the clock, and of kernels by kind and by name."""
    step, batches = built(name, changes)

    def round_of_steps() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for batch in batches * ROUNDS:
            step.load(batch)
            step.micro()
            step.update(RATE)
            step.clear()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / (ROUNDS * len(batches))

    return profiled(round_of_steps, ROUNDS * len(batches))


def profiled(once: Callable[[], float], count: int) -> dict[str, Any]:
    """Return milliseconds of one of `count` equal pieces that `once` does and takes the mean time of."""
    once()
    plain_ms = once()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:  # else torch 2.11 warns of lost ones
        profiled_ms = once()
    kernels: Counter[str] = Counter()
    for event in seen.key_averages():
        kernels[event.key] += event.self_device_time_total / 1e3 / count
    kinds: Counter[str] = Counter()
    for kernel, ms in kernels.items():
        kinds[kind_of(kernel)] += ms
    return {"plain_ms": plain_ms, "profiled_ms": profiled_ms, "kinds": kinds, "kernels": kernels}


def show(what: str, found: dict[str, Any]) -> None:
    """Print the table; the largest kernels follow."""
    whole = found["profiled_ms"]
    print(f"{what}: {found['plain_ms']:.1f} ms, {whole:.1f} ms under the profiler")
    for kind, ms in found["kinds"].most_common():
        print(f"  {ms:8.2f} ms  {100 * ms / whole:5.1f} %  {kind}")
    share = (sum(found["kinds"].values()) - found["kinds"][OTHER]) / whole
    print(f"  kernels whose purpose is known are {100 * share:.1f} % of the time")
    if not math.isfinite(share) or share < 0.5:
        sys.exit("The profiler saw less than half of the time: it counted no kernels, so the table says nothing.")
    for kernel, ms in found["kernels"].most_common(40):
        print(f"  {ms:8.3f}  {kind_of(kernel)[:12]:12}  {kernel[:90]}")
    print(json.dumps({"ms": found["plain_ms"], "kinds": dict(found["kinds"])}))


def main(name: str = "qwen3-8b-2x3072", *changes: str) -> None:
    """Profile a step at the shape under the settings."""
    warm_compiler(DEVICE)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(measure, name, dict(change.split("=", 1) for change in changes)).result()
    show(f"{name} {' '.join(changes)}, a step", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
