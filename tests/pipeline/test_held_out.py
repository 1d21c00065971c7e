"""Held-out losses on the road of training: right, the same for any layout and any ranks, and training knows nothing."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained_run import events, of, run

from paceline import blocks
from paceline.checkpoint import store
from paceline.config import DataSettings, RunSettings, TrainSettings
from paceline.data.loader import micro_batches
from paceline.data.mixture import Mixture
from paceline.data.store import open_dataset
from paceline.drafter.model import Drafter
from paceline.drafter.packed import pack, unpack
from paceline.observe.console import Console
from paceline.recipes.train import train
from paceline.recipes.train_tell import Teller
from paceline.records import FeatureBatch, RunError, StepReport, TokenBatch
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import FeatureTarget
from paceline.target.replica import TargetReplica
from paceline.train.step import DrafterStep

ROWS = 10  # that are looked at, of 14
LAYOUTS: dict[str, dict[str, object]] = {"trimmed": {}, "packed": {"layout": "packed", "token_budget": 100}}


def held_rows() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(5)
    return [(rng.integers(4, 128, rng.integers(8, 41)).tolist(), int(rng.integers(2, 6))) for _ in range(14)]


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> Callable[..., RunSettings]:
    dataset, held = write_dataset(random_rows), write_dataset(held_rows(), "held")

    def make(name: str, *, looks: bool = True, **changes: dict[str, object]) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3, "reshuffle": "batches"},
            "train": {"epochs": 20, "max_steps": 11, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
            | {"dtype": "float32", "log_every": 1, "lr": 1e-2},
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu"]},
            "evaluate": {"held_out": str(held), "every_steps": 3, "max_rows": ROWS} if looks else {},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return RunSettings.model_validate(tree)

    return make


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_bit_identical_with_and_without(settings: Any, layout: str, optimizer: str) -> None:
    for name, changes in (("one", {}), ("two", {"pipeline": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}})):
        changes = changes | {"data": LAYOUTS[layout], "train": {"optimizer": optimizer, "batches_per_step": 2}}
        plain, expected = run(settings(f"{name}-plain", looks=False, **changes))
        looked, weights = run(settings(f"{name}-looked", **changes))
        assert len(of(plain, "step")) == 11
        assert of(looked, "step") == of(plain, "step")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
        assert [event["steps"] for event in of(looked, "held_out")] == [3, 6, 9, 11]
        assert of(plain, "held_out") == []


def loss_alone(
    tiny: TargetFacts,
    shape: Any,
    weights: dict[str, torch.Tensor],
    folder: Path,
    anchors: int,
    seen: Callable[[torch.Tensor], torch.Tensor] = lambda features_TD: features_TD,
) -> float:
    """The mean over all blocks of the first rows, a row at a time, by an epoch of the training loader with seed 0."""
    train = TrainSettings(context_slots=41, anchor_slots=anchors, anchors_per_sample=anchors, dtype="float32")
    drafter = Drafter(shape, tiny.hidden_size)
    drafter.load_state_dict(weights)
    step = DrafterStep(drafter, load_ends(tiny), train)
    step.clear()
    target = FeatureTarget(tiny, shape.taps, dtype=torch.float32, device="cpu")
    data = DataSettings(dataset=str(folder), max_batch=1)
    for tokens in micro_batches(Mixture([open_dataset(folder)]), data, train.model_copy(update={"epochs": 1}), 4):
        step.load(FeatureBatch(tokens, seen(target.features(tokens)), blocks.context_positions(tokens.lengths)))
        step.micro()
    return step.report(tokens, 0.0).loss


@pytest.mark.usefixtures("every_save")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_loss_of_the_weights_after_the_step(
    settings: Any, tiny: TargetFacts, shape: Any, write_dataset: Callable[..., Path], layout: str
) -> None:
    first = write_dataset(held_rows()[:ROWS], "first-rows")
    tree = settings("one", data=LAYOUTS[layout], checkpoint={"every_steps": 3, "keep": 9}, train={"max_steps": 10})
    found, weights = run(tree)
    losses = {event["steps"]: event["loss"] for event in of(found, "held_out")}
    after = {10: weights}
    for steps in (3, 6, 9):
        folder = Path(tree.run_dir) / "checkpoints" / f"step-{steps:08d}"
        after[steps] = load_file(folder / "drafter.safetensors")
    assert losses.keys() == after.keys()
    assert len(set(losses.values())) == 4
    for steps, state in after.items():
        assert losses[steps] == pytest.approx(loss_alone(tiny, shape, state, first, 4), rel=1e-5)


def test_it_is_of_features_as_training_sees_them(
    settings: Any,
    tiny: TargetFacts,
    shape: Any,
    write_dataset: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seen(features_TD: torch.Tensor) -> torch.Tensor:
        widened_TD = torch.zeros_like(features_TD)
        unpack(pack(features_TD, len(shape.taps)), widened_TD)
        return widened_TD

    loaded: set[tuple[bool, torch.dtype]] = set()
    load = DrafterStep.load

    def noting(step: DrafterStep, batch: FeatureBatch) -> None:
        loaded.add((batch.tokens.held_out, batch.features_TD.dtype))
        load(step, batch)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterStep, "load", noting)
        found, weights = run(settings("one", target={"features": "fp8"}))
    assert loaded == {(False, torch.uint8), (True, torch.uint8)}
    first = write_dataset(held_rows()[:ROWS], "first-rows")
    last = of(found, "held_out")[-1]["loss"]
    assert last == pytest.approx(loss_alone(tiny, shape, weights, first, 4, seen), rel=1e-6)


OTHERS: dict[str, Any] = {
    "three replicas": {"pipeline": {"targets": ["cpu"] * 3, "credit_gib": 1e-6}},
    "features kept": {"pipeline": {"feature_cache": "memory"}},
    "built one by one": {"data": {"prefetch": 1}},
    "saved often": {"checkpoint": {"every_steps": 1}},
    "looked at less often": {"evaluate": {"every_steps": 6}},
}


def test_however_features_are_made_and_saved_it_is_the_same(settings: Any) -> None:
    one = {event["steps"]: event for event in of(run(settings("one"))[0], "held_out")}
    for name, changes in OTHERS.items():
        found = of(run(settings(name.replace(" ", "-"), **changes))[0], "held_out")
        assert [event["steps"] for event in found] == ([6, 11] if "evaluate" in changes else [3, 6, 9, 11]), name
        assert all(event == one[event["steps"]] | {"best": event["best"]} for event in found), name


def test_two_ranks_have_the_loss_of_one(settings: Any) -> None:
    slow = {"train": {"lr": 1e-4}}
    one = of(run(settings("one", **slow))[0], "held_out")
    for ranks in (2, 3):
        many = of(run(settings(f"ranks-{ranks}", pipeline={"drafters": ["cpu"] * ranks}, **slow))[0], "held_out")
        assert [event["loss"] for event in many] == pytest.approx([event["loss"] for event in one], rel=1e-5)
        for key in ("steps", "blocks", "tokens", "available_K", "best"):
            assert [event[key] for event in many] == [event[key] for event in one]


def test_what_is_told_of_it(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tree = settings("one")  # random data: what is learnt of it does not hold for other data for long
    summary = train(tree, console=Console())
    found = events(Path(tree.run_dir))
    told, losses = of(found, "held_out"), []
    for event in told:
        assert event["best"] == (event["loss"] < min(losses, default=math.inf))
        assert event["loss"] == event["loss_sum"] / event["weight_sum"]
        losses.append(event["loss"])
    assert {event["best"] for event in told} == {True, False}
    lowest = min(told, key=lambda event: event["loss"])
    assert summary["best"] == {"steps": lowest["steps"], "loss": lowest["loss"]}
    assert summary["held_out_loss"] == losses[-1]
    assert found[-1] == found[-1] | {"event": "trained", "best": summary["best"], "held_out_loss": losses[-1]}
    candidates = sum(min(len(ids) - prompt - 1, 4) for ids, prompt in held_rows()[:ROWS])
    assert {event["blocks"] for event in told} == {candidates}
    assert {event["tokens"] for event in told} == {sum(len(ids) for ids, _ in held_rows()[:ROWS])}
    assert of(found, "checksums") == [{"schema": 1, "event": "checksums", "shards": 2}], "its shards are compared too"
    text = capsys.readouterr().out
    assert "10 rows held out, looked at every 3 steps and at the end" in text
    assert f"held out after step 3: loss {losses[0]:.4f} accept" in text
    assert text.count("the best so far") == sum(event["best"] for event in told)
    provenance = json.loads((Path(tree.run_dir) / "provenance.json").read_text())
    assert provenance["held_out"]["folder"] == tree.evaluate.held_out


@pytest.mark.parametrize("lr", [1e-2, 0.3])
def test_the_best_stays_and_the_end_is_one_of_them(settings: Any, lr: float) -> None:
    tree = settings("one", train={"lr": lr}, checkpoint={"every_steps": 2, "keep": 1})
    found, weights = run(tree)
    lowest = min(of(found, "held_out"), key=lambda event: event["loss"])
    saved = store.named(Path(tree.run_dir), "best", ["drafter.safetensors"])
    assert saved.steps == lowest["steps"]
    assert saved.state["best"] == {"steps": lowest["steps"], "loss": lowest["loss"]}
    kept = store.saved_steps(Path(tree.run_dir))
    if lr == 0.3:
        assert kept == [11]
        assert lowest["steps"] == 11, "the end is the best"
        best = load_file(saved.folder / "drafter.safetensors")
        assert all(torch.equal(best[key], weights[key]) for key in weights)
    else:
        assert lowest["steps"] == kept[0] == 6
        assert kept[1:] in ([], [8], [10]), "the newest, which is not saved while one is being saved"


def test_no_row_of_it_is_kept_as_one_of_training(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both datasets' rows are numbered from 0, and features are kept by number."""
    from paceline.target.feature_cache import MemoryCache

    kept: list[tuple[int, ...]] = []
    put = MemoryCache.put
    monkeypatch.setattr(MemoryCache, "put", lambda self, rows, features: kept.append(rows) or put(self, rows, features))
    run(settings("kept", pipeline={"feature_cache": "memory"}, train={"max_steps": 30}))
    rows = [row for group in kept for row in group]
    assert sorted(rows) == list(range(24 + ROWS))


