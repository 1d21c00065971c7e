"""A run that is asked to stop, by a signal or a notice, saves its step and ends with status 75; told twice, at once."""

import os
import pty
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

KINDS: dict[str, Any] = {
    "one rank": {},
    "two ranks": {"pipeline": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}, "train": {"batches_per_step": 2}},
    "hardly any credit": {"pipeline": {"targets": ["cpu"] * 2, "credit_gib": 1e-6}, "data": {"prefetch": 1}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_is_saved_says_how_to_go_on_and_does(lab: Any, kind: str, number: int) -> None:
    changes = KINDS[kind] | {"checkpoint": {"every_steps": 1000}}
    whole = lab.finished(lab.settings("whole", changes))
    run, draw = lab.settings("stopped", changes), random.Random(f"{kind} {number}")
    stopped = 0
    while not (run / "drafter").exists():
        child = lab.train(run, slow_s=0.02)
        before, wanted = lab.told(run, "step"), draw.randrange(1, 6)
        child.wait_for(lambda: lab.told(run, "step") >= before + wanted)  # noqa: B023 - called at once
        if child.process.is_alive():
            child.send(number)
        status = child.status()
        if status == 75:
            stopped += 1
            said = re.search(r"^stopped: after step (\d+) of 14, saved. Go on with `(.*)`.$", child.text(), re.M)
            assert said, child.text()
            assert said[2] == f"paceline train {run} --resume"
            assert (run / "checkpoints" / "latest").read_text() == f"step-{int(said[1]):08d}"
            assert lab.events(run)[-1]["event"] == "interrupted"
        else:
            assert status == 0, child.text()
    assert stopped >= 1
    lab.assert_equal(run, whole)


def test_a_stop_before_the_first_step_ends_with_75_too(lab: Any) -> None:
    run = lab.settings("early")
    child = lab.train(run)
    child.wait_for(lambda: lab.told(run, "role"))
    child.send(signal.SIGTERM)
    assert child.status() == 75
    assert "stopped: after step 0 of 14, without a checkpoint. Go on with" in child.text()
    lab.finished(run)


def test_a_second_signal_does_not_wait_for_the_save(lab: Any) -> None:
    run = lab.settings("twice", {"checkpoint": {"every_steps": 1000}})
    child = lab.train(run, slow_s=1)
    child.wait_for(lambda: lab.told(run, "step"), timeout_s=100)
    child.send(signal.SIGTERM)
    child.wait_for(lambda: "again stops at once" in child.text())
    time.sleep(0.3)
    began = time.monotonic()
    child.send(signal.SIGTERM)
    assert child.status() == 130
    assert time.monotonic() - began < 3
    assert child.text().strip().endswith("error: interrupted")
    lab.finished(run)


def test_a_save_that_takes_longer_than_the_grace_is_given_up(lab: Any) -> None:
    run = lab.settings("late", {"checkpoint": {"every_steps": 1000, "grace_s": 0.5}})
    child = lab.train(run, slow_s=1)
    child.wait_for(lambda: lab.told(run, "step"), timeout_s=100)
    began = time.monotonic()
    child.send(signal.SIGTERM)
    assert child.status() == 75
    assert time.monotonic() - began < 2
    assert re.search(r"stopped: after step \d+ of 14, without a checkpoint. .* longer than .*grace_s", child.text())
    lab.finished(run)


def start_up_s(events: list[dict[str, Any]]) -> float:
    """Return how long a run took from its first event to its first step: what machines differ in."""
    return next(event["t"] for event in events if event["event"] == "step") - events[0]["t"]


def seen_and_told(lab: Any, run: Path, child: Any, draw: random.Random, start_s: float) -> None:
    """Wait for a moment drawn at random, in a quarter of the trials before the first step, and send SIGTERM."""
    before = lab.told(run, "step")
    if draw.random() < 0.25:
        child.wait_for(lambda: lab.events(run))
        time.sleep(draw.uniform(0, start_s))
    else:
        wanted = draw.randrange(1, 9)
        child.wait_for(lambda: lab.told(run, "step") >= before + wanted)
        time.sleep(draw.uniform(0, 0.05))
    if child.process.is_alive():
        child.send(signal.SIGTERM)


@pytest.mark.timeout(900)
def test_sigterm_twenty_times(lab: Any, survival: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds are kept: a red one is run again with its number."""
    grace_s, lines, stops = 30.0, [], 0
    whole = lab.finished(lab.settings("whole"))
    start_s = start_up_s(lab.events(whole))
    for seed in range(200, 220):
        draw = random.Random(seed)
        run = lab.settings(f"stopped-{seed}", {"checkpoint": {"every_steps": draw.choice([1, 3, 1000])}})
        with survival.trial("SIGTERM at random moments", seed):
            child = lab.train(run, slow_s=0.005)
            seen_and_told(lab, run, child, draw, start_s)
            began = time.monotonic()
            status = child.status(timeout_s=grace_s)
            took, steps = time.monotonic() - began, lab.told(run, "step")
            assert status in (75, 0), child.text()
            if status == 75:
                said = re.search(
                    r"^stopped: after step (\d+) of 14(, saved|, without a checkpoint)\.", child.text(), re.M
                )
                assert said, child.text()
                assert (int(said[1]) > 0) == (said[2] == ", saved")
                assert lab.events(run)[-1]["event"] == "interrupted"
                assert f"Go on with `paceline train {run} --resume`." in child.text()
                lab.finished(run)
            lab.assert_equal(run, whole)
        stops += status == 75
        lines.append(f"{seed}  status {status} after step {steps:2d} in {took:4.1f} s")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert stops >= 17, "too few signals hit a run that was under way"
    assert any(" 0 in" in line for line in lines), "none came before the first step"


@pytest.mark.parametrize("how", ["file", "SIGUSR1", "SIGHUP"])
def test_a_notice_saves_and_stops_and_sigterm_behind_it_does_not_cut_that_short(
    lab: Any, survival: Any, tmp_path: Path, how: str
) -> None:
    notice = tmp_path / "preempted"
    long = {"train": {"max_steps": 100, "epochs": 100}}  # the file is looked for once a second
    changes = long | {"checkpoint": {"every_steps": 1000, "notice_file": str(notice)}}
    whole, run = lab.finished(lab.settings("whole", long)), lab.settings("run", changes)
    with survival.trial("notice by file or signal", how):
        child = lab.train(run, slow_s=0.2)  # saving takes longer than SIGTERM is late
        child.wait_for(lambda: lab.told(run, "step"))
        notice.touch() if how == "file" else child.send(signal.Signals[how])
        child.wait_for(lambda: "stopping, this step is finished and saved" in child.text())
        child.send(signal.SIGTERM)
        assert child.status() == 75
        why = re.escape(f"{notice} is there (checkpoint.notice_file)") if how == "file" else how
        assert re.search(rf"^  {why}: stopping, this step", child.text(), re.M), child.text()
        assert re.search(r"^stopped: after step \d+ of 100, saved\.", child.text(), re.M)
        if how == "file":
            again = lab.train(run)
            assert again.status() == 2
            assert f"error: {notice} (checkpoint.notice_file) asks a run to stop when it appears, but" in again.text()
            notice.unlink()
        lab.finished(run)
        lab.assert_equal(run, whole)


def test_a_notice_before_the_first_step_ends_with_75(lab: Any) -> None:
    run = lab.settings("early")
    child = lab.train(run)
    child.wait_for(lambda: lab.told(run, "role"))
    child.send(signal.SIGUSR1)
    assert child.status() == 75
    lab.finished(run)


def test_a_run_whose_terminal_closes_is_saved(lab: Any) -> None:
    """The hangup comes with a terminal that nothing can be written to any more."""
    run = lab.settings("run", {"train": {"max_steps": 20_000, "epochs": 10**5}, "checkpoint": {"every_steps": 10**6}})
    child, terminal = pty.fork()
    if child == 0:
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
        os.execve(sys.executable, [sys.executable, "-m", "paceline", "train", f"{run}.yaml"], environment)
    try:
        until = time.monotonic() + 100
        os.set_blocking(terminal, False)
        while lab.told(run, "step") < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
            try:
                os.read(terminal, 1 << 16)
            except BlockingIOError:
                continue
        os.close(terminal)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            assert time.monotonic() < until
            time.sleep(0.01)
        child = 0
        assert os.waitstatus_to_exitcode(ended[1]) == 75
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    steps = lab.told(run, "step")
    assert (run / "checkpoints" / "latest").read_text() == f"step-{steps:08d}"
    assert f"after step {steps:,} of 20,000, saved." in lab.events(run)[-1]["message"]


def test_a_run_outlives_its_standard_output(lab: Any, survival: Any) -> None:
    whole, run = lab.settings("whole"), lab.settings("mute")
    with survival.trial("standard output on a full disk", 0):
        assert lab.train(whole, fault=("poison", {"steps": {5: "nan"}})).status() == 0
        child = lab.train(run, fault=("mute", {"at": 4}))
        assert child.status() == 0, child.text()
        (lost,) = (event for event in lab.events(run) if event["event"] == "console_lost")
        assert lost["message"] == "Standard output cannot be written: No space left on device."
        assert lab.told(run, "checkpoint_failed") == 0
        lab.assert_equal(run, whole)
