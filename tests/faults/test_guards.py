"""A loss or gradient norm that is not finite or spikes is not applied; after too many the run goes back, once."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.config_file import load_settings
from paceline.train.optim import learning_rate

pytestmark = pytest.mark.faults

REJECTED = "non-finite or spiking loss or norm: update not applied"
ROLLED_BACK = "more than k rejected: rolled back once"
STOPPED = "more than k rejected again: stopped with a report"
GUARD = {"window": 6, "rejected": 2}
TWO_RANKS = {"train": {"batches_per_step": 2}, "pipeline": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}}
KINDS: list[Any] = [{}, TWO_RANKS, {"train": {"optimizer": "muon", "dtype": "float32"}}, {"data": {"layout": "packed"}}]
KINDS[3]["data"]["token_budget"] = 100


def quarantined(run: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Return what was said of every micro-batch that was set aside; what was said again must be the same."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for line in (run / "quarantine.jsonl").read_text().splitlines():
        told = json.loads(line)
        del told["t"]
        assert found.setdefault((told["step"], told["micro_batch"], told["rank"]), told) == told
    return found


def killed_at(lab: Any, run: Path, step: int, fault: Any) -> None:
    """Kill a run once it has told of a step, and let it finish."""
    child = lab.train(run, slow_s=0.002, fault=fault)
    child.wait_for(lambda: any(event.get("step", -1) >= step for event in lab.events(run) if event["event"] == "step"))
    if child.process.is_alive():
        child.send(signal.SIGKILL)
    assert child.status() in (-signal.SIGKILL, 0), child.text()
    if not (run / "drafter").exists():
        child = lab.train(run, fault=fault)
        assert child.status() == 0, child.text()


@pytest.mark.parametrize("seed", range(10))
def test_what_is_not_finite_or_spikes_is_not_applied_and_the_run_completes(lab: Any, survival: Any, seed: int) -> None:
    """Killed and resumed, the run is the same, and so is what it tells of the steps that it set aside."""
    draw = random.Random(seed)
    first, second = sorted(draw.sample(range(14), 2))
    kinds = {first: "nan" if first < 3 else draw.choice(["nan", "loss", "norm"])}
    kinds[second] = "nan" if second < 4 else draw.choice(["nan", "loss", "norm"])
    fault, changes = ("poison", {"steps": kinds}), KINDS[seed % len(KINDS)] | {"guard": GUARD}
    with survival.trial(REJECTED, seed):
        whole = lab.settings("whole", changes)
        child = lab.train(whole, fault=fault)
        assert child.status() == 0, child.text()
        run = lab.settings("killed", changes)
        killed_at(lab, run, draw.randrange(14), fault)
        lab.assert_equal(run, whole)
        assert quarantined(run) == quarantined(whole)

        told = {event["step"]: event for event in lab.events(whole) if event["event"] == "step"}
        assert {step for step, event in told.items() if not event["applied"]} == set(kinds)
        train = load_settings(whole / "settings.yaml").train
        for step in range(14):
            before = sum(other < step for other in kinds)
            assert told[step]["lr"] == learning_rate(step - before, 14, train), "it advances with what was applied"
        (summary,) = (event for event in lab.events(whole) if event["event"] == "trained")
        assert (summary["train_steps"], summary["rejected_steps"]) == (14, 2)
        for event in (event for event in lab.events(whole) if event["event"] == "rejected"):
            assert event["rule"] == ("grad_norm" if kinds[event["step"]] == "norm" else "loss")
            assert f"step {event['step']} was not applied: " in child.text()
        for (step, *_), line in quarantined(whole).items():
            assert step in kinds
            assert line["rows"]
            assert {row["dataset_row"] for row in line["rows"]} <= set(range(24))
        for step, kind in kinds.items():
            *others, broken = (line for place, line in sorted(quarantined(whole).items()) if place[0] == step)
            assert (broken["loss_sum"] == "nan") == (kind == "nan"), "the micro-batch that did it can be told"
            assert all(line["loss_sum"] != "nan" for line in others)


@pytest.mark.parametrize(("seed", "kind"), [(seed, kind) for seed, kind in enumerate(KINDS[:3])])
def test_too_many_lead_back_once_and_the_run_completes(lab: Any, survival: Any, seed: int, kind: Any) -> None:
    """The run was saved after steps 5 and 10. It is at step 11 when the third one of the window was rejected."""
    draw = random.Random(seed)
    fault = ("poison", {"steps": {7: "nan", 9: "norm", 10: "nan"}})
    changes = kind | {"guard": GUARD, "checkpoint": {"every_steps": 5, "keep": 1 + seed % 2}}
    whole = lab.settings("whole", changes)
    with survival.trial(ROLLED_BACK, seed):
        child = lab.train(whole, fault=fault)
        assert child.status() == 0, child.text()
        (back,) = (event for event in lab.events(whole) if event["event"] == "rolled_back")
        assert (back["steps"], back["to"], Path(back["checkpoint"]).name) == (11, 5, "step-00000005")
        assert "after step 11 the drafter is that of step 5 again" in child.text()
        told = {event["step"]: event for event in lab.events(whole) if event["event"] == "step"}
        assert told[11]["lr"] == told[5]["lr"], "the schedule goes on from where the checkpoint was"
        assert told[11]["loss_sum"] != told[5]["loss_sum"], "the data goes on from where it was"
        # The same as if nothing had been applied between the checkpoint and where the run went back.
        other = lab.settings("nothing-applied", kind | {"guard": GUARD | {"rejected": 100}})
        child = lab.train(other, fault=("poison", {"steps": dict.fromkeys(range(5, 11), "nan")}))
        assert child.status() == 0, child.text()
        assert [event for event in lab.events(other) if event["event"] == "rolled_back"] == []
        alike = {event["step"]: event for event in lab.events(other) if event["event"] == "step"}
        for step in (11, 12, 13):
            assert {**told[step], "t": 0, "since": 0} == {**alike[step], "t": 0, "since": 0}
        assert lab.weights(other) == lab.weights(whole)
        for number in range(3):
            run = lab.settings(f"killed-{number}", changes)
            killed_at(lab, run, draw.randrange(5, 14), fault)
            lab.assert_equal(run, whole)
            assert quarantined(run) == quarantined(whole)
            assert (run / "checkpoints" / "latest").read_text() == "step-00000011", "it is saved once it went back"


BEHIND = "SIGKILL while a run goes back behind its best checkpoint"
MOMENTS = {
    "before it says so": ("paceline.checkpoint.saver.Saver", "go_back", 0),
    "while what it goes on with is saved": ("paceline.checkpoint.store", "write_whole", 11),
    "before that is the newest": ("paceline.checkpoint.store", "write_whole", 13),
    "before what it passed over is removed": ("paceline.checkpoint.store", "prune", 3),
}


def test_killed_while_it_goes_back_behind_its_best(
    lab: Any, survival: Any, write_dataset: Any, random_rows: list
) -> None:
    """The states after 4 and 8 steps were the best when they were saved; from 11 the run goes back to 6."""
    poison: dict[str, Any] = {"steps": {6: "nan", 9: "norm", 10: "nan"}}
    changes: Any = {"guard": GUARD, "checkpoint": {"every_steps": 6, "keep": 1}}
    changes["evaluate"] = {"held_out": str(write_dataset(random_rows[:-1], "learnt-too")), "every_steps": 4}
    changes["train"] = {"lr": 3e-3}
    whole = lab.settings("whole", changes)
    child = lab.train(whole, fault=("poison_and_kill", poison))
    assert child.status() == 0, child.text()
    saves = [(event["steps"], event["best"]) for event in lab.events(whole) if event["event"] == "checkpoint"]
    assert saves[:4] == [(4, True), (6, False), (8, True), (11, False)]
    for number, (name, at) in enumerate(MOMENTS.items()):
        run = lab.settings(f"killed-{number}", changes)
        with survival.trial(BEHIND, name):
            child = lab.train(run, fault=("poison_and_kill", {**poison, "at": at}))
            assert child.status() == -signal.SIGKILL, child.text()
            child = lab.train(run, fault=("poison_and_kill", poison))
            assert child.status() == 0, child.text()
            assert "is gone" not in child.text()
            (resumed,) = (event for event in lab.events(run) if event["event"] == "resumed")
            assert resumed["best"]["steps"] == 8
            lab.assert_equal(run, whole)


@pytest.mark.parametrize("seed", range(2))
def test_after_that_the_run_stops_with_a_report_and_a_checkpoint(lab: Any, survival: Any, seed: int) -> None:
    steps = {4: "nan", 5: "nan", 6: "nan", 9: "nan", 10: "nan", 11: "nan"}
    changes = [{}, TWO_RANKS][seed] | {"guard": GUARD, "checkpoint": {"every_steps": 3}}
    run = lab.settings("hopeless", changes)
    with survival.trial(STOPPED, seed):
        child = lab.train(run, fault=("poison", {"steps": steps}))
        assert child.status() == 1, child.text()
        text = " ".join(child.text().split())
        assert "error: drafter rank" in text
        assert "At most 2 (guard.rejected) of 6 steps (guard.window) may be rejected, got 3 (step 9: loss nan" in text
        assert "step 11: loss nan, gradient norm nan, rows " in text
        assert "and the run went back to a checkpoint for that before. All their rows are in" in text
        assert f"`paceline train {run} --resume guard.rejected=100`" in text
        assert "What is saved are the checkpoints from before." in text
        assert "come to rest" not in text
        assert [event["to"] for event in lab.events(run) if event["event"] == "rolled_back"] == [3]
        again = lab.train(run, fault=("poison", {"steps": steps}))
        assert again.status() == 1, "resumed as it was, it comes to the same end"
        assert "went back to a checkpoint for that before" in again.text()
        assert [event["to"] for event in lab.events(run) if event["event"] == "rolled_back"] == [3]
        other = lab.train(run, "guard.rejected=100", fault=("poison", {"steps": steps}))
        assert other.status() == 0, other.text()


def test_a_save_that_takes_long_is_waited_for_before_the_run_goes_back(lab: Any, survival: Any) -> None:
    """Both ranks wait for it, and neither hangs."""
    changes: Any = TWO_RANKS | {"guard": GUARD, "checkpoint": {"every_steps": 3}}
    changes["pipeline"] = changes["pipeline"] | {"work_timeout_s": 2}
    run = lab.settings("slow", changes)
    with survival.trial(ROLLED_BACK, "during a save"):
        child = lab.train(run, slow_s=1.2, fault=("poison", {"steps": {7: "nan", 9: "nan", 10: "nan"}}))
        assert child.status() == 0, child.text()
        assert [event["to"] for event in lab.events(run) if event["event"] == "rolled_back"] == [3]
        assert child.text().index("saved after step 3") < child.text().index("is that of step 3 again")


def test_without_a_checkpoint_from_before_the_run_stops_with_a_report(lab: Any, survival: Any) -> None:
    run = lab.settings("early", {"guard": GUARD})
    with survival.trial(STOPPED, "no checkpoint"):
        child = lab.train(run, fault=("poison", {"steps": {0: "nan", 1: "nan", 3: "nan"}}))
        assert child.status() == 1, child.text()
        assert "has no whole checkpoint from before them to go back to" in " ".join(child.text().split())
