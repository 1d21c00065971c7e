"""True acceptance while a run trains: what `evaluate` measures, for no step's sake, and the best is chosen by it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained_run import events, of, run

from paceline.blocks import anchor_candidates
from paceline.checkpoint import store
from paceline.config import RunSettings
from paceline.data.manifest import Origin, tokenizer_fingerprint
from paceline.data.writer import writing
from paceline.decode.evaluate import Evaluation
from paceline.decode.generate import generate
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.pipeline import evaluator as evaluator_module
from paceline.pipeline.evaluator import Evaluator
from paceline.pipeline.handover import Handover
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.export import export
from paceline.recipes.train import train
from paceline.recipes.train_stop import StopRequest
from paceline.recipes.train_tell import Teller
from paceline.records import Interrupted, RunError, StepReport
from paceline.target.load import TargetFacts, load_tokenizer
from paceline.target.model import DecodingTarget

NEW = 16
PROMPTS = [[5 + at, 9 + 2 * at] for at in range(4)]
Rows = list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def answers(tiny: TargetFacts) -> Rows:
    """The target's own answers to the prompts: what can be learnt by heart."""
    target = DecodingTarget(tiny, (), dtype=torch.float32, device="cpu")
    done = dict(generate(target, PROMPTS, max_new_tokens=NEW, rows=4))
    return [([*prompt, *done[at].token_ids], len(prompt)) for at, prompt in enumerate(PROMPTS)]


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], answers: Rows
) -> Callable[..., RunSettings]:
    dataset, held = write_dataset(answers * 6), write_dataset(answers, "held")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": " ".join(f"w{token}" for token in prompt)}) for prompt in PROMPTS]
    prompts.write_text("\n".join(lines))

    def make(
        name: str, *, looks: bool = True, held_out: bool = False, evaluate: Any = None, **changes: dict[str, object]
    ) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 2},
            "train": {"epochs": 40, "max_steps": 24, "context_slots": 120, "anchor_slots": 40, "anchors_per_sample": 8}
            | {"dtype": "float32", "log_every": 1, "lr": 2e-2, "optimizer": "muon"},
            "checkpoint": {"every_steps": 1000},
            "evaluate": {},
        }
        if looks:
            tree["evaluate"] = {"device": "cpu", "prompts": str(prompts), "tau_every_steps": 8}
            tree["evaluate"] |= {"max_new_tokens": NEW, "rows": 3, **(evaluate or {})}
        if held_out:
            tree["evaluate"] |= {"held_out": str(held), "every_steps": 1000}
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return RunSettings.model_validate(tree)

    return make


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state that is due is evaluated, because training waits: as if evaluating took no time."""
    claim = Handover.claim

    def waiting(self: Handover, steps: int) -> bool:
        with self._changed:
            assert not self._due(steps) or self._changed.wait_for(lambda: self._job is None or self._left, 60)
        return claim(self, steps)

    monkeypatch.setattr(Handover, "claim", waiting)


@pytest.mark.usefixtures("patient")
def test_it_is_what_evaluate_measures_and_training_knows_nothing(settings: Any) -> None:
    tree = settings("one", checkpoint={"every_steps": 1000, "keep": 9})
    found, weights = run(tree)
    plain, expected = run(settings("plain", looks=False))
    assert of(found, "step") == of(plain, "step")
    assert all(torch.equal(weights[key], expected[key]) for key in expected)

    told = of(found, "evaluated")
    assert [event["steps"] for event in told] == [8, 16, 24]
    for event in told[2:]:
        report = evaluate(
            Path(tree.run_dir), tree.evaluate.prompts, Asking(NEW), device="cpu", dtype="float32", rows=3,
            timed_prompts=0, untrained_prompts=0, console=Console(json=True), checkpoint=str(event["steps"]),
        )  # fmt: skip
        assert (event["tau"], event["tau_pooled"]) == (report["tau_trained"], report["tau_pooled"])
        assert event["slot_acceptance_K"] == list(report["per_slot_acceptance"][1:])
        assert event["prompts"] == report["prompts"] == 4
    assert told[-1]["tau"] > 1.4, "else nothing was compared"
    trained = of(found, "trained")[0]
    assert (trained["tau"], trained["tau_steps"], trained["best_by"]) == (told[-1]["tau"], 24, "tau")
    # Teacher-forced, over the 20 steps before, summed by hand.
    last = of(found, "step")[-20:]
    shares = [sum(s["accepted_K"][k] for s in last) / sum(s["available_K"][k] for s in last) for k in range(3)]
    assert told[-1]["estimate_slot_acceptance_K"] == pytest.approx(shares)
    assert told[-1]["estimate"] == pytest.approx(1 + sum(shares))
    assert of(found, "disagreement") == []


def test_nobody_waits_for_a_slow_one(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation ends only once the last step but one is made; were anybody waiting, neither would."""
    late, on_step, decode = threading.Event(), Teller.on_step, Evaluator._decode

    def noted(self: Teller, report: StepReport) -> None:
        on_step(self, report)
        if report.step == 22:
            late.set()

    def slow(self: Evaluator, order: Any, new: int) -> Any:
        assert new != NEW or late.wait(60)
        return decode(self, order, new)

    monkeypatch.setattr(Teller, "on_step", noted)
    monkeypatch.setattr(Evaluator, "_decode", slow)
    found, _ = run(settings("one", evaluate={"tau_every_steps": 4}))
    order = [(event["event"], event.get("step", event.get("steps"))) for event in found]
    assert order.index(("evaluated", 4)) > order.index(("step", 22))
    assert [(e["steps"], e["busy_with"]) for e in of(found, "evaluation_skipped")] == [(n, 4) for n in (8, 12, 16, 20)]
    assert [event["steps"] for event in of(found, "evaluated")] == [4, 24], "the end is waited for"


