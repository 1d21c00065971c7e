"""A run whose target takes the fast path: the same drafter but for rounding, and nothing is compiled again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trained_run import of, run

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.lines import line_of
from paceline.recipes.train_checks import choose_policy
from paceline.records import RunError, UserError
from paceline.target.layers import enter, widen
from paceline.target.model import FeatureTarget
from paceline.target.replica import Pace
from paceline.target.self_check import Wanted


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> Callable[..., RunSettings]:
    dataset = write_dataset(random_rows)

    def make(name: str, **changes: dict[str, object]) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "layout": "packed"},
            "train": {"epochs": 20, "max_steps": 12, "context_slots": 128, "anchor_slots": 16, "anchors_per_sample": 4}
            | {"dtype": "float32", "log_every": 1, "lr": 1e-2, "policy": "compiled"},
            "pipeline": {"targets": ["cpu"] * 2, "drafters": ["cpu"]},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return RunSettings.model_validate(tree)

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
def test_the_drafter_learns_the_same(settings: Any) -> None:
    plain, _ = run(settings("plain", target={"fast": "off"}))
    fast, _ = run(settings("fast"))
    again, _ = run(settings("one", pipeline={"targets": ["cpu"]}))
    split, _ = run(settings("split", target={"devices_per_replica": 2}))
    assert of(plain, "target_path") == []
    how = {"event": "target_path", "schema": 1, "device": "cpu", "path": "fast"}
    how |= {"compiled": True, "fp8": False, "attention": "sample by sample", "reason": ""}
    told = sorted(of(fast, "target_path"), key=lambda event: event["role"])
    assert told == [{**how, "role": f"target replica {index}"} for index in range(2)]
    losses = [[event["loss"] for event in of(found, "step")] for found in (plain, fast, again, split)]
    for found in (plain, fast, again, split):
        assert (of(found, "recompile"), of(found, "trained")[0]["recompiles"]) == ([], 0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0], "by other operations"
    assert losses[2] == losses[1], "whatever the number of replicas"
    assert losses[3] == losses[1], "and of devices that a replica has"
    assert [event["path"] for event in of(split, "target_path")] == ["fast"]


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
def test_micro_batches_that_do_not_fit_what_was_compiled_are_told_of(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mark that lets the number of tokens vary each is another shape. The functions are the test's own, for
    which nothing was compiled before."""
    monkeypatch.setattr("paceline.target.fast.enter", lambda *args: enter(*args))
    monkeypatch.setattr("paceline.target.fast.widen", lambda *args: widen(*args))
    monkeypatch.setattr("paceline.target.fast._any_count", lambda tensor: tensor)
    monkeypatch.setattr("paceline.target.fast._TILE", 1)
    found, _ = run(settings("run"))
    assert of(found, "trained")[0]["recompiles"] == len(of(found, "recompile")) > 0


@pytest.mark.slow
def test_what_cannot_take_the_fast_path_is_refused_for_fp8_alone(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = settings("run", target={"fp8": "on", "dtype": "bfloat16"}, train={"policy": "eager"})
    with pytest.raises(UserError, match="target.fp8: on is a part of the fast path"):
        choose_policy(eight, Console(json=True))
    monkeypatch.setattr("paceline.target.model.why_not_plain", lambda trunk, fp8: "it is odd")
    with pytest.raises(RunError, match="failed while loading: target.fp8: on .* cannot take: it is odd. Set it to off"):
        run(settings("run", target={"fp8": "on", "dtype": "bfloat16"}, train={"policy": "compiled"}))


def test_what_cannot_take_fp8_goes_on_in_bfloat16_where_that_was_chosen(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target was in fp8 already when it was seen to be off, so it is loaded again."""
    bfloat16 = {"target": {"dtype": "bfloat16"}, "train": {"policy": "eager", "max_steps": 3}}
    pipeline = {"targets": ["cpu"]}
    wanted, _ = run(settings("wanted", **bfloat16, pipeline=pipeline))
    why_not = Wanted.why_not
    monkeypatch.setattr(
        Wanted, "why_not", lambda self, fast, *, fp8: "it is off" if fp8 else why_not(self, fast, fp8=False)
    )
    monkeypatch.setattr("paceline.pipeline.threads.pace_of", lambda *asked: Pace(fast=True, fp8=True))
    monkeypatch.setattr("paceline.recipes.train.choose_fp8", lambda settings, *_, **__: settings)
    found, _ = run(settings("found", target={**bfloat16["target"], "fp8": "auto"}, train=bfloat16["train"],
                            pipeline=pipeline, checkpoint={"every_steps": 1}))  # fmt: skip
    (told,) = of(found, "no_fp8")
    assert (told["role"], told["device"], told["reason"]) == ("target replica 0", "cpu", "it is off")
    (path,) = of(found, "target_path")
    assert (path["path"], path["fp8"], path["reason"]) == ("fast", False, "")
    assert (line_of(told) or "").startswith("WARNING: target replica 0 on cpu computes in bfloat16 and not in fp8")
    losses = [[event["loss"] for event in of(events, "step")] for events in (wanted, found)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert of(found, "trained")[0]["fp8"] == {"train": "off", "target": "off"}
    saved = sorted(tmp_path.glob("found/checkpoints/*/state.json"))
    assert json.loads(saved[-1].read_text())["fp8"] == {
        "train": "off",
        "target": "off",
    }  # so it goes on where there is no fp8


def test_what_is_off_only_when_compiled_goes_on_in_bfloat16_too(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded again, it is compiled again: here that does nothing but answer."""
    answers = iter(["it is off", ""])
    asked = list[bool]()

    def compile_(target: FeatureTarget, *_: object) -> str:
        asked.append(target.is_fast)
        return next(answers)

    monkeypatch.setattr(FeatureTarget, "compile", compile_)
    monkeypatch.setattr("paceline.pipeline.threads.pace_of", lambda *asked: Pace(fast=True, compiled=True, fp8=True))
    monkeypatch.setattr("paceline.recipes.train.choose_fp8", lambda settings, *_, **__: settings)
    how = {"dtype": "bfloat16", "fp8": "auto"}
    found, _ = run(settings("run", target=how, train={"policy": "eager", "max_steps": 2, "dtype": "bfloat16"},
                            pipeline={"targets": ["cpu"]}))  # fmt: skip
    assert asked == [True, True]
    assert [event["reason"] for event in of(found, "no_fp8")] == ["it is off"]
    (path,) = of(found, "target_path")
    assert (path["path"], path["compiled"], path["fp8"], path["reason"]) == ("fast", True, False, "")
    assert of(found, "trained")[0]["fp8"]["target"] == "off"


def test_replicas_that_compute_in_other_formats_are_refused(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([Pace(fast=True, fp8=True), Pace(fast=True)])
    monkeypatch.setattr("paceline.pipeline.threads.pace_of", lambda *asked: next(paces))
    with pytest.raises(RunError, match=r"the target's products.*fp8.*torch\.bfloat16"):
        run(settings("run", target={"dtype": "bfloat16"}, train={"policy": "eager"}, pipeline={"targets": ["cpu"] * 2}))
