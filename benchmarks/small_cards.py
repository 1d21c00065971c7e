"""Hold what `paceline plan --memory` names against a GPU that pretends to be a smaller card.

Usage: python benchmarks/small_cards.py [--steps N] [--at-once N] [--until SECONDS] [--only 24:qwen3-8b ...]
       [--anchor-slots A] [--context-slots C]

Cases side by side (`--at-once`) share the GPU, so memory is each one's own and blocks a second are not: a row says how
many were asked for.

A case is a card of 24, 40 or 80 GiB and a drafter of Qwen3-4B or Qwen3-8B, alone on it. It takes the settings that the
plan names, caps torch at the card's memory less what the plan leaves to CUDA (`set_per_process_memory_fraction`), makes
the slots for features, and trains on them with the captured step as `paceline bench step` does. A line of JSON comes
from each as it ends: estimate and peak in GiB, their ratio, blocks a second. The peak is that of the rehearsal, which
CUDA graphs keep for themselves, with the slots beside it. The exit status is 1 if a case ran out of memory, failed, was
not done in time, or was estimated more than a tenth off.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES, Shape
from paceline.bench.timing import gib, round_times
from paceline.bench.weights import random_drafter, random_ends
from paceline.bench.work import RATE
from paceline.config import RunSettings
from paceline.drafter.packed import pack
from paceline.pipeline.cards import CONTEXT, usable_of
from paceline.pipeline.fit_search import Fit, search
from paceline.pipeline.fit_search import Shape as FitShape
from paceline.pipeline.slots import Slots, handed_like, written_at_once
from paceline.recipes.plan_fit import overrides
from paceline.records import FeatureBatch
from paceline.runtime.compiling import forbid_recompiles, warm_compiler
from paceline.runtime.interpreter import quick_handovers
from paceline.train.step import DrafterStep

CARDS, NAMES = (24, 40, 80), ("qwen3-4b", "qwen3-8b")
OFF = 0.1  # share that an estimate may be off
DEVICE = "cuda:0"
_LOOK_S = 0.2


def sized(name: str, *, anchor_slots: int, context_slots: int) -> Shape:
    """Return a shape with micro-batches of this size, eight samples' anchors at least."""
    sizes = {"anchor_slots": anchor_slots, "context_slots": context_slots, "anchors_per_sample": anchor_slots // 8}
    return dataclasses.replace(SHAPES[name], **sizes)


def named(shape: Shape, card: int) -> Fit:
    """Return what the plan names for a drafter that is alone on a card of so many bytes."""
    run = RunSettings.model_validate(
        {
            "run_dir": "run",
            "target": {"model": "target"},
            "drafter": shape.drafter.model_dump(),
            "data": {"dataset": "data", "max_length": shape.context_slots // 2},
            "train": shape.train_settings("bfloat16").model_dump(),
            "pipeline": {"targets": ["cuda:1"], "drafters": ["cuda:0"]},
        }
    )
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "tied": shape.tied}
    alone = FitShape(**sizes, layers=1, replica=lambda settings: [0])
    return search(run, alone, usable_of(card))


def measure(card: int, shape: Shape, steps: int) -> dict[str, Any]:
    """Return the row of a case."""
    fit = named(shape, card)
    row: dict[str, Any] = {"changes": overrides(fit.changes), "estimate_gib": gib(fit.most)}
    if fit.most > usable_of(card):
        return row | {"failed": "no settings fit"}
    device = torch.device(DEVICE)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (card - CONTEXT) / total), device)
    warm_compiler(DEVICE)
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        try:
            row |= pool.submit(trained, fit, shape, steps, device).result()
        except torch.OutOfMemoryError as error:
            return row | {"out_of_memory": True, "failed": str(error)[:300]}
    ratio = fit.most / 2**30 / row["peak_gib"]
    row |= {
        "out_of_memory": False,
        "reserved_gib": gib(torch.cuda.max_memory_reserved(device)),
        "ratio": round(ratio, 3),
    }
    return row | ({"failed": "the estimate is more than a tenth off"} if abs(ratio - 1) > OFF else {})