TAUS = {8: 1.5, 16: 3.9, 24: 1.0}


@pytest.mark.usefixtures("patient")
def test_the_best_is_chosen_by_it(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(TAUS.values())
    monkeypatch.setattr(
        evaluator_module, "acceptance", lambda done, size: Evaluation(6, 9, 18, next(told), 2.0, (1.0, 0.5, 0.3, 0.2))
    )
    evaluate = {"disagreement": 0.01}
    tree = settings("one", held_out=True, evaluate=evaluate, checkpoint={"every_steps": 2, "keep": 1})
    found, weights = run(tree)
    place = Path(tree.run_dir)
    assert [event["best"] for event in of(found, "evaluated")] == [True, True, False]
    assert {event["best"] for event in of(found, "held_out")} == {False}
    assert [event["steps"] for event in of(found, "held_out")] == [8, 16, 24], "looked at with the same state"
    assert of(found, "trained")[0]["best"] == {"steps": 16, "tau": 3.9}
    saved = store.named(place, "best", ["drafter.safetensors"])
    assert saved.steps == 16
    assert not torch.equal(load_file(saved.folder / "drafter.safetensors")["fc.weight"], weights["fc.weight"])
    assert 8 not in store.saved_steps(place), "who was the best is not kept for ever"
    assert of(found, "plan")[0]["best_by"] == "tau"
    held = {event["steps"]: event["acceptance"] for event in of(found, "held_out")}
    assert {event["steps"]: event["estimate"] for event in of(found, "evaluated")} == pytest.approx(held)
    # It falls short of the estimate in the end, which is the alarm.
    alarm = of(found, "disagreement")[-1]
    assert (alarm["steps"], alarm["tau"], alarm["estimate"]) == (24, 1.0, pytest.approx(held[24]))
    assert alarm["limit"] == pytest.approx(0.99 * held[24])
    assert "1.00 tokens a cycle where training sees" in alarm["message"]
    assert 16 not in [event["steps"] for event in of(found, "disagreement")]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("when", ["rehearsing", pytest.param("later", marks=pytest.mark.slow)])
def test_one_that_fails(settings: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    decode, calls = Evaluator._decode, []

    def failing(self: Evaluator, order: Any, new: int) -> Any:
        calls.append(new)
        if len(calls) == (1 if when == "rehearsing" else 3):
            raise RuntimeError("device lost")
        return decode(self, order, new)

    monkeypatch.setattr(Evaluator, "_decode", failing)
    tree = settings(when)
    if when == "rehearsing":
        with pytest.raises(RunError, match="evaluator on cpu failed while compiling .*longest prompts.*device lost"):
            run(tree)
        return
    found, _ = run(tree)
    assert [event["steps"] for event in of(found, "evaluated")] == [8]
    (failed,) = of(found, "evaluator_failed")
    assert failed["doing"] == "evaluating the drafter after step 16"
    assert "device lost" in failed["message"]
    trained = of(found, "trained")[0]
    assert trained["evaluator_failed"] == failed["message"]
    assert trained["best"] == {"steps": 8, "tau": trained["tau"]}
    assert len(of(found, "step")) == 24


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("stopped", [16, 20], ids=["when it is due", "while it decodes"])
def test_what_was_not_known_at_a_stop_is_known_when_the_run_goes_on(
    settings: Any, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    """The state after step 16 is evaluated from its checkpoint, also from one that is no longer the newest."""
    whole, weights = run(settings("whole"))
    asked, known, on_step, decode = threading.Event(), threading.Event(), Teller.on_step, Evaluator._decode

    def noted(self: Teller, report: StepReport) -> None:
        on_step(self, report)
        if report.step + 1 == stopped - 1:
            assert known.wait(60)
            asked.set()

    def slow(self: Evaluator, order: Any, new: int) -> Any:
        assert "step 16" not in self.doing or asked.wait(60)
        done = decode(self, order, new)
        if "step 8" in self.doing:
            known.set()
        return done

    tree = settings("stopped", checkpoint={"every_steps": 1000, "keep": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Teller, "on_step", noted)
        patch.setattr(Evaluator, "_decode", slow)
        patch.setattr(StopRequest, "__call__", lambda self: asked.is_set())
        with pytest.raises(Interrupted):
            train(tree, console=Console(json=True))
    place = Path(tree.run_dir)
    assert store.newest(place, previous=False, tell=print).steps == stopped  # type: ignore[union-attr]
    assert [event["steps"] for event in of(events(place), "evaluated")] == [8]

    train(tree, console=Console(json=True), resume=True)
    found = events(place)
    told, expected = ([{**e, "s": 0} for e in of(which, "evaluated")] for which in (found, whole))
    assert told == expected
    assert of(found, "step") == of(whole, "step")
    assert all(of(found, "trained")[0][key] == of(whole, "trained")[0][key] for key in ("best", "tau", "tau_steps"))
    assert torch.equal(load_file(place / "drafter" / "model.safetensors")["fc.weight"], weights["fc.weight"])


@pytest.mark.usefixtures("patient")
def test_the_best_stays_when_a_run_goes_on_without_an_evaluator(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = settings("cut", checkpoint={"every_steps": 1, "keep": 1})
    place = Path(tree.run_dir)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(StopRequest, "__call__", lambda self: len(of(events(place), "evaluated")) == 1)
        train(tree, console=Console(json=True))
    (told,) = of(events(place), "evaluated")
    without = settings("cut", evaluate={"device": None}, checkpoint={"every_steps": 1, "keep": 1})
    summary = train(without, console=Console(json=True), resume=True)
    assert (summary["best"], summary["best_by"]) == ({"steps": 8, "tau": told["tau"]}, None)
    assert (place / "checkpoints" / "best").read_text() == "step-00000008"
    assert store.saved_steps(place)[0] == 8


def test_a_last_evaluation_that_a_stop_ends_is_told(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = settings("asked", evaluate={"tau_every_steps": 1000})
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_between", lambda self: self._plan.handover.stop() or self._plan.handover.look())
        patch.setattr(Evaluator, "warm", lambda self: self._engine.prepare() or {})
        summary = train(tree, console=Console(json=True))
    assert of(events(Path(tree.run_dir)), "evaluation_skipped") == [
        {"schema": 1, "event": "evaluation_skipped", "steps": 24, "busy_with": 24}
    ]
    assert (summary["tau"], summary["evaluator_failed"]) == (None, None)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, tiny: TargetFacts, shape: Any) -> RunSettings:
    """Settings of a step that learns nothing, of a drafter that knows many rows by heart."""
    fingerprint = tokenizer_fingerprint(load_tokenizer(str(tiny_folder)))
    origin = Origin(str(tiny_folder), "r", fingerprint, None, "given ids", shape.mask_token_id, [], {}, 0)
    target = DecodingTarget(tiny, (), dtype=torch.float32, device="cpu")

    rows, new = 32, 32
    folder = tmp_path_factory.mktemp("many")
    prompts = [[5 + at, 9 + 2 * at] for at in range(rows)]
    done = dict(generate(target, prompts, max_new_tokens=new, rows=rows))
    for name in ("dataset", "held"):
        with writing(folder / name, overwrite=True) as writer:
            for at, prompt in enumerate(prompts):
                ids = np.array([*prompt, *done[at].token_ids] + [7] * (name == "dataset"))  # another fingerprint
                mask = np.arange(len(ids)) >= len(prompt)
                writer.add(ids, mask, len(anchor_candidates(mask)), line=1 + at)
            writer.complete(origin)
    tree = {
        "run_dir": str(folder / "run"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump() | {"taps": (0, 1, 3)},
        "data": {"dataset": str(folder / "dataset"), "token_budget": 280, "align": 8, "buckets": 1},
        "train": {"epochs": 99, "max_steps": 130, "context_slots": 280, "anchor_slots": 100}
        | {"anchors_per_sample": 12, "dtype": "float32", "lr": 3e-2, "optimizer": "muon"},
        "checkpoint": {"every_steps": 1000},
    }
    train(RunSettings.model_validate(tree), console=Console(json=True))
    export(folder / "run", folder / "drafter", dtype="float32", overwrite=False)
    tree["train"] |= {"max_steps": 1, "lr": 1e-9, "init_from": str(folder / "drafter")}
    tree["evaluate"] = {"held_out": str(folder / "held"), "device": "cpu", "max_new_tokens": new}
    return RunSettings.model_validate(tree)


def other(**changes: Any) -> Callable[..., Drafter]:
    return lambda shape, width: Drafter(shape.model_copy(update=changes), width)


BREAKS: dict[str, Any] = {
    "none": {},
    "taps": {"DecodingTarget": lambda facts, taps, **how: DecodingTarget(facts, [tap + 1 for tap in taps], **how)},
    "rotary base": {"Drafter": other(rope_theta=1e6)},
    "mask token": {"Drafter": other(mask_token_id=100)},
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_convention_raises_the_alarm(
    many: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Only the evaluator's: what a served drafter would do."""
    for name, value in BREAKS[broken].items():
        monkeypatch.setattr(evaluator_module, name, value)
    tree = many.model_copy(update={"run_dir": str(tmp_path / "run")})
    found, _ = run(tree)
    (told,) = of(found, "evaluated")
    assert told["estimate"] > 3
    alarms = of(found, "disagreement")
    if broken == "none":
        assert alarms == []
        assert told["tau"] > 3
        return
    (alarm,) = alarms
    assert (alarm["tau"], alarm["estimate"]) == (told["tau"], told["estimate"])
    assert alarm["limit"] == (1 - tree.evaluate.disagreement) * told["estimate"] > told["tau"]
    assert "--probe" in alarm["message"]