def test_bad_rows_of_it_are_set_aside_and_told_once(settings: Any, write_dataset: Callable[..., Path]) -> None:
    """It is the loss of the rows that are left, whatever the bad ones held."""
    good = held_rows()
    bad = [*good[:2], ([], 0), *good[2:5], ([*good[5][0][:-1], 5000], good[5][1]), *good[6:]]
    more = {"data": {"bad_rows": 0.2}, "train": {"max_steps": 6}}
    found = {}
    for name, rows in (("left", [*good[:5], *good[6:]]), ("bad", bad)):
        evaluate = {"held_out": str(write_dataset(rows, name)), "max_rows": 99}
        found[name], weights = run(settings(f"run-{name}", evaluate=evaluate, **more))
        assert weights
    told = of(found["bad"], "quarantined")
    assert [(event["row"], event["reason"]) for event in told] == [(2, "no tokens"), (6, "out of vocabulary")]
    assert of(found["bad"], "trained")[0]["quarantined_rows"] == 2
    assert of(found["left"], "quarantined") == []
    assert [event["steps"] for event in of(found["bad"], "held_out")] == [3, 6]
    assert of(found["bad"], "step") == of(found["left"], "step")
    drawn = sum(min(4, len(ids) - prompt - 1) for ids, prompt in [*good[:5], *good[6:]])
    assert {event["blocks"] for name in found for event in of(found[name], "held_out")} == {drawn}