def trained(fit: Fit, shape: Shape, steps: int, device: torch.device) -> dict[str, Any]:
    """Warm the step up, make the slots, take so many steps of one micro-batch, and return how fast they were."""
    run = fit.settings
    torch.cuda.set_device(device)
    smaller = dataclasses.replace(
        shape, anchor_slots=run.train.anchor_slots, context_slots=run.train.context_slots
    )  # what the plan made of it
    drafter, ends = random_drafter(shape, device), random_ends(shape, device, torch.bfloat16)
    torch.cuda.empty_cache()
    step = DrafterStep(drafter, ends, run.train, policy="captured", alarm=lambda guard: print(guard, file=sys.stderr))
    torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step.warm()
    warm_s = time.perf_counter() - began
    rehearsed, before = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    slots, batches = in_slots(step, run, smaller)  # held, those that stay empty too
    peak = rehearsed + torch.cuda.memory_allocated(device) - before

    def one(at: int) -> None:
        step.load(batches[at])
        step.micro()
        step.update(RATE)
        step.clear()

    one(0)
    with forbid_recompiles(), quick_handovers():
        times, count = round_times(one, len(batches), steps, device)
    seconds = statistics.median(times)
    blocks = statistics.mean(len(batch.tokens.blocks.anchor_K) for batch in batches)
    rate = {"step_ms": round(1e3 * seconds, 3), "blocks_per_s": round(blocks / seconds, 1)}
    peak = max(peak, torch.cuda.max_memory_allocated(device))
    del slots
    return {"peak_gib": gib(peak), **rate, "steps": count, "warm_s": round(warm_s, 1), "recompiles": step.recompiles}


def in_slots(step: DrafterStep, run: RunSettings, shape: Shape) -> tuple[Slots, list[FeatureBatch]]:
    """Return the slots of a run, and micro-batches whose features lie in them as the run would hand them over."""
    slots = Slots(int(run.pipeline.credit_gib * 2**30), replicas=written_at_once(run), ranks=1)
    slots.make(0, handed_like(step.buffers.features_CD, run))
    landed = []
    for batch in sorted(
        feature_batches(shape, torch.device("cpu"), torch.bfloat16), key=lambda batch: -batch.tokens.num_tokens
    ):
        slots.expect(batch.tokens)
        if not slots.has(batch.tokens.seq):
            break
        taps = len(run.drafter.taps)
        features_TD = pack(batch.features_TD, taps) if run.target.features == "fp8" else batch.features_TD
        slot = slots.take(batch.tokens.seq)
        room_TD = slot.features_CD[: len(features_TD)]
        room_TD.copy_(features_TD)
        blocks = batch.tokens.blocks
        pinned = {field.name: getattr(blocks, field.name).pin_memory() for field in dataclasses.fields(blocks)}
        tokens = dataclasses.replace(batch.tokens, blocks=type(blocks)(**pinned))
        landed.append(FeatureBatch(tokens, room_TD, batch.positions_T))
    return slots, landed


def run_case(case: str, asked: argparse.Namespace) -> int:
    """Measure a case in this process and print its row."""
    card, name = case.split(":")
    shape = sized(name, anchor_slots=asked.anchor_slots, context_slots=asked.context_slots)
    row: dict[str, Any] = {"card_gib": int(card), "shape": name, "at_once": asked.at_once}
    try:
        row |= measure(int(card) << 30, shape, asked.steps)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(row), flush=True)
    return 1 if "failed" in row else 0


def main(asked: argparse.Namespace, arguments: list[str]) -> int:
    """Run all cases, each in a process of its own, and print their rows as they come."""
    until = time.monotonic() + asked.until
    left, running, failed = list(asked.only), dict[str, subprocess.Popen[str]](), False
    while left or running:
        while left and len(running) < asked.at_once and time.monotonic() < until:
            case = left.pop(0)
            command = [sys.executable, __file__, *arguments, "--case", case]
            # In a group of its own, which ends with it: compilers of a case that is killed would hold its pipe.
            environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
            running[case] = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
            )
        time.sleep(_LOOK_S)
        late = time.monotonic() >= until
        for case, process in list(running.items()):
            if late and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if process.poll() is None and not late:
                continue
            output, _ = process.communicate()
            rows = [line for line in output.splitlines() if line.startswith("{")]
            print(rows[-1] if rows else _no_row(case, "not done in time" if late else "its process died"), flush=True)
            failed |= process.returncode != 0
            del running[case]
        if late:
            for case in left:
                print(_no_row(case, "not begun in time"), flush=True)
            return 1 if failed or left else 0
    return int(failed)


def _no_row(case: str, reason: str) -> str:
    card, name = case.split(":")
    return json.dumps({"card_gib": int(card), "shape": name, "failed": reason})


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return what is asked."""
    parser = argparse.ArgumentParser(description="plan --memory against a GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--until", type=float, default=570.0, help="seconds after which nothing goes on")
    parser.add_argument("--anchor-slots", type=int, default=1024)
    parser.add_argument("--context-slots", type=int, default=8192)
    every = [f"{card}:{name}" for card in CARDS for name in NAMES]
    parser.add_argument("--only", nargs="+", default=every, metavar="CARD:SHAPE")
    parser.add_argument("--case")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asked = parsed(sys.argv[1:])
    sys.exit(run_case(asked.case, asked) if asked.case else main(asked, sys.argv[1:]))
