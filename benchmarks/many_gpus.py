"""Four or eight GPUs in one process: the start of a large run, and the rates of its layouts, each part in one command.

    python benchmarks/many_gpus.py --out OUT --parts PART [PART ...] [--gpus N] [--fp8] [--device cpu]

Every part has a process of its own and less than ten minutes; run them in several calls with the same OUT, whose table
grows. With eight GPUs the layouts are 5+3, 4+4, 6+2 and all (colocated on each), with four 3+1, 2+2 and all.

    prepare  writes 1,095,000 samples with the lengths of a large run, and a folder with Qwen3-8B's random weights
    start    `paceline train` on these, first layout: wall time of each stage; one load of the target against all
    doctor   the probes that are about several GPUs, and the rates that `plan` predicts from
    5+3 ...  samples/s over at least 90 s at the Qwen3-8B shape, against both sides alone; busy and waits of each role
    host     the first layout captured, compiled and, at a tiny shape, eager: what is lost to the shared interpreter
    kill     a target that fails in the middle: the run goes on, and its losses are those of a run without
    plan     `paceline plan --gpus N` and the goals, against what was measured

`--fp8` puts the products of targets and drafters in fp8, in tables of their own (give another OUT). Large files lie in
--work. The status is 1 where a part fails or a bar is missed. `--device cpu` runs all of it at a tiny shape with
stand-ins.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_runs import Broken, apart, devices, run, work_of
from parts import Found, Part, known, main
from plans import predicted, probe, write_target
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from paceline.bench.lengths import run_lengths
from paceline.bench.pipeline import (
    PipelineWork,
    let_go,
    micro_batches,
    pipeline_rows,
    step_alone,
    target_alone,
)
from paceline.bench.shapes import SHAPES
from paceline.bench.sparse import ORIGIN, write_sparse_dataset
from paceline.config import RunSettings
from paceline.data.manifest import tokenizer_fingerprint
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.recipes.bench_pipeline import run_whole
from paceline.recipes.train import train
from paceline.records import UserError
from paceline.target import load as target_load
from paceline.target.load import describe, load_tokenizer, load_trunk

SAMPLES = 1_095_000
FEWEST_S = 90.0  # that a layout is timed
PEER = 50.1  # samples/s on eight H200 that SpecForge published, 550-token samples with 256 anchors
GOALS = {False: {"5+3": 48.0, "best": 100.0}, True: {"best": 140.0}}  # samples/s on eight GPUs, by fp8
LOST = 0.05  # share of the time that the shared interpreter may cost
TRIED = 8  # steps of a side alone
START_STEPS = 3
READS = 1  # of the target's files, however many replicas there are


def layouts(gpus: int) -> dict[str, tuple[int, int]]:
    """Return how many targets and drafters each layout has; with as many of both as GPUs they share them."""
    splits = {8: ((5, 3), (4, 4), (6, 2)), 4: ((3, 1), (2, 2))}.get(gpus, ((gpus - 1, 1),))
    return {**{f"{targets}+{drafters}": (targets, drafters) for targets, drafters in splits}, "all": (gpus, gpus)}


def placed(asked: argparse.Namespace, layout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the devices of targets and of drafters."""
    targets, drafters = layouts(asked.gpus)[layout]
    names = devices(asked.device, asked.gpus)
    return (names, names) if layout == "all" else (names[:targets], names[targets : targets + drafters])


def work_in(asked: argparse.Namespace, layout: str, steps: int) -> PipelineWork:
    """Return a layout's run.

    Raises:
        UserError: fp8 was asked for where stand-ins compute in float32.
    """
    if asked.fp8 and asked.device == "cpu":
        raise UserError("--fp8 needs GPUs, got --device cpu. Leave one of the two out.")
    targets, drafters = placed(asked, layout)
    return work_of(asked.device, targets, drafters, steps=steps, fp8=asked.fp8)