def test_a_damaged_row_of_it_ends_the_run_with_its_place(settings: Any) -> None:
    tree = settings("damaged")
    manifest = Path(tree.evaluate.held_out) / "manifest.json"
    told = json.loads(manifest.read_text())
    ids = max(max(row) for row, _ in held_rows()[:ROWS])
    manifest.write_text(json.dumps({**told, "largest_id": ids - 1}))
    sentence = (
        rf"1 of the 14 of {tree.evaluate.held_out} are, row \d+ because it holds the id {ids}, .*0\.\.{ids - 1}: the"
    )
    with pytest.raises(RunError, match=sentence):
        train(tree, console=Console(json=True))


@pytest.mark.parametrize("steps", [3, 11])
def test_a_loss_that_was_due_when_the_run_broke_is_known_when_it_goes_on(
    settings: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The step was made and is saved; the held-out rows behind it were not looked at, because no replica was left."""
    found, weights = run(settings("whole"))
    made, on_step, features = threading.Event(), Teller.on_step, TargetReplica._features

    def noted(self: Teller, report: StepReport) -> None:
        on_step(self, report)
        if report.step + 1 == steps:
            made.set()

    def breaking(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
        if tokens.held_out and tokens.step + 1 == steps:
            assert made.wait(60)
            raise RuntimeError("device lost")
        return features(self, tokens)

    tree = settings("broken", pipeline={"restarts": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Teller, "on_step", noted)
        patch.setattr(TargetReplica, "_features", breaking)
        with pytest.raises(RunError, match=f"The state after step {steps} is saved"):
            train(tree, console=Console(json=True))
    train(tree, console=Console(json=True), resume=True)
    place = Path(tree.run_dir)
    assert of(events(place), "held_out") == of(found, "held_out")
    end = load_file(place / "drafter" / "model.safetensors")
    assert all(torch.equal(end[key], weights[key]) for key in weights)
    best = Path(settings("whole").run_dir) / "checkpoints" / "best"
    assert (place / "checkpoints" / "best").read_text() == best.read_text()


def test_held_out_rows_at_which_two_replicas_fail_are_named_as_such(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = TargetReplica._features

    def breaking(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
        if tokens.held_out:
            raise RuntimeError("device lost")
        return features(self, tokens)

    monkeypatch.setattr(TargetReplica, "_features", breaking)
    with pytest.raises(
        RunError, match=r"holds rows \d[\d, ]* of evaluate.held_out \(numbered behind all training rows\), so"
    ):
        train(settings("broken"), console=Console(json=True))


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
def test_nothing_is_compiled_again(settings: Any) -> None:
    changes = {"train": {"policy": "compiled", "max_steps": 4, "context_slots": 128}}
    plain, expected = run(settings("plain", looks=False, **changes))
    looked, weights = run(settings("looked", evaluate={"every_steps": 2}, **changes))
    assert of(looked, "step") == of(plain, "step")
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert [event["steps"] for event in of(looked, "held_out")] == [2, 4]
    assert (of(looked, "recompile"), of(looked, "trained")[0]["recompiles"]) == ([], 0)
