"""A run with true acceptance survives whatever becomes of its evaluator, and goes on where it was killed."""

import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

FAULT = "SIGKILL of a run with true acceptance"
PATIENT: tuple[str, dict[str, object]] = ("evaluator_faults", {"kind": "none"})


def changed(lab: Any, *, held_out: bool = True, **more: Any) -> Any:
    evaluate = {"held_out": lab.held_out, "every_steps": 100, "device": "cpu", "tau_every_steps": 3}
    evaluate |= {"max_new_tokens": 12, "rows": 4}
    if not held_out:
        prompts = Path(lab.held_out).with_name("prompts.jsonl")
        prompts.write_text("".join(f'{{"prompt": "w{at} w9"}}\n' for at in range(10, 16)))
        evaluate |= {"held_out": None, "prompts": str(prompts)}
    return {"evaluate": evaluate, "pipeline": {"targets": ["cpu"] * 2}} | more


def evaluated(lab: Any, run: Path) -> dict[int, dict[str, Any]]:
    """Return what every evaluation told; one that was made again must have told the same, but for its time."""
    found: dict[int, dict[str, Any]] = {}
    for event in lab.events(run):
        if event["event"] == "evaluated":
            told = {key: value for key, value in event.items() if key not in ("t", "s", "best")}
            assert found.setdefault(event["steps"], told) == told
    return found


@pytest.mark.parametrize("held_out", [True, False], ids=["held out", "prompts"])
@pytest.mark.parametrize("seed", range(400, 403))
def test_killed_at_random_moments(lab: Any, survival: Any, seed: int, held_out: bool) -> None:
    whole = lab.settings("whole", changed(lab, held_out=held_out))
    child = lab.train(whole, fault=PATIENT)
    assert child.status() == 0, child.text()
    assert [*evaluated(lab, whole)] == [3, 6, 9, 12, 14]
    run = lab.settings("killed", changed(lab, held_out=held_out))
    with survival.trial(FAULT, seed):
        _, hit = lab.killed(run, seed, kills=5, fault=PATIENT)
        assert evaluated(lab, run) == evaluated(lab, whole)
        lab.assert_equal(run, whole)
        ends = [lab.events(which)[-1] for which in (run, whole)]
        assert all(ends[0][key] == ends[1][key] for key in ("best", "tau", "tau_steps", "best_by"))
    assert hit


@pytest.mark.parametrize("kind", ["raise", "hang", "spin"])
def test_one_that_is_lost_does_not_end_the_run(lab: Any, survival: Any, kind: str) -> None:
    whole = lab.finished(lab.settings("whole", {"pipeline": {"targets": ["cpu"] * 2}}))
    tree = changed(lab, held_out=False)
    tree["pipeline"] |= {"work_timeout_s": 3}
    run = lab.settings("lost", tree)
    with survival.trial(f"evaluator: {kind}", 0):
        child = lab.train(run, fault=("evaluator_faults", {"kind": kind, "at": 6}))
        assert child.status() == 0, child.text()
        steps = [[e["loss"] for e in lab.events(which) if e["event"] == "step"] for which in (run, whole)]
        assert steps[0] == steps[1]
        assert lab.weights(run) == lab.weights(whole)
        assert [*evaluated(lab, run)] == [3]
        (failed,) = [event for event in lab.events(run) if event["event"] == "evaluator_failed"]
        assert failed["doing"] == "evaluating the drafter after step 6"
        assert (run / "stacks.txt").exists() == (kind != "raise")
        trained = lab.events(run)[-1]
        assert (trained["event"], trained["tau_steps"], trained["best"]["steps"]) == ("trained", 3, 3)
        assert trained["evaluator_failed"] == failed["message"]
        assert (run / "checkpoints" / "best").read_text() == "step-00000003"


def test_asked_to_stop_while_it_decodes(lab: Any, survival: Any) -> None:
    """The last evaluation, behind the last step, hangs on nothing: the drafter is saved at once."""
    tree = changed(lab, held_out=False)
    tree["evaluate"] |= {"tau_every_steps": 100, "max_new_tokens": 400}
    run = lab.settings("asked", tree)
    with survival.trial("SIGTERM during the last evaluation", 0):
        child = lab.train(run, fault=PATIENT)
        child.wait_for(lambda: any(e["event"] == "step" and e["step"] == 13 for e in lab.events(run)))
        child.send(signal.SIGTERM)
        assert child.status() in (0, 75), child.text()
        if child.status() == 75:
            lab.finished(run)
        assert (run / "drafter").exists()
