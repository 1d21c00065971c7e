"""Trackers in processes of their own, with libraries that do as told, and what a slow or broken one costs: nothing."""

import json
import os
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ObserveSettings
from paceline.observe import trackers
from paceline.observe.attending import attended, check_attending
from paceline.observe.events import EventLog
from paceline.observe.reading import read_events
from paceline.observe.tracker_numbers import Numbers, flat
from paceline.records import UserError

STEP = {"loss": 2.5, "acceptance": 1.5, "lr": 0.1, "grad_norm": 3.0, "accepted_K": [6, 1, 0], "available_K": [8, 4, 0]}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return what puts a package `trackio` in the way, whose `tell` and `finish` run some code, and returns the file of
    what it was told.
    """

    def put(code: str = "pass", end: str = "pass") -> Path:
        place, told = tmp_path / "site", tmp_path / "told.jsonl"
        place.mkdir(exist_ok=True)
        (place / "trackio.py").write_text(
            textwrap.dedent(
                f"""
                import enum, json, os, sys, time
                AlertLevel = enum.Enum("AlertLevel", "INFO WARN ERROR")

                def put(*what):
                    with open({str(told)!r}, "a") as file:
                        file.write(json.dumps(what) + "\\n")

                class Run:
                    def log(self, numbers, step):
                        {code}
                        put("log", step, numbers)

                    def alert(self, title, text, level):
                        put("alert", title, text, level.name)

                    def finish(self):
                        {end}
                        put("finish")

                def init(**how):
                    print("a library prints what it likes")
                    put("init", how["name"], how["resume"], how["config"])
                    return Run()
                """
            )
        )
        monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(str(place))
        return told

    return put


def part(run: Path, first: int, last: int, *, end: str = "trained", grace_s: float = 60.0, told: Any = None) -> None:
    """A part of a run with one tracker."""
    with (
        EventLog(run) as log,
        attended(ObserveSettings(trackers=("trackio",)), run, log, grace_s=grace_s, tell=told or pytest.fail),
    ):
        log.write("resumed" if first else "started", steps=first, settings={"train": {"lr": 0.5}, "run_dir": "x"})
        for step in range(first, last):
            log.write("step", step=step, **STEP)
        log.write(end, message="why")


def said(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failures(run: Path) -> list[str]:
    return [event["message"] for event in read_events(run) if event["event"] == "tracker_failed"]


def test_a_run_is_told_from_its_begin_to_its_outcome_and_goes_on_as_the_same(
    tmp_path: Path, library: Callable[..., Path]
) -> None:
    told, run = library(), tmp_path / "run"
    part(run, 0, 3, end="interrupted")
    part(run, 2, 4)
    init, *steps, alert, finish, again, new, alert_again, finish_again = said(told)
    assert (init[0], init[2:]) == ("init", ["allow", {"train.lr": 0.5, "run_dir": "x"}])
    assert init[1].startswith("run-")
    assert [step[:2] for step in steps] == [["log", 1], ["log", 2], ["log", 3]]
    assert steps[0][2] == {
        "train/loss": 2.5, "train/acceptance": 1.5, "train/lr": 0.1, "train/grad_norm": 3.0,
        "train_slots/01": 0.75, "train_slots/02": 0.25,
    }  # fmt: skip
    assert alert == ["alert", "interrupted", "why", "WARN"]
    assert finish == finish_again == ["finish"]
    assert again == init
    assert new[:2] == ["log", 4], "step 3 was told by the part before"
    assert alert_again == ["alert", "finished", "why", "INFO"]
    assert failures(run) == []


@pytest.mark.parametrize(
    ("code", "hang_s", "why"),
    [
        ('raise OSError("no such host")', 60.0, "OSError: no such host"),
        ("time.sleep(600)", 0.2, "trackio took longer than 0.2 s for one call"),
        ("os._exit(7)", 60.0, "its process ended with status 7"),
        ("os.kill(os.getpid(), 9)", 60.0, "its process was killed by signal 9"),
    ],
)
def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path,
    library: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    hang_s: float,
    why: str,
) -> None:
    library(f"{code} if step == 2 else None" if "raise" not in code else f"if step == 2: {code}")
    monkeypatch.setattr(trackers, "HANG_S", hang_s)
    lines: list[str] = []
    failed = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        failed.set()

    with (
        EventLog(tmp_path) as log,
        attended(ObserveSettings(trackers=("trackio",)), tmp_path, log, grace_s=60.0, tell=tell),
    ):
        log.write("started", settings={})
        log.write("step", step=0, **STEP)
        log.write("step", step=1, **STEP)
        assert failed.wait(60)
        log.write("step", step=2, **STEP)
        log.write("trained")
    log_file = tmp_path / "trackers" / "trackio.log"
    assert failures(tmp_path) == [f"{why}. What it printed is in {log_file}."]
    assert lines == [f"  Trackio is told nothing any more: {why}. What it printed is in {log_file}."]
    assert [event["step"] for event in read_events(tmp_path) if event["event"] == "step"] == [0, 1, 2]


def test_a_tracker_that_hangs_stalls_no_step_and_holds_the_end_no_longer_than_a_stop_may_take(
    tmp_path: Path, library: Callable[..., Path]
) -> None:
    library("time.sleep(600)")
    lines: list[str] = []
    began = time.monotonic()
    with (
        EventLog(tmp_path) as log,
        attended(ObserveSettings(trackers=("trackio",)), tmp_path, log, grace_s=0.1, tell=lines.append),
    ):
        log.write("started", settings={})
        for step in range(1000):
            log.write("step", step=step, **STEP)
        log.write("stopping", message="SIGTERM")
        log.write("interrupted", message="why")
    assert time.monotonic() - began < 20, "not the 60 s that it may take else"
    assert len(lines) == len(failures(tmp_path)) == 1
    assert "it did not finish in time" in lines[0]


def test_what_a_killed_tracker_was_not_told_it_is_told_when_the_run_goes_on(
    tmp_path: Path, library: Callable[..., Path]
) -> None:
    told = library("if step == 3: os._exit(1)")
    part(tmp_path, 0, 6, end="interrupted", told=lambda line: None)
    library()
    part(tmp_path, 4, 8)
    assert [line[1] for line in said(told) if line[0] == "log"] == [1, 2, 4, 5, 6, 7, 8]  # 3 had been begun


def test_a_run_that_is_killed_lets_its_trackers_finish(tmp_path: Path, library: Callable[..., Path]) -> None:
    told, run = library(), tmp_path / "run"
    with EventLog(run) as log:
        following = trackers.Trackers(run, ("trackio",), events=log, tell=pytest.fail)
        log.follow(following.follow)
        log.write("started", settings={})
        log.write("step", step=0, **STEP)
        (process,) = following._following
        process.over()  # as the system does with the pipe of a process that is gone
        process.wait(time.monotonic() + 60)
    assert said(told)[-2:] == [["alert", "failed", "the run's process ended without a word", "ERROR"], ["finish"]]


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^MLflow \(observe\.trackers: mlflow\) is not installed.*'paceline\[mlflow\]'"
    ):
        check_attending(ObserveSettings(trackers=("mlflow",)))
    with pytest.raises(UserError, match=r"^observe\.on_end must begin with a program.* got 'no-such-program'"):
        check_attending(ObserveSettings(on_end="no-such-program --now"))
    check_attending(ObserveSettings(on_end="sh -c 'exit 1'"))


def test_a_folder_that_leads_elsewhere_is_not_written_into(tmp_path: Path, library: Callable[..., Path]) -> None:
    library()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers").symlink_to(elsewhere)
    lines: list[str] = []
    part(tmp_path / "run", 0, 1, told=lines.append)
    assert list(elsewhere.iterdir()) == []
    assert len(lines) == 1
    assert "is a link, and a run writes only into its own folder" in lines[0]


def test_memory_is_told_with_the_step_behind_it_and_numbers_that_are_missing_are_left_out() -> None:
    numbers = Numbers()
    gpus = [{"device": "cuda:0", "memory_used_bytes": 3 * 2**30}, {"device": "cuda:1", "memory_used_bytes": None}]
    assert numbers.of({"event": "sample", "t": 1.0, "gpus": gpus, "host_bytes": 2**29}) is None
    point = numbers.of({"event": "step", "t": 2.0, "step": 4, **STEP, "since": {"s": 2.0, "tokens": 100, "blocks": 6}})
    assert point is not None
    assert (point.steps, point.t) == (5, 2.0)
    assert {key: value for key, value in point.numbers.items() if not key.startswith("train")} == {
        "memory/cuda0_gib": 3.0, "memory/host_gib": 0.5, "rate/tokens_per_s": 50.0, "rate/blocks_per_s": 3.0,
    }  # fmt: skip
    evaluated = numbers.of({"event": "evaluated", "t": 3.0, "steps": 5, "tau": 2.5, "slot_acceptance_K": [0.5, 0.25]})
    assert evaluated is not None
    assert evaluated.numbers == {"evaluated/tau": 2.5, "evaluated_slots/01": 0.5, "evaluated_slots/02": 0.25}
    assert numbers.of({"event": "role", "t": 3.0}) is None


def test_settings_are_told_flat() -> None:
    tree = {"run_dir": "x", "train": {"lr": 0.1, "betas": [0.9, 0.95], "gamma": None}}
    assert flat(tree) == {"run_dir": "x", "train.lr": 0.1, "train.betas": "[0.9, 0.95]", "train.gamma": "None"}
