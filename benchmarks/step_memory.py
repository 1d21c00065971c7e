"""Hold the estimate of a step's memory against a GPU. Usage: python benchmarks/step_memory.py [CASES AT A TIME] [UNTIL]

Every case runs in a process of its own: warm-up and two steps of a full micro-batch, in a worker thread as in a run.
Two run at a time unless told otherwise, which together need 100 GiB; a process counts its own memory alone. No case is
begun after UNTIL seconds (420; one takes a minute or two), and which were not is said. The status is 1 if one was not
begun, failed, or was estimated more than a tenth off. Printed
are torch's peak of allocated memory, the estimate, and their ratio; `resrvd` is what torch took from the device for it.
The feature batch is not part of a step, so it waits on the CPU.
"""

import dataclasses
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES, Shape
from paceline.config import TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.runtime.compiling import Policy, warm_compiler
from paceline.train.memory import StepMemory, step_memory
from paceline.train.step import DrafterStep

DEVICE = "cuda:0"
GIB = 2**30
OFF = 0.1  # share that an estimate may be off
# A shape, what differs from it, and the policies it is measured under. First those that have not been measured yet.
CASES: list[tuple[str, dict[str, Any], list[Policy]]] = [
    ("small", {"recompute": "layers"}, ["compiled", "captured"]),
    ("small", {"moments": "8bit"}, ["captured"]),
    ("small", {"offload": "moments"}, ["captured"]),
    ("small", {"offload": "moments", "moments": "8bit", "recompute": "layers"}, ["captured"]),
    ("qwen3-8b", {"recompute": "layers"}, ["captured"]),
    ("qwen3-8b", {"recompute": "layers", "logits_mib": 256}, ["captured"]),
    ("qwen3-8b", {"moments": "8bit"}, ["captured"]),
    ("qwen3-8b", {"offload": "moments"}, ["captured"]),
    ("qwen3-8b", {"recompute": "layers", "moments": "8bit", "offload": "moments"}, ["captured"]),
    ("small", {"optimizer": "muon"}, ["captured"]),
    ("small", {"dtype": "float32"}, ["captured"]),
    ("small", {"anchor_slots": 256, "context_slots": 4096}, ["compiled", "captured"]),
    ("qwen3-8b", {}, ["compiled", "captured"]),
    ("qwen3-8b", {"anchor_slots": 1024, "context_slots": 6144}, ["captured"]),
    ("qwen3-8b", {"layers": 3}, ["captured"]),
    ("qwen3-8b", {"logits_mib": 256}, ["captured"]),
    ("small", {}, ["compiled", "captured"]),
]


def settings_of(shape: Shape, changes: dict[str, Any]) -> tuple[Shape, TrainSettings]:
    """Return the shape and the settings of a case."""
    changes = dict(changes)
    if "layers" in changes:
        drafter = shape.drafter.model_copy(update={"layers": changes.pop("layers")})
        shape = dataclasses.replace(shape, drafter=drafter)
    sizes = {key: changes[key] for key in ("anchor_slots", "context_slots") if key in changes}
    shape = dataclasses.replace(shape, **sizes)
    return shape, shape.train_settings("bfloat16").model_copy(update=changes)


def measure(name: str, changes: dict[str, Any], policy: Policy) -> tuple[int, int, StepMemory]:
    """Return the peak of allocated and of reserved bytes of a case, and its estimate."""
    shape, train = settings_of(SHAPES[name], changes)
    warm_compiler(DEVICE)
    with ThreadPoolExecutor(1) as pool:
        allocated, reserved = pool.submit(run, shape, train, policy).result()
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}
    return allocated, reserved, step_memory(shape.drafter, train, **sizes, tied=False)


def run(shape: Shape, train: TrainSettings, policy: Policy) -> tuple[int, int]:
    """Warm a step up, take two, and return the peaks."""
    device = torch.device(DEVICE)
    torch.cuda.set_device(device)
    # On the CPU first: no copy in another format is left on the device.
    embed = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16)
    drafter = Drafter(shape.drafter, shape.hidden_size).initialise(0).to(device)
    step = DrafterStep(drafter, FrozenEnds(embed, embed.clone()), train, policy=policy, alarm=print)
    torch.cuda.reset_peak_memory_stats(device)
    step.warm()
    batch = max(feature_batches(shape, torch.device("cpu"), torch.bfloat16), key=lambda batch: batch.tokens.num_tokens)
    for _ in range(2):
        step.load(batch)
        step.micro()
        step.update(1e-5)
        step.clear()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def in_process(name: str, changes: dict[str, Any], policy: Policy, until: float) -> tuple[int, int, StepMemory] | None:
    """Measure a case where neither memory nor compiled code of another is; None: it is too late to begin.

    The process is nobody else's, so one that dies takes no other case with it.
    """
    if time.monotonic() >= until:
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, changes, policy).result()


def main(together: int, seconds: float) -> int:
    """Measure every case, print two lines for each as it ends, and return the status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of the processes, as the command line sets it
    print(
        f"{'shape':<10}{'changed':<56}{'policy':<10}{'GiB':>7}{'estim.':>8}{'ratio':>7}{'resrvd':>8}  peak", flush=True
    )
    until, fine = time.monotonic() + seconds, True
    with ThreadPoolExecutor(together) as pool:
        asked = {
            pool.submit(in_process, name, changes, policy, until): (name, changes, policy)
            for name, changes, policies in CASES
            for policy in policies
        }
        for done in as_completed(asked):
            name, changes, policy = asked[done]
            case = f"{name:<10}{', '.join(f'{key} {value}' for key, value in changes.items()):<56}{policy:<10}"
            try:
                found = done.result()
            except Exception as error:
                print(f"{case} {type(error).__name__}: {str(error)[:300]}", flush=True)
                fine = False
                continue
            if found is None:
                print(f"{case} not begun within {seconds:g} s", flush=True)
                fine = False
                continue
            allocated, reserved, memory = found
            ratio = memory.total / allocated
            fine &= abs(ratio - 1) <= OFF
            print(
                f"{case}{allocated / GIB:>7.2f}{memory.total / GIB:>8.2f}{ratio:>7.3f}{reserved / GIB:>8.2f}  "
                f"{memory.peak}"
            )
            print("  " + "  ".join(f"{part} {size / GIB:.2f}" for part, size in memory.parts().items()), flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, float(sys.argv[2]) if len(sys.argv) > 2 else 420.0))
