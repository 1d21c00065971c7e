"""Whatever happens to target replicas, the run completes as if nothing had been, or ends so that it can go on."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

TRIALS = 10
LIMIT_S = 4  # longest work of a micro-batch in trials of what hangs: it takes milliseconds, on a machine that is busy
TWO = {"targets": ["cpu", "cpu"]}

KINDS: dict[str, Any] = {
    "trimmed": {},
    "packed, hardly any credit": {
        "data": {"layout": "packed", "token_budget": 100, "prefetch": 1},
        "pipeline": {"credit_gib": 1e-6},
    },
    "two ranks, features kept": {
        "train": {"batches_per_step": 2},
        "data": {"reshuffle": "batches"},
        "pipeline": {"drafters": ["cpu"] * 2, "feature_cache": "memory"},
    },
}
FAULTS = {
    "exception": ["raise"],
    "hang": ["hang", "spin"],
    "slow (10x)": ["slow"],
    "non-finite output": ["nan", "inf"],
}
TOLD = {"exception": "replica_failed", "hang": "replica_hung", "non-finite output": "replica_failed"}


def changed(kind: str, **pipeline: object) -> Any:
    changes = KINDS[kind]
    return changes | {"pipeline": changes.get("pipeline", {}) | pipeline}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_two_replicas_breaks_and_nothing_changes(lab: Any, survival: Any, fault: str) -> None:
    wholes: dict[str, Path] = {}
    for seed in range(TRIALS):
        draw = random.Random(f"{fault} {seed}")
        kind = list(KINDS)[seed % len(KINDS)]
        if kind not in wholes:
            wholes[kind] = lab.finished(lab.settings(f"whole-{len(wholes)}", changed(kind)))
        broken, at = draw.choice(FAULTS[fault]), draw.randrange(1, 6 if "ranks" in kind else 14)
        limits = {"work_timeout_s": LIMIT_S} if fault == "hang" else {}
        run = lab.settings(f"{broken}-{seed}", changed(kind, **TWO, **limits))
        with survival.trial(f"{fault} in one of two replicas", f"{seed} ({kind}, micro-batch {at})"):
            child = lab.train(run, fault=("replica_faults", {"kind": broken, "at": at}))
            assert child.status(90) == 0, child.text()
            for event in {"replica_failed", "replica_hung"}:
                assert lab.told(run, event) == (event == TOLD.get(fault)), child.text()
            stacks = run / "stacks.txt"
            assert stacks.exists() == (fault == "hang")
            if fault == "hang":
                assert "in breaking" in stacks.read_text()
                stacks.unlink()
            lab.assert_equal(run, wholes[kind])


@pytest.mark.parametrize("seed", range(5))
def test_all_replicas_break_and_the_run_can_go_on(lab: Any, survival: Any, seed: int) -> None:
    draw = random.Random(f"all {seed}")
    kind = list(KINDS)[seed % len(KINDS)]
    broken, restarts = [("raise", 0), ("raise", 3), ("hang", 1), ("nan", 0), ("spin", 0)][seed]
    limits = {"work_timeout_s": LIMIT_S, "restarts": restarts}
    whole = lab.finished(lab.settings("whole", changed(kind)))
    run = lab.settings("broken", {**changed(kind, **TWO, **limits), "checkpoint": {"every_steps": 1000}})
    with survival.trial("all replicas fail", f"{seed} ({broken}, {kind}, {restarts} restarts)"):
        fault = {"kind": broken, "at": draw.randrange(4, 6), "every": True, "steps_first": 1}
        child = lab.train(run, fault=("replica_faults", fault))
        assert child.status(90) == 1, child.text()
        ended = time.time()
        told = [event for event in lab.events(run) if event["event"].startswith("replica_")]
        assert ended - told[-1]["t"] <= 10
        failed = lab.events(run)[-1]
        assert failed["event"] == "failed"
        cause = {"raise": "RuntimeError: device lost", "nan": "Features must be finite"}.get(broken, "hangs")
        assert cause in failed["message"]
        assert "target replica 0" in failed["message"]
        assert "target replica 1" in failed["message"]
        saved = int((run / "checkpoints" / "latest").read_text().removeprefix("step-"))
        assert saved >= 1
        assert f"The state after step {saved} is saved: go on with `paceline train {run} --resume`." in child.text()
        assert (run / "stacks.txt").exists() == (broken in ("hang", "spin"))
        (run / "stacks.txt").unlink(missing_ok=True)
        lab.assert_equal(lab.finished(run), whole)


def test_a_micro_batch_that_breaks_every_replica_does_not_cost_them_all(lab: Any) -> None:
    whole = lab.finished(lab.settings("whole"))
    run = lab.settings("broken", {"pipeline": {**TWO, "restarts": 8}})
    child = lab.train(run, fault=("replica_faults", {"kind": "batch", "at": 5, "steps_first": 1}))
    assert child.status() == 1
    assert lab.told(run, "replica_failed") == 2
    message = lab.events(run)[-1]["message"]
    assert message.startswith("Two replicas have failed at micro-batch 5, which holds rows ")
    assert message.count("RuntimeError: device lost.") == 2
    assert "is saved: go on with" in message
    lab.assert_equal(lab.finished(run), whole)


def test_the_budget_is_of_the_whole_run_and_who_is_left_goes_on(lab: Any) -> None:
    whole = lab.finished(lab.settings("whole"))
    run = lab.settings("broken", {"pipeline": {**TWO, "restarts": 0}})
    child = lab.train(run, fault=("replica_faults", {"kind": "raise", "at": 3}))
    assert child.status() == 0, child.text()
    (failed,) = [event for event in lab.events(run) if event["event"] == "replica_failed"]
    assert (failed["restarted"], failed["restarts_left"]) == (False, 0)
    assert failed["doing"].startswith("micro-batch 3 (rows ")
    assert "device lost; it stays out" in child.text()
    lab.assert_equal(run, whole)
