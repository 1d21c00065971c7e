"""A run with held-out losses that is killed anywhere goes on with the same losses and the same best checkpoint."""

import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

RANKS = {"train": {"batches_per_step": 2}, "pipeline": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}}
KINDS: dict[str, Any] = {
    "trimmed": {},
    "packed": {"data": {"layout": "packed", "token_budget": 100}},
    "two ranks": RANKS,
    "features kept": {"data": {"reshuffle": "batches"}, "pipeline": {"feature_cache": "disk"}},
}
FAULT = "SIGKILL of a run with held-out losses"


def changed(lab: Any, kind: str, every_steps: int = 3) -> Any:
    return KINDS[kind] | {"evaluate": {"held_out": lab.held_out, "every_steps": every_steps}}


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(KINDS, 300)))
def test_killed_at_random_moments(lab: Any, survival: Any, seed: int, kind: str) -> None:
    whole = lab.finished(lab.settings("whole", changed(lab, kind)))
    assert lab.told(whole, "held_out") == 5
    run = lab.settings("killed", changed(lab, kind))
    with survival.trial(FAULT, seed):
        _, hit = lab.killed(run, seed, kills=4)
        lab.assert_equal(run, whole)
    assert hit


def pointer(run: Path, name: str) -> str | None:
    path = run / "checkpoints" / name
    return path.read_text() if path.exists() else None


def test_killed_between_the_files_of_the_first_saves(lab: Any, survival: Any) -> None:
    """A save writes its state, its manifest, `best` if it is the best, and `latest`; after step 2, and 3, the best."""
    whole = lab.finished(lab.settings("whole", changed(lab, "trimmed")))
    left: dict[int, tuple[str | None, str | None]] = {}
    for call in (0, 2, 4, 5, 6, 9, 12):
        run = lab.settings(f"killed-{call}", changed(lab, "trimmed"))
        with survival.trial(FAULT, f"file {call}"):
            at = {"owner": "paceline.checkpoint.store", "name": "write_whole", "call": call}
            child = lab.train(run, fault=("kill_at", at))
            assert child.status() == -signal.SIGKILL, child.text()
            left[call] = (pointer(run, "latest"), pointer(run, "best"))
            lab.finished(run)
            lab.assert_equal(run, whole)
    two, three = "step-00000002", "step-00000003"
    assert [left[call] for call in (0, 2, 4, 5, 6)] == [(None, None)] * 2 + [(two, None)] * 2 + [(two, three)]


def test_killed_before_the_drafter_is_written(lab: Any, survival: Any) -> None:
    """The last held-out loss is known and, being the best, saved: there is no step and no loss left to make."""
    settings = changed(lab, "trimmed", 100) | {"checkpoint": {"every_steps": 100}}
    whole = lab.finished(lab.settings("whole", settings))
    run = lab.settings("killed", settings)
    with survival.trial(FAULT, "before the drafter"):
        at = {"owner": "paceline.recipes.train", "name": "save_drafter", "call": 0}
        assert lab.train(run, fault=("kill_at", at)).status() == -signal.SIGKILL
        assert (run / "checkpoints" / "best").read_text() == "step-00000014"
        lab.finished(run)
        lab.assert_equal(run, whole)
        assert (lab.told(run, "step"), lab.told(run, "held_out")) == (14, 1)
        assert lab.events(run)[-1]["best"] == lab.events(whole)[-1]["best"]
