"""Two GPUs in one process, at the Qwen3-8B shape with random weights: what they can do, and how fast a run is on them.

    python benchmarks/two_gpus.py --out OUT [--parts PART ...] [--device cpu]

Parts, each in a process of its own that is ended at its limit; what has not begun within ten minutes is left out:

    doctor  the probes of `paceline doctor` that are about several GPUs, and the rates that `plan` predicts from
    one     target and drafter share the first GPU, two micro-batches a step: what the others are compared with
    apart   the target on the first, the drafter on the second: rate against both sides alone, losses against `one`,
            how features travel, and a timeline of a few steps
    both    target and drafter on each, the same steps: rate and losses against `one`, and the bits of both ranks
    fault   an error and a full memory in a target replica, and an error in a drafter rank, at a small shape
    plan    `paceline plan --gpus` against what was measured

The table is printed as it comes and lies in OUT/table.md and OUT/table.json. The status is 1 where a part fails or a
bar is missed. `--device cpu` runs all of it at a tiny shape with two stand-ins: rates are not judged there.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_runs import (
    Broken,
    RankBroken,
    Window,
    apart,
    at_once,
    busy_bins,
    copied,
    devices,
    error_of,
    feature_bytes,
    read_trace,
    run,
    same_weights,
    timeline,
    work_of,
)
from parts import Found, Part, known, main
from plans import predicted, probe

from paceline.bench.pipeline import micro_batches
from paceline.observe.console import Console
from paceline.recipes.bench_pipeline import sides_and_whole

BATCHES = 2  # micro-batches of a step in all layouts, so their losses are those of the same steps
PROFILED = (2, 5)  # behind which steps the profiler starts and ends
FEW, MANY = 16, 94  # steps that are timed; with two of warm-up and slots to fill, MANY are more than 100 in all
BF16_NOISE, SUM_NOISE = 2e-3, 1e-3  # relative, of a loss: features on another GPU; gradients summed in another order
HOST_SHARE = 0.01  # of the features' bytes, that may cross between host and GPUs: ids, positions, reports
ENDS_S = 15.0  # from a rank's error to the end of the run: the grace of roles, and what is saved


def doctor(asked: argparse.Namespace, found: Found) -> None:
    """Run the probes of several GPUs and keep the rates."""
    probe(asked.device, asked.out / "machine.json", found)


def one(asked: argparse.Namespace, found: Found) -> None:
    """Run on one device."""
    (first, _), steps = devices(asked.device, 2), _steps(asked, FEW)
    whole, rate = run(work_of(asked.device, [first], [first], steps=steps, per_step=BATCHES))
    found.add("samples/s", rate)
    found.add("recompiles", whole.recompiles, "0", whole.recompiles == 0)
    found.data |= {"samples_per_s": rate, "losses": whole.losses}


def disaggregated(asked: argparse.Namespace, found: Found) -> None:
    """Run with the target on one device and the drafter on the other."""
    (first, second), steps = devices(asked.device, 2), _steps(asked, FEW)
    work = work_of(asked.device, [first], [second], steps=steps, per_step=BATCHES)
    trace = asked.out / "apart.trace.json"
    window = Window(*PROFILED, trace)
    rows, whole = sides_and_whole(work, Console(json=True), more_warm_up=PROFILED[1], on_step=window)
    target, step, both = rows
    share, gpu = both["share_of_bound"], asked.device == "cuda"
    found.add("target alone, samples/s", target["samples_per_s"])
    found.add("drafter alone, samples/s", step["samples_per_s"])
    found.add("whole run, samples/s", both["samples_per_s"])
    found.add("share of the slower side", share, ">= 0.97", share >= 0.97 if gpu else None)
    found.add("busy and waits", both["roles"])
    found.add("recompiles", whole.recompiles, "0", whole.recompiles == 0)
    off = apart(known(asked.out, "one").get("losses", []), whole.losses)
    found.add("losses against one device, relative", off, f"<= {BF16_NOISE:g}", off <= BF16_NOISE)
    found.data |= {"samples_per_s": both["samples_per_s"], "losses": whole.losses, "rows": rows}
    _tell_window(found, trace, feature_bytes(micro_batches(work)), gpu)


def _tell_window(found: Found, trace: Path, size: int, gpu: bool) -> None:
    """Say how features of `size` bytes travelled in the steps that were profiled, and who worked when."""
    events = read_trace(trace)
    copies, bins = copied(events), busy_bins(events)
    batches = (PROFILED[1] - PROFILED[0]) * BATCHES
    moved = sum(nbytes == size for kind in ("PtoP", "DtoD") for nbytes in copies.get(kind, []))
    host = sum(sum(copies.get(kind, [])) for kind in ("DtoH", "HtoD"))
    share = host / (batches * size)
    # At both ends of the window a copy may lie outside.
    found.add("features copied from GPU to GPU", moved, f">= {batches - 1}", moved >= batches - 1 if gpu else None)
    found.add("bytes between host and GPUs over those of features", share, f"<= {HOST_SHARE:g}", _at_most(share, gpu))
    if bins:
        found.add("time in which both GPUs compute", at_once(bins))
        found.notes.append(f"apart, {PROFILED[1] - PROFILED[0]} steps:\n{timeline(bins)}")
    found.data |= {"copies": {kind: [len(sizes), sum(sizes)] for kind, sizes in copies.items()}}


def _at_most(share: float, gpu: bool) -> bool | None:
    return share <= HOST_SHARE if gpu else None


def colocated(asked: argparse.Namespace, found: Found) -> None:
    """Run with target and drafter on both devices."""
    two, gpu = devices(asked.device, 2), asked.device == "cuda"
    work = work_of(asked.device, two, two, steps=_steps(asked, MANY), per_step=BATCHES)
    whole, rate = run(work)
    alone = known(asked.out, "one")
    times = rate / alone["samples_per_s"] if alone else float("nan")
    found.add("samples/s", rate)
    found.add("times one device", times, ">= 1.9", times >= 1.9 if gpu else None)
    found.add("recompiles", whole.recompiles, "0", whole.recompiles == 0)
    off = apart(alone.get("losses", []), whole.losses)
    found.add("losses against one rank with both micro-batches, relative", off, f"<= {SUM_NOISE:g}", off <= SUM_NOISE)
    same = same_weights(whole)
    found.add(f"weights of both ranks are equal after {len(whole.losses)} steps", same, "the same bits", same)
    found.data |= {"samples_per_s": rate, "losses": whole.losses}


def fault(asked: argparse.Namespace, found: Found) -> None:
    """Break roles of one device, at a small shape, and see what becomes of the run."""
    first, second = devices(asked.device, 2)
    work = work_of(asked.device, [first, second], [second], steps=8, shape="tiny")
    whole, _ = run(work)
    for how, words in (("raise", "device lost"), ("oom", "out of memory")):
        with Broken(how, first, 3):
            broken, _ = run(work)
        told = [event for event in broken.faults if event["event"] == "replica_failed"]
        named = [f"{event['role']} on {event['device']}: {event['message']}"[:120] for event in told]
        fine = len(told) == 1 and told[0]["device"] == first and words in told[0]["message"]
        found.add(f"a target replica, {how}: what is told", named, f"names it and {words}", fine)
        same = broken.losses == whole.losses
        found.add(f"a target replica, {how}: the run completes with the losses of a run without", same, "True", same)
    began = time.monotonic()
    with RankBroken(second, 5) as rank:
        error = error_of(lambda: run(work))
    seconds = time.monotonic() - rank.raised_at if rank.raised_at else time.monotonic() - began
    text = str(error)
    fine = all(part in text for part in ("drafter rank 0", second, "device lost"))
    found.add("a drafter rank raises: what ends the run", text[:200], "names rank, device and cause", fine)
    found.add("a drafter rank raises: seconds to the end", seconds, f"<= {ENDS_S:g}", seconds <= ENDS_S)


def plan(asked: argparse.Namespace, found: Found) -> None:
    """Hold what `paceline plan` predicts against what was measured."""
    work = work_of(asked.device, ["-"], ["-"], steps=8)
    with tempfile.TemporaryDirectory() as folder:
        told = predicted(work, Path(folder), asked.out / "machine.json", gpus=(1, 2), per_step=BATCHES)
    measured = {name: known(asked.out, name).get("samples_per_s") for name in ("one", "apart", "both")}
    splits = {"one": told[1][0], "apart": told[2][0], "both": told[2][1]}
    compare_plan(found, {name: split["samples_per_s"] for name, split in splits.items()}, measured, asked.device)


def compare_plan(found: Found, said: dict[str, float], measured: dict[str, Any], device: str) -> None:
    """Add a row a layout, and whether the better one of two was predicted."""
    for name, rate in said.items():
        there = measured[name]
        off = f"{100 * (rate / there - 1):+.1f} %" if there else "not measured"
        found.add(f"{name}: predicted samples/s; off by", f"{rate:.4g}; {off}")
    if measured["apart"] and measured["both"]:
        better = max(("apart", "both"), key=lambda name: measured[name])
        predicted_better = max(("apart", "both"), key=lambda name: said[name])
        right = better == predicted_better
        found.add("the better layout; predicted", f"{better}; {predicted_better}", "equal", _judge(right, device))


def _judge(right: bool, device: str) -> bool | None:
    return right if device == "cuda" else None


def _steps(asked: argparse.Namespace, count: int) -> int:
    return count if asked.device == "cuda" else 8


PARTS = {
    "doctor": Part(doctor, 150),
    "one": Part(one, 150),
    "apart": Part(disaggregated, 200),
    "both": Part(colocated, 220),
    "fault": Part(fault, 120),
    "plan": Part(plan, 60),
}

if __name__ == "__main__":
    assert __doc__ is not None
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.exit(main(__file__, "Two GPUs", PARTS, arguments, lambda asked: 2))
