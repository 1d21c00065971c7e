"""A run that is asked to stop saves its step and ends with status 75; asked twice, it ends at once."""

import random
import re
import signal
import time
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
    child.wait_for(lambda: "a second signal stops at once" in child.text())
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
