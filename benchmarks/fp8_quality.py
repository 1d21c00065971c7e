"""Whether training in fp8 costs acceptance: SmolLM2-135M-Instruct, bfloat16 against fp8, over seeds, on one GPU.

    python benchmarks/fp8_quality.py OUT --prompts gsm8k_train.jsonl --held-out gsm8k_test.jsonl

SmolLM2 answers questions three times each, 20,000 completions in all (`--completions` takes a folder that `paceline
generate` made). A drafter is trained on them with each of three seeds, once with everything in bfloat16 and once with
the products of drafter, frozen head and target in fp8: equally many steps, along a cosine, as many as fit into
`--seconds` of training in the slower arm. Then the target, in bfloat16 for all of them, decodes held-out questions with
each drafter, greedily. Printed, and written to OUT/result.json as soon as a pair of drafters is done, is the acceptance
length tau of every drafter, the difference fp8 - bfloat16 of each question's own, averaged over seeds, with the 95 %
interval of a paired bootstrap over questions, and a verdict (fp8_verdict.py): the same, lower, higher or undecided.

What is finished is not done again, and a drafter that is stopped goes on, so the work can be split over several calls:
`--until` begins no other drafter, `--within` and SIGTERM stop those under way. Several drafters are trained side by
side (`--at-once`): the target is small. `--control` trains the second arm in bfloat16, too: what is left then is noise.
The status is 1 where something is not done.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fp8_verdict import ARMS, compare, table

from paceline.checkpoint.folder import write_whole
from paceline.checkpoint.store import saved_steps
from paceline.config import CheckpointSettings, DataSettings, RunSettings, TargetSettings, TrainSettings
from paceline.data.prompt_file import Messages
from paceline.drafter.float8 import halves8, linear8
from paceline.observe.console import Console
from paceline.pipeline import threads
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.generate import generate_completions
from paceline.recipes.generate_asked import Asked
from paceline.recipes.init import drafter_for, pipeline_for
from paceline.recipes.mask_token import choose_mask_token
from paceline.recipes.prepare import prepare_dataset
from paceline.recipes.train import train
from paceline.runtime.profile import cache_folder
from paceline.target.load import describe
from paceline.target.replica import Pace
from paceline.target.smollm2 import fetch_smollm2
from paceline.train import step as step_module

GRACE_S = 30.0  # in which a drafter that is stopped saves
SAVES = 4  # checkpoints while a drafter is trained
SAMPLES = 3  # answers to a question
LONGEST = 768  # tokens of a question and its answer that is trained on
TRIAL_STEPS = 150  # of which the second half is timed
SHAPE = {"block_size": 8, "layers": 4}
TRAIN = {"context_slots": 4096, "anchor_slots": 768, "anchors_per_sample": 48, "lr": 1e-3, "logits_mib": 1024}
TINY_SHAPE = {"block_size": 8, "layers": 1, "taps": (1, 14, 27)}
TINY_TRAIN = {"context_slots": 1024, "anchor_slots": 32, "anchors_per_sample": 8, "lr": 1e-3, "logits_mib": 64}


def main() -> None:
    """Do what is missing and print the result."""
    asked = _arguments()
    out = asked.out
    out.mkdir(parents=True, exist_ok=True)
    if asked.arm:
        _one(asked)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that drafters under way are told
    _check_same(asked)
    folder = fetch_smollm2(cache_folder(), _say)
    if not (out / "dataset").exists():
        _make_dataset(asked, folder)
    steps = asked.steps or _steps(asked)
    names = [f"{arm}-{seed}" for seed in range(asked.seeds) for arm in ARMS]  # pairs first, should the time run out
    try:
        left = [name for name in names if not _done(out / name)]
        _side_by_side(asked, left, steps, on_done=lambda: _tell(asked, steps, show=False))
    finally:
        _tell(asked, steps, show=True)
    if left := [name for name in names if not _done(out / name)]:
        sys.exit(f"{', '.join(left)} not done: run the same command again")


def _tell(asked: argparse.Namespace, steps: int, *, show: bool) -> None:
    """Write, and show, what comes of the pairs that are done."""
    out = asked.out
    seeds = [seed for seed in range(asked.seeds) if all(_done(out / f"{arm}-{seed}") for arm in ARMS)]
    if not seeds:
        return
    result = compare([[_read(out / f"{arm}-{seed}" / "evaluation.json") for seed in seeds] for arm in ARMS], seeds)
    result |= {"steps": steps, "control": asked.control, "gpu": _gpu(asked.device), "torch": torch.__version__}
    result["trained"] = {f"{arm}-{seed}": _trained(out / f"{arm}-{seed}") for seed in seeds for arm in ARMS}
    write_whole(out / "result.json", json.dumps(result, indent=2) + "\n")
    if show:
        print(table(result), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for everything; what is finished there stays")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of questions that are trained on")
    parser.add_argument("--held-out", type=Path, required=True, help="JSONL of questions that are measured on")
    parser.add_argument("--completions", type=Path, help="folder of `paceline generate`, instead of OUT/completions")
    parser.add_argument("--rows", type=int, default=20_000, help="completions that are made")
    parser.add_argument("--questions", type=int, default=512, help="held-out questions")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of a measured answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest training of a drafter")
    parser.add_argument("--steps", type=int, help="of training, instead of as many as fit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="drafters that are trained side by side")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which no other drafter is begun")
    parser.add_argument("--within", type=float, default=540.0, help="seconds after which those under way are stopped")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--control", action="store_true", help="bfloat16 in both arms")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # a small drafter, to try the script
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.began = time.monotonic()
    return asked


def _check_same(asked: argparse.Namespace) -> None:
    """Refuse a folder whose results were asked for otherwise."""
    names = ("rows", "questions", "max_new_tokens", "seconds", "steps", "control", "tiny")
    now, known = {name: getattr(asked, name) for name in names}, asked.out / "asked.json"
    was = json.loads(known.read_text()) if known.is_file() else now
    if was != now:
        sys.exit(f"{asked.out} was made with {was}, and {now} is asked for: take another folder.")
    write_whole(known, json.dumps(now) + "\n")


def _make_dataset(asked: argparse.Namespace, folder: Path) -> None:
    """Generate completions, or go on with them, and prepare them."""
    completions = asked.completions
    if completions is None:
        completions = asked.out / "completions"
        how = Asked(
            str(folder),
            samples=SAMPLES,
            temperature=0.8,
            devices=[asked.device],
            rows=16 if asked.tiny else 1024,
            max_new_tokens=24 if asked.tiny else 512,
            dtype="float32" if asked.device == "cpu" else "bfloat16",
        )
        questions = _questions(asked.prompts, -(-asked.rows // SAMPLES))
        made = generate_completions(questions, completions, how, console=Console(json=False))
        _say(f"{made['rows']:,} completions, {made['tokens_generated']:,} tokens")
    prepared = prepare_dataset(
        [completions],
        asked.out / "dataset",
        target=str(folder),
        revision=None,
        max_length=LONGEST,
        on_long="truncate",
        mask_token_id=choose_mask_token(describe(str(folder)), None),
        workers=min(8, os.cpu_count() or 1),
        on_note=_say,
    )
    _say(f"{prepared['rows']:,} rows, {prepared['tokens']:,} tokens")


def _questions(path: Path, count: int) -> list[Messages]:
    """Return the first questions of a file, each a line with `question` or `prompt`."""
    with path.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
    if len(rows) < count:
        sys.exit(f"{count:,} questions are asked for, and {path} has {len(rows):,}: ask for fewer.")
    return [[{"role": "user", "content": row.get("question") or row["prompt"]}] for row in rows]


def _settings(asked: argparse.Namespace, run: Path, arm: str, seed: int, steps: int) -> RunSettings:
    """Return the settings of a drafter's training. Nothing but the seed and fp8 differs between two."""
    folder = str(fetch_smollm2(cache_folder(), _say))
    facts = describe(folder)
    mask = choose_mask_token(facts, None)
    fp8 = "on" if arm == "fp8" and not asked.control and asked.device != "cpu" else "off"
    gpus = [] if asked.device == "cpu" else [asked.device]
    more = {"seed": seed, "max_steps": steps, "epochs": 1000, "schedule": "cosine", "fp8": fp8}
    more["policy"] = "captured" if gpus else "eager"
    sizes = TINY_TRAIN if asked.tiny else TRAIN
    return RunSettings(
        run_dir=str(run),
        target=TargetSettings.model_validate({"model": folder, "fp8": fp8}),
        drafter=drafter_for(facts, mask_token_id=mask, **(TINY_SHAPE if asked.tiny else SHAPE)),
        data=DataSettings(dataset=str(asked.out / "dataset"), max_length=LONGEST, token_budget=sizes["context_slots"]),
        train=TrainSettings.model_validate(sizes | more),
        pipeline=pipeline_for(gpus),
        checkpoint=CheckpointSettings(every_steps=max(1, steps // SAVES), grace_s=GRACE_S / 2),
    )


def _one(asked: argparse.Namespace) -> None:
    """Train one drafter and let it draft; or, as a trial, train it for some steps alone."""
    name = asked.trial or f"{asked.arm}-{asked.seed}"
    run, console = asked.out / name, Console(json=True)
    if not (run / "drafter").exists():
        settings = _settings(asked, run, asked.arm, asked.seed, asked.steps)
        with _stand_in(asked.arm == "fp8" and asked.device == "cpu" and not asked.control):
            trained = train(settings, console=console, resume=bool(saved_steps(run)))
        write_whole(run / "trained.json", json.dumps(trained, indent=2, default=str) + "\n")
    if asked.trial:
        return
    evaluate(
        run,
        _questions(asked.held_out, asked.questions),
        Asking(asked.max_new_tokens),
        device=asked.device,
        dtype="float32" if asked.device == "cpu" else "bfloat16",
        rows=min(asked.questions, 256),
        timed_prompts=0,
        untrained_prompts=0,
        console=console,
    )


@contextmanager
def _stand_in(wanted: bool) -> Iterator[None]:
    """Let drafter and target compute in e4m3 on a CPU, eagerly, which settings refuse: the script's own rehearsal."""
    if not wanted:
        yield
        return
    joined, pace_of = step_module.Joined, threads.pace_of
    step_module.Joined = lambda shape, leaves: joined(shape, leaves, linear8, halves8)  # type: ignore[assignment,misc]
    threads.pace_of = lambda *_: Pace(fast=True, compiled=False, fp8=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        step_module.Joined, threads.pace_of = joined, pace_of  # type: ignore[misc,attr-defined]


def _steps(asked: argparse.Namespace) -> int:
    """Return the steps that fit into the seconds with as many drafters side by side as later; measured once."""
    known = asked.out / "steps.json"
    if known.is_file():
        return int(json.loads(known.read_text())["steps"])
    trials = [f"trial-{ARMS[at % 2]}-{at}" for at in range(max(2, asked.at_once))]
    _side_by_side(asked, trials, TRIAL_STEPS, trial=True)
    if failed := [name for name in trials if not (asked.out / name / "drafter").exists()]:
        sys.exit(f"{', '.join(failed)} not done, so steps cannot be counted: give --steps, or run it again")
    seconds = {name: _seconds_a_step(asked.out / name) for name in trials}
    steps = max(1, int(asked.seconds / max(seconds.values())))
    write_whole(known, json.dumps({"steps": steps, "seconds_a_step": seconds}, indent=2) + "\n")
    _say(f"{steps:,} steps fit into {asked.seconds:g} s")
    return steps


def _seconds_a_step(run: Path) -> float:
    """Return the seconds a step took over the second half of a trial."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    since = [event["since"] for event in events if event["event"] == "step"]
    later = since[len(since) // 2 :]
    return float(sum(part["s"] for part in later) / sum(part["steps"] for part in later))


def _side_by_side(
    asked: argparse.Namespace,
    names: Sequence[str],
    steps: int,
    *,
    trial: bool = False,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Run each in a process of its own, so many at once; what fails is told with the end of its output."""
    waiting, running = list(names), dict[str, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < asked.at_once and _seconds(asked) < min(asked.until, asked.within):
                name = waiting.pop(0)
                running[name] = _start(asked, name, steps, trial=trial)
            if not running or _seconds(asked) >= asked.within:
                return
            time.sleep(0.5)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                status = running.pop(name).returncode
                _say(f"{name} {'done' if status == 0 else f'failed with status {status}'}, {_seconds(asked):.0f} s")
                on_done()
                if status:
                    print((asked.out / f"{name}.txt").read_text(errors="replace")[-3000:], file=sys.stderr, flush=True)
    finally:
        _stop(asked.out, running)


def _stop(out: Path, running: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """Let drafters under way save what they have and end, and say how far they were."""
    told = {name: (out / f"{name}.txt").read_text(errors="replace").strip().splitlines() for name in running}
    for process in running.values():
        process.terminate()
    until = time.monotonic() + GRACE_S
    for name, process in running.items():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _say(f"{name} stopped; its last line was: {told[name][-1][:200] if told[name] else ''}")


def _seconds(asked: argparse.Namespace) -> float:
    return time.monotonic() - float(asked.began)


def _start(asked: argparse.Namespace, name: str, steps: int, *, trial: bool) -> "subprocess.Popen[bytes]":
    arm, seed = name.split("-")[1:] if trial else name.split("-")
    given = [str(asked.out), "--prompts", str(asked.prompts), "--held-out", str(asked.held_out)]
    given += ["--questions", str(asked.questions), "--max-new-tokens", str(asked.max_new_tokens)]
    given += ["--device", asked.device, "--arm", arm, "--seed", seed, "--steps", str(steps)]
    given += [flag for flag, on in (("--control", asked.control), ("--tiny", asked.tiny)) if on]
    given += ["--trial", name] if trial else []
    # Idle threads of one process must not take the cores from the others.
    threads_each = str(max(1, (os.cpu_count() or 1) // asked.at_once))
    environment = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": threads_each, **os.environ}
    command = [sys.executable, __file__, *given]
    # In a group of its own: a second SIGTERM, sent to all, would let it end without saving.
    with (asked.out / f"{name}.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)


def _done(run: Path) -> bool:
    return (run / "evaluation.json").is_file()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _trained(run: Path) -> dict[str, Any]:
    """Return how fast a drafter was trained; nothing where the process ended between its last step and this."""
    whole = _read(run / "trained.json") if (run / "trained.json").is_file() else {}
    return {name: whole.get(name) for name in ("train_s", "loss", "recompiles", "rejected_steps")}


def _gpu(device: str) -> str | None:
    return None if device == "cpu" else torch.cuda.get_device_name(device)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
