"""A whole run in threads: the loss curve does not depend on replicas, caches or credits, and faults end it."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import RunSettings
from paceline.config_file import dump_settings, load_settings
from paceline.data import loader
from paceline.data.prefetch import Prefetch
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.pipeline.channel import OrderedChannel
from paceline.pipeline.dispenser import Dispenser
from paceline.recipes import train_inputs as inputs
from paceline.recipes.train import train
from paceline.records import FeatureBatch, RunError, TokenBatch, UserError
from paceline.target import load
from paceline.target.model import FeatureTarget
from paceline.train.step import DrafterStep


def run(settings: RunSettings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and return the exact loss of every step and the final weights."""
    train(settings, console=Console(json=True))
    events = list(read_events(Path(settings.run_dir)))
    losses = [event["loss_sum"] for event in events if event["event"] == "step"]
    return losses, load_file(Path(settings.run_dir) / "drafter" / "model.safetensors")


OTHERS = {
    "two replicas": {"pipeline": {"targets": ["cpu", "cpu"]}},
    "three replicas and hardly any credit": {"pipeline": {"targets": ["cpu"] * 3, "credit_gib": 1e-6}},
    "features kept in memory": {"pipeline": {"feature_cache": "memory"}},
    "features kept on disk": {"pipeline": {"feature_cache": "disk"}},
    "built ahead one by one": {"data": {"prefetch": 1}},
    "a cache with room for a part": {"pipeline": {"feature_cache": "memory", "feature_cache_gib": 2e-4}},
}


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_read_the_targets_files_once(settings: Any, monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    read, whole = [], load._load

    def counted(*given: Any) -> Any:
        read.append(given)
        return whole(*given)

    monkeypatch.setattr(load, "_load", counted)
    run(settings("run", pipeline={"targets": ["cpu"] * replicas}, train={"max_steps": 2}))
    assert len(read) == 1


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_losses_and_weights_are_bit_identical_however_features_are_made(settings: Any, optimizer: str) -> None:
    expected, weights = run(settings("one", train={"optimizer": optimizer}))
    assert len(expected) == 20
    assert expected[-1] < expected[0]
    for name, changes in OTHERS.items():
        losses, other = run(settings(name.replace(" ", "-"), train={"optimizer": optimizer}, **changes))
        assert losses == expected, name
        assert all(torch.equal(other[key], weights[key]) for key in weights), name


def test_with_features_as_bytes_losses_are_near_and_as_reproducible(settings: Any) -> None:
    """Whoever makes, keeps and reads them."""
    exact, _ = run(settings("exact"))
    bytes_ = {"target": {"features": "fp8"}}
    expected, weights = run(settings("bytes", **bytes_))
    assert expected != exact
    assert expected == pytest.approx(exact, rel=0.02)
    for name in ("three replicas and hardly any credit", "features kept in memory", "features kept on disk"):
        losses, other = run(settings(f"bytes-{name.replace(' ', '-')}", **bytes_, **OTHERS[name]))
        assert losses == expected, name
        assert all(torch.equal(other[key], weights[key]) for key in weights), name


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
@pytest.mark.parametrize("batches_per_step", [1, 2])
def test_two_drafter_ranks_make_the_steps_of_one(settings: Any, optimizer: str, batches_per_step: int) -> None:
    """Sums of sums: only the rounding of a sum in another order differs, whichever rank got how many micro-batches."""
    changed = {"optimizer": optimizer, "batches_per_step": batches_per_step, "lr": 1e-3}
    expected, weights = run(settings("one", train=changed))
    for ranks in (2, 3):
        losses, other = run(settings(f"ranks{ranks}", train=changed, pipeline={"drafters": ["cpu"] * ranks}))
        assert losses == pytest.approx(expected, rel=1e-4)
        for key in weights:
            torch.testing.assert_close(other[key], weights[key], rtol=0, atol=2e-3)
    again, _ = run(settings("again", train=changed, pipeline={"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}))
    first, _ = run(settings("first", train=changed, pipeline={"drafters": ["cpu"] * 2}))
    assert again == first, "two ranks are as reproducible as one"


LAYOUTS: dict[str, dict[str, object]] = {
    "bucketed": {"layout": "bucketed"},
    "packed": {"layout": "packed", "token_budget": 100},
    "packed, samples drawn anew": {"layout": "packed", "token_budget": 100, "reshuffle": "samples"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_changes_that(settings: Any, name: str) -> None:
    data = LAYOUTS[name]
    expected, _ = run(settings("one", data=data))
    assert expected[-1] < expected[0]
    others = ["two replicas", "built ahead one by one"]
    for other in others + ["features kept in memory"] * (data.get("reshuffle") != "samples"):
        changes = {"data": data} | {key: data | more if key == "data" else more for key, more in OTHERS[other].items()}
        assert run(settings(other.replace(" ", "-"), **changes))[0] == expected, other


def test_several_datasets_at_their_weights(
    settings: Any, write_dataset: Callable[..., Path], random_rows: list
) -> None:
    folders = [str(write_dataset(rows, name)) for rows, name in ((random_rows[:9], "a"), (random_rows[9:], "b"))]
    data = {"dataset": folders, "weights": [1, 0.5], "reshuffle": "samples"}
    expected, _ = run(settings("one", data=data))
    assert run(settings("two", data=data, pipeline={"targets": ["cpu", "cpu"]}))[0] == expected
    provenance = json.loads((Path(settings("one").run_dir) / "provenance.json").read_text())
    assert [made["folder"] for made in provenance["dataset"]] == folders


def test_too_many_damaged_rows_end_the_run_with_the_place_of_one(settings: Any) -> None:
    tree = settings("damaged")
    manifest = Path(tree.data.dataset) / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "largest_id": told["largest_id"] - 1}))
    sentence = (
        rf"of {tree.data.dataset} are, row \d+ because it holds the id {told['largest_id']}, .*damaged\. .* --verify"
    )
    with pytest.raises((RunError, UserError), match=sentence):
        train(tree, console=Console(json=True))
    assert not [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def test_a_step_without_a_label_is_not_applied_and_named(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in which no anchor is found, each a step by itself; a plan that knew of it would have left them out."""
    bare, whole = {0, 8, 16}, loader.blocks.sample_anchors

    def sample(candidates: Any, most: int, *, seed: int, epoch: int, sample: int) -> Any:
        return whole(candidates[: 0 if sample in bare else None], most, seed=seed, epoch=epoch, sample=sample)

    monkeypatch.setattr(loader.blocks, "sample_anchors", sample)
    tree = settings("run", data={"max_batch": 1}, train={"max_steps": 24})
    run(tree)
    place = Path(tree.run_dir)
    events = list(read_events(place))
    not_applied = [event for event in events if event["event"] == "step" and not event["applied"]]
    assert [(math.isnan(event["loss"]), event["blocks"]) for event in not_applied] == [(True, 0)] * 3
    lines = [json.loads(line) for line in (place / "quarantine.jsonl").read_text().splitlines()]
    assert {row["dataset_row"] for line in lines for row in line["rows"]} == bare
    assert events[-1]["rejected_steps"] == 3


def test_an_error_of_the_loader_blames_no_micro_batch(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(batches: Iterator[TokenBatch], *rest: Any, **more: Any) -> Iterator[TokenBatch]:
        yield from islice(batches, 3)
        raise RunError("the disk is gone")

    monkeypatch.setattr(inputs, "watched", failing)
    with pytest.raises(RunError, match=r"target replica 0 on cpu failed while running \(waiting for data\): the disk"):
        train(settings("gone"), console=Console(json=True))


def test_everyone_is_woken_before_the_loader_is_waited_for(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for owner, method in ((Dispenser, "stop"), (OrderedChannel, "stop"), (Prefetch, "close")):
        whole = getattr(owner, method)

        def noted(self: Any, whole: Any = whole, name: str = f"{owner.__name__}.{method}") -> None:
            order.append(name)
            whole(self)

        monkeypatch.setattr(owner, method, noted)
    run(settings("order"))
    assert order[:3] == ["Dispenser.stop", "OrderedChannel.stop", "Prefetch.close"]


def test_the_cache_spares_the_target(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    features = FeatureTarget.features

    def counted(self: FeatureTarget, *args: Any) -> torch.Tensor:
        calls.append(threading.current_thread().name)
        return features(self, *args)

    monkeypatch.setattr(FeatureTarget, "features", counted)
    run(settings("plain"))
    without = len(calls)
    calls.clear()
    run(settings("kept", pipeline={"feature_cache": "memory"}))
    epoch = len({tuple(batch) for batch in _plan_rows(settings)})
    assert len(calls) == 1 + epoch  # one rehearsal, then each micro-batch once
    assert without > 2 * len(calls)


def _plan_rows(settings: Any) -> list[tuple[int, ...]]:
    from paceline.data import loader
    from paceline.data.mixture import open_mixture

    tree = settings("unused")
    return [cut.rows for cut in loader.schedule(open_mixture(tree.data), tree.data, tree.train)]


def test_the_saved_settings_give_the_same_run_again(settings: Any, tmp_path: Path) -> None:
    first = settings("first")
    losses, _ = run(first)
    saved = tmp_path / "first" / "settings.yaml"
    assert load_settings(saved) == first
    again, _ = run(load_settings(saved, [f"run_dir={tmp_path / 'again'}"]))
    assert again == losses
    assert dump_settings(first) == saved.read_text()


@pytest.mark.parametrize("role", ["drafter rank 0", "drafter rank 1"])
def test_a_fault_in_the_drafter_ends_the_run_named_within_seconds(
    settings: Any, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    whole = DrafterStep.load
    calls = {"count": 0}

    def failing(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == role:
            calls["count"] += 1
            if calls["count"] == 3:
                raise RuntimeError("device lost")
        return whole(self, *args)

    monkeypatch.setattr(DrafterStep, "load", failing)
    ranks = {"targets": ["cpu", "cpu"], "drafters": ["cpu"] * (1 + int(role[-1]))}
    tree = settings("failing", pipeline=ranks, train={"batches_per_step": 2})
    began = time.monotonic()
    with pytest.raises(
        RunError, match=rf"^{role} on cpu failed while running \(.*micro-batch \d+.*\): RuntimeError: device"
    ):
        train(tree, console=Console(json=True))
    assert time.monotonic() - began < 20
    events = list(read_events(Path(tree.run_dir)))
    assert events[-1]["event"] == "failed"
    assert role in events[-1]["message"]
    assert not (Path(tree.run_dir) / "drafter").exists()
    assert not any("target" in t.name or "drafter" in t.name for t in threading.enumerate())


def test_weights_that_give_no_finite_loss_any_more_end_the_run_with_a_report(settings: Any) -> None:
    sentence = (
        r"drafter rank 0 .*At most 5 \(guard.rejected\) of 100 steps .* got 6 \(step \d+: loss nan, gradient norm .*, "
        r"rows \d+, .* no whole checkpoint from before them .*quarantine.jsonl: .* lower train.lr \(1e\+30\)"
    )
    with pytest.raises(RunError, match=sentence):
        run(settings("hot", train={"lr": 1e30, "clip": 1e30}))
    folder = Path(settings("hot").run_dir)
    told = list(read_events(folder))
    rejected = [event["step"] for event in told if event["event"] == "rejected"]
    assert len(rejected) == 6
    quarantine = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert {line["step"] for line in quarantine} == set(rejected)
    assert {row["dataset"] for line in quarantine for row in line["rows"]} == {settings("hot").data.dataset}


def test_rows_of_several_datasets_are_told_by_their_own_numbers(
    settings: Any, write_dataset: Callable[..., Path], random_rows: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is set aside can be found again; two ranks tell all of a step's micro-batches."""
    folders = [str(write_dataset(rows, name)) for rows, name in ((random_rows[:9], "a"), (random_rows[9:], "b"))]
    load, seen = DrafterStep.load, []

    def poisoned(self: DrafterStep, batch: FeatureBatch) -> None:
        if batch.tokens.step == 2:
            seen.extend(batch.tokens.samples)
            batch = FeatureBatch(batch.tokens, batch.features_TD * float("nan"), batch.positions_T)
        load(self, batch)

    monkeypatch.setattr(DrafterStep, "load", poisoned)
    changes = {"data": {"dataset": folders}, "train": {"batches_per_step": 3, "max_steps": 4}}
    run(settings("two", **changes, pipeline={"drafters": ["cpu"] * 2}))
    lines = (Path(settings("two").run_dir) / "quarantine.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert sorted((line["rank"], line["micro_batch"]) for line in told) == [(0, 0), (1, 0)]
    rows = [row for line in told for row in line["rows"]]
    assert sorted(row["row"] for row in rows) == sorted(seen)
    for row in rows:
        assert (row["dataset"], row["dataset_row"]) == (folders[row["row"] >= 9], row["row"] - 9 * (row["row"] >= 9))


def test_memory_that_grows_is_an_event(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = iter(range(10**6))
    monkeypatch.setattr("paceline.observe.growth._EVERY_S", 0.0)
    monkeypatch.setattr("paceline.observe.growth._WARM_S", 0.0)
    monkeypatch.setattr("paceline.observe.growth._SAMPLES", 8)
    monkeypatch.setattr("paceline.observe.growth.memory", lambda devices: {"host": 1e6 * next(minutes)})
    run(settings("leak"))
    told = list(read_events(Path(settings("leak").run_dir)))
    grown = [event for event in told if event["event"] == "memory_growth"]
    assert len(grown) == 2
    assert {event["where"] for event in grown} == {"host"}
    assert [event["mib"] for event in grown] == [7e6, 14e6]
    assert all(event["mib_per_min"] > 0 for event in grown)


def test_every_event_carries_the_schema_version(settings: Any) -> None:
    tree = settings("events")
    run(tree)
    events = list(read_events(Path(tree.run_dir)))
    assert {event["schema"] for event in events} == {1}
    kinds = {"started", "machine", "data", "plan", "stage", "role", "checksums", "step", "trained"}
    assert {event["event"] for event in events} - {"sample"} == kinds
    assert [event["shards"] for event in events if event["event"] == "checksums"] == [1]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(20))


def test_a_finished_run_is_not_overwritten(settings: Any) -> None:
    run(settings("done"))
    with pytest.raises(UserError, match="already holds a trained drafter"):
        run(settings("done"))


def test_weights_are_float32_and_the_process_is_unchanged_beside_bfloat16_replicas(settings: Any) -> None:
    """Loading a bfloat16 target switches the process's default dtype for a while."""
    curves = []
    for attempt in range(4):
        tree = settings(f"bf16-{attempt}", target={"dtype": "bfloat16"}, pipeline={"targets": ["cpu"] * 3})
        losses, weights = run(tree)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert torch.get_default_dtype() == torch.float32
        curves.append(losses)
    assert all(curve == curves[0] for curve in curves)


def test_a_default_dtype_that_another_thread_has_switched_does_not_reach_the_drafter(shape: Any) -> None:
    expected = Drafter(shape, 64).initialise(3).state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        drafter = Drafter(shape, 64).initialise(3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert all(torch.equal(value, expected[name]) for name, value in drafter.state_dict().items())
