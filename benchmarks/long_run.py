"""Many steps of the Qwen3-8B shape in one process, captured, with every bucket of a plan, and saves between them.

    python benchmarks/long_run.py [STEPS] [FOLDER]

A checkpoint (weights and both moments, float32) is saved after 40 % and after 70 % of the steps, as a run saves it. The
host waits for the device after every step, so a step's time is its own. Printed is one JSON object: the median step;
the step that a copy holds up and what it takes more than the median; the steps while the file is written; recompiles;
and what torch's reserved memory grew by.
"""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.checkpoint.saver import Saver
from paceline.config import CheckpointSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.runtime.compiling import forbid_recompiles, warm_compiler
from paceline.train.step import DrafterStep

DEVICE = torch.device("cuda:0")
SHAPE = SHAPES["qwen3-8b"]
EVERY = 50  # steps between two lines of progress


def drafter_step(alarms: list[str]) -> DrafterStep:
    drafter = Drafter(SHAPE.drafter, SHAPE.hidden_size).initialise(0).to(DEVICE)
    embed = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, device=DEVICE).bfloat16() * 0.02
    ends = FrozenEnds(embed, embed.clone())
    return DrafterStep(drafter, ends, SHAPE.train_settings("bfloat16"), policy="captured", alarm=alarms.append)


def measure(steps: int, folder: Path) -> dict[str, Any]:
    torch.cuda.set_device(DEVICE)
    alarms: list[str] = []
    step = drafter_step(alarms)
    step.warm()
    batches = feature_batches(SHAPE, DEVICE, torch.bfloat16)
    told: list[dict[str, Any]] = []
    saver = Saver(
        folder,
        CheckpointSettings(every_steps=10**9),
        describe=lambda: {"steps": 0},
        tell=lambda event, **values: told.append({"event": event, **values}),
        stopping=lambda: False,
    )
    saver.prepare(step.state())
    saves = {int(0.4 * steps), int(0.7 * steps)}
    reserved = torch.cuda.memory_reserved(DEVICE)
    times, writing = [], []
    with forbid_recompiles(), saver:
        for at in range(steps):
            began = time.perf_counter()
            if at in saves:
                saver.between_steps(at, step.state(), last=False, candidate=True)
            step.load(batches[at % len(batches)])
            step.micro()
            step.update(1e-5)
            step.clear()
            torch.cuda.synchronize(DEVICE)
            times.append(time.perf_counter() - began)
            writing.append(saver._busy())
            if (at + 1) % EVERY == 0:
                print(f"{at + 1} steps, {statistics.median(times[-EVERY:]):.3f} s each", file=sys.stderr, flush=True)
    quiet = [t for at, t in enumerate(times) if not writing[at] and at not in saves]
    quiet = quiet or times  # in a short run
    usual: list[list[float]] = [[] for _ in batches]  # of each micro-batch
    for at, t in enumerate(times):
        if not writing[at] and at not in saves:
            usual[at % len(batches)].append(t)
    return {
        "steps": steps,
        "batches": len(batches),
        "step_ms": round(1e3 * statistics.median(quiet), 1),
        "stall_s": [round(times[at] - statistics.median(usual[at % len(batches)] or quiet), 3) for at in sorted(saves)],
        "while_writing_ms": round(
            1e3 * statistics.median([t for at, t in enumerate(times) if writing[at] and at not in saves] or [0.0]), 1
        ),
        "steps_while_writing": sum(writing),
        "saved": told,
        "recompiles": step.recompiles,
        "alarms": alarms,
        "reserved_gib": round(torch.cuda.memory_reserved(DEVICE) / 2**30, 3),
        "reserved_growth_bytes": torch.cuda.memory_reserved(DEVICE) - reserved,
        "peak_gib": round(torch.cuda.max_memory_allocated(DEVICE) / 2**30, 2),
        "finite": bool(torch.isfinite(step.norm)),
    }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()) / "long-run"
    place.mkdir(parents=True)  # a new one, as nothing of somebody else's may be deleted
    warm_compiler(str(DEVICE))
    with ThreadPoolExecutor(1) as pool:
        print(json.dumps(pool.submit(measure, count, place).result()))
