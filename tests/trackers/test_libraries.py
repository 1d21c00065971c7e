"""What the real libraries keep of a run, read back with their own readers, equals its events."""

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.events import EventLog
from paceline.observe.reading import read_events
from paceline.observe.trackers import TITLES, Trackers
from paceline.recipes.train import train

pytestmark = pytest.mark.trackers

NAMES = tuple(TITLES)
SETTINGS = {"run_dir": "runs/näme", "train": {"lr": 0.004, "epochs": 5, "betas": [0.9, 0.95], "gamma": None}}


def read(name: str, run: Path) -> dict[str, Any]:
    """Return what a library has of a run."""
    command = [sys.executable, str(Path(__file__).with_name("readers.py")), name, str(run / "trackers")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_part(run: Path, names: tuple[str, ...], first: int, last: int, end: str, settings: dict[str, Any]) -> None:
    """Write a part of a run's events, with trackers that follow it."""
    draw = random.Random(first)
    lines: list[str] = []
    with EventLog(run, tell=lines.append) as log:
        trackers = Trackers(run, names, events=log, tell=lines.append)
        log.follow(trackers.follow)
        log.write("resumed" if first else "started", steps=first, settings=settings)
        for step in range(first, last):
            gpus = [{"device": "cuda:1", "name": "x", "memory_used_bytes": draw.randrange(2**36)}]
            log.write("sample", s=5.0, roles=[], gpus=gpus, host_bytes=draw.randrange(2**33))
            since = {"steps": 10, "s": 2.5, "tokens": draw.randrange(9000), "blocks": draw.randrange(900)}
            log.write(
                "step",
                step=step,
                loss=float("nan") if step == 7 else draw.random(),
                acceptance=draw.random(),
                lr=draw.random(),
                grad_norm=float("inf") if step == 7 else draw.random(),
                accepted_K=[draw.randrange(10) for _ in range(3)],
                available_K=[10, 10, 0],
                since=since,
            )
        counts = {"accepted_K": [draw.randrange(10) for _ in range(3)], "available_K": [10, 10, 10]}
        log.write("held_out", steps=last, loss=draw.random(), acceptance=draw.random(), **counts)
        slots = [draw.random() for _ in range(3)]
        log.write("evaluated", steps=last - 1, tau=draw.random(), tau_pooled=draw.random(), slot_acceptance_K=slots)
        log.write(end, message="because")
        trackers.end(time.monotonic() + 120)
    assert lines == []


def expected(run: Path) -> dict[str, dict[int, float]]:
    """Return every number by name and step, as the events have them; what was told first counts."""
    found: dict[str, dict[int, float]] = {}
    memory: dict[str, float] = {}
    for event in read_events(run):
        numbers: dict[str, float] = {}
        match event["event"]:
            case "sample":
                memory = {"memory/host_gib": event["host_bytes"] / 2**30}
                memory["memory/cuda1_gib"] = event["gpus"][0]["memory_used_bytes"] / 2**30
            case "step":
                steps = event["step"] + 1
                numbers = {f"train/{key}": event[key] for key in ("loss", "acceptance", "lr", "grad_norm")}
                for slot, (got, of) in enumerate(zip(event["accepted_K"], event["available_K"], strict=True), 1):
                    numbers |= {f"train_slots/{slot:02d}": got / of} if of else {}
                if "since" in event:
                    for key in ("tokens", "blocks"):
                        numbers[f"rate/{key}_per_s"] = event["since"][key] / event["since"]["s"]
                numbers |= memory
            case "held_out":
                steps = event["steps"]
                numbers = {f"held_out/{key}": event[key] for key in ("loss", "acceptance")}
                for slot, (got, of) in enumerate(zip(event["accepted_K"], event["available_K"], strict=True), 1):
                    numbers |= {f"held_out_slots/{slot:02d}": got / of} if of else {}
            case "evaluated":
                steps = event["steps"]
                numbers = {f"evaluated/{key}": event[key] for key in ("tau", "tau_pooled")}
                numbers |= {f"evaluated_slots/{k:02d}": share for k, share in enumerate(event["slot_acceptance_K"], 1)}
        for name, number in numbers.items():
            found.setdefault(name, {}).setdefault(steps, number)
    return found


def assert_kept(name: str, run: Path) -> dict[str, Any]:
    """The library has exactly the numbers of the events, each once; TensorBoard in single precision."""
    kept, wanted = read(name, run), expected(run)
    assert kept["numbers"].keys() == wanted.keys()
    for key, points in kept["numbers"].items():
        steps = [step for step, _ in points]
        assert sorted(steps) == sorted(wanted[key]), key
        for step, value in points:
            number = wanted[key][step]
            if name == "mlflow" and math.isinf(number):
                number = sys.float_info.max  # all that its tables hold
            same = np.float32(number) == np.float32(value) if name == "tensorboard" else number == value
            assert same or (math.isnan(number) and math.isnan(value)), (key, step)
    return kept


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_on_is_one_run_there_with_each_step_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cwd = tmp_path / "näme", tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    write_part(run, (name,), 0, 12, "interrupted", SETTINGS)
    first = assert_kept(name, run)
    assert first["outcome"] == "interrupted"
    changed = {**SETTINGS, "train": SETTINGS["train"] | {"lr": 0.002}}  # type: ignore[operator]
    write_part(run, (name,), 9, 20, "trained", changed)
    kept = assert_kept(name, run)
    assert kept["outcome"] == "finished"
    assert kept["runs"] == 1
    lr = kept["tags"]["resumed.train.lr"] if name == "mlflow" else kept["settings"]["train.lr"]
    assert float(lr) == (0.004 if name == "tensorboard" else 0.002)  # it shows those that a run began with
    assert kept["settings"]["run_dir"] == "runs/näme"
    assert kept["settings"]["train.betas"] == "[0.9, 0.95]"
    assert list(cwd.iterdir()) == [], "a run writes only into its own folder"


def test_a_tracker_that_is_added_later_is_told_what_was_before(tmp_path: Path) -> None:
    write_part(tmp_path, (), 0, 5, "interrupted", SETTINGS)
    write_part(tmp_path, ("mlflow",), 5, 8, "failed", SETTINGS)
    assert assert_kept("mlflow", tmp_path)["outcome"] == "failed"


def test_a_real_run_is_kept_by_all_of_them_at_once(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> None:
    dataset, run = str(write_dataset(random_rows)), tmp_path / "run"
    tree = {
        "run_dir": str(run),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": dataset, "token_budget": 120, "align": 8, "buckets": 3},
        "train": {"max_steps": 6, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4, "log_every": 1},
        "observe": {"trackers": list(NAMES)},
    }
    train(RunSettings.model_validate(tree), console=Console(json=True))
    assert sum(event["event"] == "step" for event in read_events(run)) == 6
    assert [event for event in read_events(run) if event["event"] == "tracker_failed"] == []
    for name in NAMES:
        kept = assert_kept(name, run)
        assert kept["outcome"] == "finished"
        assert float(kept["settings"]["train.max_steps"]) == 6


@pytest.mark.parametrize(
    ("key", "why"),
    [("", "No API key configured"), (40 * "a", "it did not finish in time")],
    ids=["no key", "no network"],
)
def test_an_account_or_host_that_is_not_there_costs_the_tracker_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, why: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key might lie
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    lines: list[str] = []
    with EventLog(tmp_path / "run") as log:
        trackers = Trackers(tmp_path / "run", ("wandb",), events=log, tell=lines.append)
        log.follow(trackers.follow)
        log.write("started", settings=SETTINGS)
        until = time.monotonic() + 60
        while not (lines or key):
            assert time.monotonic() < until
            time.sleep(0.05)
        log.write("trained")
        trackers.end(time.monotonic() + 5)
    (line,) = lines
    assert why in line
    assert [event["event"] for event in read_events(tmp_path / "run")].count("tracker_failed") == 1