def prepare(asked: argparse.Namespace, found: Found) -> None:
    """Write dataset and target, once for all calls."""
    asked.work.mkdir(parents=True, exist_ok=True)
    samples = SAMPLES if asked.device == "cuda" else 2000
    lengths_N = run_lengths(samples)
    if asked.device == "cpu":
        lengths_N = np.maximum(lengths_N // 32, 8)
    work, folder, whole = work_in(asked, "all", TRIED), asked.work / "target", asked.work / "target" / "whole"
    began = time.perf_counter()
    if not whole.exists():
        size = write_target(work, folder, real=True)
        _save_tokenizer(folder)
        whole.write_text(str(size), encoding="utf-8")
    size = int(whole.read_text(encoding="utf-8"))
    found.add("GiB of the target; seconds", f"{size / 2**30:.2f}; {time.perf_counter() - began:.1f}")
    began = time.perf_counter()
    if not (asked.work / "dataset").exists():
        fingerprint = tokenizer_fingerprint(load_tokenizer(str(folder)))
        origin = replace(ORIGIN, tokenizer=fingerprint, mask_token_id=work.shape.drafter.mask_token_id)
        write_sparse_dataset(asked.work / "dataset.part", lengths_N, masks=True, trainable=origin)
        (asked.work / "dataset.part").rename(asked.work / "dataset")
    found.add("samples; seconds", f"{samples:,}; {time.perf_counter() - began:.1f}")


def _save_tokenizer(folder: Path) -> None:
    """Put a tokenizer beside the weights, as a run wants one: it is held against the dataset's, and reads nothing."""
    words = {f"w{index}": index for index in range(8)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(folder)


def start(asked: argparse.Namespace, found: Found) -> None:
    """Start `paceline train`, make a few steps, and say when each stage was over."""
    with tempfile.TemporaryDirectory(dir=asked.work) as folder:
        _start(start_settings(asked, Path(folder) / "run"), work_in(asked, "all", TRIED).numbers, found)


def _start(settings: RunSettings, dtype: torch.dtype, found: Found) -> None:
    facts = describe(settings.target.model)
    device = settings.pipeline.targets[0]
    began = time.perf_counter()
    trunk = load_trunk(facts, max(settings.drafter.taps), dtype=dtype, device=device)
    let_go([device])
    alone = time.perf_counter() - began
    del trunk
    let_go([device])
    found.add("one target alone, from files in the page cache: seconds", alone)
    reads = _counting(lambda: train(settings, console=Console(json=True)))
    events = list(read_events(Path(settings.run_dir)))
    for event in events:
        if event["event"] == "stage":
            found.add(f"stage {event['name']}: seconds", event["s"])
    roles = [event for event in events if event["event"] == "role"]
    for state in ("compiling", "ready"):
        ends = {event["role"]: event["s"] for event in roles if event["state"] == state}
        found.add(f"seconds of each role until {state}", ends)
    loaded = [event["s"] for event in roles if event["state"] == "compiling" and "target" in event["role"]]
    found.add(f"{len(loaded)} targets side by side: seconds until the last has its weights", max(loaded))
    found.add("times that the target's files are read for them", reads, f"{READS}", reads == READS)
    ready = max(_seconds(event) for event in roles if event["state"] == "ready")
    first = next(_seconds(event) for event in events if event["event"] == "step")
    found.add("from ready to the end of the first step: seconds", first - ready)
    done = next(event for event in events if event["event"] == "trained")
    found.add("recompiles", done["recompiles"], "0", done["recompiles"] == 0)
    found.data |= {"loads": loaded, "alone_s": alone}


def _counting(one: Callable[[], object]) -> int:
    """Return how often a target's weights are read meanwhile."""
    whole, reads = target_load._load, 0

    def counted(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return whole(*given)

    target_load._load = counted
    try:
        one()
    finally:
        target_load._load = whole
    return reads


def _seconds(event: dict[str, Any]) -> float:
    return float(event["t"])


def start_settings(asked: argparse.Namespace, run_dir: Path) -> RunSettings:
    """Return a run on the prepared files, in the first layout."""
    gpu = asked.device == "cuda"
    first = next(iter(layouts(asked.gpus)))
    work, (targets, drafters) = work_in(asked, first, TRIED), placed(asked, first)
    if not gpu:
        targets, drafters = ("cpu",) * len(targets), ("cpu",) * len(drafters)
    shape = SHAPES["qwen3-8b" if gpu else "tiny"]
    drafter = shape.drafter.model_copy(update={"taps": work.target.taps})
    train_settings = {**shape.train_settings(work.dtype).model_dump(), "log_every": 1, "max_steps": START_STEPS}
    return RunSettings.model_validate(
        {
            "run_dir": str(run_dir),
            "target": {"model": str(asked.work / "target"), "dtype": work.dtype},
            "drafter": drafter.model_dump(),
            "data": {
                "dataset": str(asked.work / "dataset"),
                "token_budget": shape.context_slots,
                "max_length": 8192,
                "bad_rows": 0.5,
            },
            "train": {**train_settings, "batches_per_step": len(drafters), "policy": work.policy},
            "pipeline": {"targets": targets, "drafters": drafters},
        }
    )


def rate_of(layout: str, asked: argparse.Namespace, found: Found) -> None:
    """Measure a layout."""
    work = work_in(asked, layout, TRIED)
    row, whole, seconds = _measured(work, FEWEST_S if asked.device == "cuda" else 0.0)
    found.add("samples/s", row["samples_per_s"])
    found.add("real tokens/s", row["tokens_per_s"])
    found.add("seconds that were timed", seconds, f">= {FEWEST_S:g}", seconds >= FEWEST_S if _judged(asked) else None)
    found.add(f"share of the {row['of']}", row["share_of_bound"])
    found.add(f"times SpecForge's published {PEER:g}", row["samples_per_s"] / PEER)
    for role, shares in row["roles"].items():
        waits = {sort: share for sort, share in shares["waits"].items() if share >= 0.005}
        found.add(f"{role}: busy share; waits", f"{shares['busy_share']}; {waits}")
    found.add("most GiB on a GPU; growth meanwhile", f"{row['peak_gib']}; {row['reserved_growth_gib']}")
    found.add("recompiles", whole.recompiles, "0", whole.recompiles == 0)
    goal = GOALS[asked.fp8].get(layout)
    if goal and asked.gpus == 8:
        met = row["samples_per_s"] >= goal if _judged(asked) else None
        found.add("the layout's goal, samples/s", row["samples_per_s"], f">= {goal:g}", met)
    found.data |= {"samples_per_s": row["samples_per_s"], "row": row}


def _measured(work: PipelineWork, least_s: float) -> tuple[dict[str, Any], Any, float]:
    """Return the whole run's row, what it told, and for how long it was timed: at least `least_s`, as it is no faster
    than both sides alone."""
    batches = micro_batches(work)
    target_s = target_alone(work, batches)
    let_go(work.devices)
    step_s = step_alone(work, batches)
    let_go(work.devices)
    a, b = len(work.targets) / target_s, len(work.drafters) / step_s
    bound = 1 / (1 / a + 1 / b) if work.colocated else min(a, b)  # micro-batches a second
    work = replace(work, steps=max(TRIED, 2 + int(least_s * bound / work.step_batches)))
    whole, warm = run_whole(work, batches, Console(json=True))
    stamps = whole.stamps[warm - 1 : warm + work.steps]
    return pipeline_rows(work, batches, target_s, step_s, whole, warm)[-1], whole, stamps[-1] - stamps[0]


class Interpreter:
    """A thread that asks for the interpreter a thousand times a second and keeps how long it waits for it."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Interpreter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            began = time.perf_counter()
            time.sleep(1e-3)
            self._late.append(time.perf_counter() - began - 1e-3)

    @property
    def late_ms(self) -> tuple[float, float]:
        """The median and the 99th percentile, in milliseconds; the system's own timer is a part of both."""
        return tuple(round(1e3 * float(part), 3) for part in np.percentile(self._late, (50, 99)))  # type: ignore


def host(asked: argparse.Namespace, found: Found) -> None:
    """Compare how far the first layout is from both sides alone, by how steps run.

    Eager only at the tiny shape: attention is dense there, and at Qwen3-8B's no GPU has room for it.
    """
    layout = next(iter(layouts(asked.gpus)))
    work = work_in(asked, layout, TRIED)
    tiny = replace(work, name="tiny", fp8=False)
    runs = [(work, "captured"), (work, "compiled"), (tiny, "captured"), (tiny, "eager")]
    for one, policy in runs if _judged(asked) else [(tiny, "eager")]:
        with Interpreter() as interpreter:
            row, _, _ = _measured(replace(one, policy=policy), 20.0 if _judged(asked) else 0.0)  # type: ignore[arg-type]
        lost, name = 1 - row["share_of_bound"], f"{layout} {one.name} {policy}"
        judged = one is work and policy == "captured" and _judged(asked)
        found.add(f"{name}: samples/s", row["samples_per_s"])
        found.add(f"{name}: share lost", lost, f"<= {LOST:g}" if one is work else "", lost <= LOST if judged else None)
        found.add(f"{name}: ms until a thread gets the interpreter, median and 99 %", interpreter.late_ms)
    found.notes.append("host: there is no run with a process a role to compare with, all roles are threads of one.")


def kill(asked: argparse.Namespace, found: Found) -> None:
    """Let a target fail in the middle of a run."""
    work = work_in(asked, next(iter(layouts(asked.gpus))), TRIED)
    whole, _ = run(work)
    with Broken("raise", work.targets[0], 3):
        broken, _ = run(work)
    told = [event for event in broken.faults if event["event"] == "replica_failed"]
    found.add("what is told", [event["message"][:120] for event in told], "one replica", len(told) == 1)
    found.add("steps", len(broken.losses), f"{len(whole.losses)}", len(broken.losses) == len(whole.losses))
    off = apart(whole.losses, broken.losses)
    found.add("losses against a run without, relative", off, "0", off == 0)


def plan(asked: argparse.Namespace, found: Found) -> None:
    """Hold predictions and goals against what was measured."""
    work, names = work_in(asked, "all", TRIED), layouts(asked.gpus)
    measured = {name: known(asked.out, name).get("samples_per_s") for name in names}
    said = {}
    for name, (targets, drafters) in names.items():
        with tempfile.TemporaryDirectory() as folder:
            told = predicted(work, Path(folder), asked.out / "machine.json", gpus=(asked.gpus,), per_step=drafters)
            splits = {(one["targets"], one["drafters"]): one["samples_per_s"] for one in told[asked.gpus]}
            said[name] = splits[targets, drafters]
    for name, rate in said.items():
        there = measured[name]
        off = f"{100 * (rate / there - 1):+.1f} %" if there else "not measured"
        found.add(f"{name}: predicted samples/s; off by", f"{rate:.4g}; {off}")
    rates = {name: rate for name, rate in measured.items() if rate}
    if len(rates) == len(names):
        best, guess = (max(some, key=lambda name: some[name]) for some in (rates, said))
        found.add("the best layout; predicted", f"{best}; {guess}", "equal", best == guess if _judged(asked) else None)
        goal = GOALS[asked.fp8]["best"] if asked.gpus == 8 else None
        met = rates[best] >= goal if goal and _judged(asked) else None
        found.add("the best layout's samples/s", rates[best], f">= {goal:g}" if goal else "", met)


def _judged(asked: argparse.Namespace) -> bool:
    return bool(asked.device == "cuda")


def doctor(asked: argparse.Namespace, found: Found) -> None:
    """Run the probes of several GPUs and keep the rates."""
    probe(asked.device, asked.out / "machine.json", found)


def parts_of(gpus: int) -> dict[str, Part]:
    """Return all parts for so many GPUs, in their order."""
    return {
        "prepare": Part(prepare, 560),
        "start": Part(start, 560),
        "doctor": Part(doctor, 300),
        **{name: Part(partial(rate_of, name), 560) for name in layouts(gpus)},
        "host": Part(host, 560),
        "kill": Part(kill, 560),
        "plan": Part(plan, 120),
    }


def arguments() -> tuple[argparse.ArgumentParser, int]:
    """Return the parser, and how many GPUs the command line asks for: by default all that there are."""
    assert __doc__ is not None
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(here, 4), help="default: all, and four at least")
    parser.add_argument("--fp8", action="store_true", help="products of targets and drafters in fp8")
    work = Path(tempfile.gettempdir()) / "paceline-many-gpus"
    parser.add_argument("--work", type=Path, default=work, help="folder of dataset and target; default: %(default)s")
    some = argparse.ArgumentParser(add_help=False)
    some.add_argument("--gpus", type=int, default=max(here, 4))
    return parser, some.parse_known_args()[0].gpus


if __name__ == "__main__":
    asked_parser, count = arguments()
    sys.exit(main(__file__, f"{count} GPUs", parts_of(count), asked_parser, lambda asked: asked.gpus))
