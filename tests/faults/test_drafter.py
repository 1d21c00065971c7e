"""A drafter that raises or hangs, and a loader that hangs, end the run named, with stacks, never in silence."""

import random
import re
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

LIMIT_S = 4
RANKS = {"one rank": {}, "two ranks": {"pipeline": {"drafters": ["cpu"] * 2}, "train": {"batches_per_step": 2}}}


def limited(ranks: str) -> Any:
    changes: Any = RANKS[ranks]
    return changes | {"pipeline": changes.get("pipeline", {}) | {"work_timeout_s": LIMIT_S}}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_a_drafter_breaks(lab: Any, survival: Any, kind: str, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    ranks, where = draw.choice(list(RANKS)), draw.choice(["load", "micro", "update"])
    rank, at = (draw.randrange(2) if ranks == "two ranks" else 0), draw.randrange(3, 6)
    broken = "raise" if kind == "raises" else draw.choice(["hang", "spin"])
    whole = lab.finished(lab.settings("whole", RANKS[ranks]))
    run = lab.settings("broken", limited(ranks))
    with survival.trial(f"drafter thread {kind}", f"{seed} (rank {rank} of {ranks}, {where} {at}, {broken})"):
        began = time.time()
        fault = {"kind": broken, "at": at, "where": where, "rank": rank}
        child = lab.train(run, fault=("drafter_faults", fault))
        assert child.status(90) == 1, child.text()
        ended, events = time.time(), lab.events(run)
        assert events[-1]["event"] == "failed"
        message = events[-1]["message"]
        if kind == "raises":
            assert re.match(rf"drafter rank {rank} on cpu failed while running \(.+\): RuntimeError: device", message)
            assert ended - events[-1]["t"] <= 10
            assert not (run / "stacks.txt").exists()
        else:
            seconds = re.match(rf"drafter rank {rank} on cpu hangs: it has been running \(.+\) for (\d+) s", message)
            assert seconds, message
            assert int(seconds[1]) <= LIMIT_S + 5
            last = max(event["t"] for event in events[:-1] if event["event"] in ("step", "role", "checkpoint"))
            assert ended - max(last, began) <= LIMIT_S + 10
            for text in (child.text(), (run / "stacks.txt").read_text()):
                assert "in breaking" in text
                assert f"drafter rank {rank}" in text
            (run / "stacks.txt").unlink()
        lab.assert_equal(lab.finished(run), whole)


def test_what_rank_0_has_reached_is_saved_if_another_rank_hangs(lab: Any) -> None:
    whole = lab.finished(lab.settings("whole", RANKS["two ranks"]))
    run = lab.settings("broken", limited("two ranks") | {"checkpoint": {"every_steps": 1000}})
    child = lab.train(run, fault=("drafter_faults", {"kind": "hang", "at": 4, "where": "micro", "rank": 1}))
    assert child.status() == 1
    saved = re.search(r"The state after step (\d+) is saved: go on with", child.text())
    assert saved, child.text()
    assert lab.told(run, "step") == int(saved[1]) > 0
    (run / "stacks.txt").unlink()
    lab.assert_equal(lab.finished(run), whole)


def test_nothing_is_saved_in_the_middle_of_an_update(lab: Any) -> None:
    run = lab.settings("broken", limited("one rank") | {"checkpoint": {"every_steps": 1000}})
    child = lab.train(run, fault=("drafter_faults", {"kind": "hang", "at": 4, "where": "update"}))
    assert child.status() == 1
    assert "it has been running (the update of step 4)" in child.text()
    assert "The drafter did not come to rest between two steps, so nothing was saved since; go on" in child.text()
    assert not (run / "checkpoints").exists()


def test_a_loader_that_hangs_is_named_and_the_run_can_go_on(lab: Any) -> None:
    whole = lab.finished(lab.settings("whole"))
    run = lab.settings("broken", limited("one rank") | {"checkpoint": {"every_steps": 1000}})
    child = lab.train(run, fault=("drafter_faults", {"kind": "hang", "at": 7, "where": "loader"}))
    began = time.monotonic()
    assert child.status(90) == 1
    assert time.monotonic() - began < 60
    text = " ".join(child.text().split())
    assert (
        f"Nobody has worked for pipeline.work_timeout_s ({LIMIT_S} s): target replica 0 waits for micro-batch" in text
    )
    assert re.search(r"from the loader; drafter rank 0 waits for features of micro-batch \d+\.", text)
    assert re.search(r"The state after step \d+ is saved", text)
    assert "in breaking" in (run / "stacks.txt").read_text()
    lab.finished(run)  # what a run that hung has left is in nobody's way
    (run / "stacks.txt").unlink()
    lab.assert_equal(run, whole)
