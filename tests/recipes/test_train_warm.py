"""Runs that start from another drafter's weights: what is trained, told and kept, and how they go on."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import DrafterSettings, RunSettings
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.recipes.train import train
from paceline.recipes.train_stop import StopRequest
from paceline.recipes.train_warm import warm_start
from paceline.records import Interrupted, UserError
from paceline.target.load import TargetFacts


@pytest.fixture
def given(tiny: TargetFacts, shape: DrafterSettings, tmp_path: Path) -> Path:
    """A drafter's folder in the z-lab layout, written without paceline's own exporter."""
    folder = tmp_path / "given"
    folder.mkdir()
    drafter = Drafter(shape, tiny.hidden_size).initialise(99)
    save_file({name: p.detach() for name, p in drafter.named_parameters()}, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 3},
        "block_size": 8,
        "num_target_layers": 6,
        "hidden_size": 64,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: DrafterSettings, write_dataset: Callable[..., Path], random_rows: list
) -> Callable[..., RunSettings]:
    dataset = write_dataset(random_rows)

    def make(name: str, ranks: int = 2, **train_: Any) -> RunSettings:
        small = {"epochs": 3, "max_steps": 6, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
        return RunSettings.model_validate(
            {
                "run_dir": str(tmp_path / name),
                "target": {"model": str(tiny_folder), "dtype": "float32"},
                "drafter": shape.model_dump(),
                "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3},
                "train": {**small, "dtype": "float32", "log_every": 1, "lr": 1e-2, **train_},
                "pipeline": {"drafters": ["cpu"] * ranks},
                "checkpoint": {"every_steps": 2},
            }
        )

    return make


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "drafter" / "model.safetensors")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def stop_after(steps: int, tree: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(self: StopRequest) -> bool:
        return len(events(Path(tree.run_dir), "step")) >= steps

    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", asked)
        with pytest.raises(Interrupted):
            train(tree, console=Console(json=True))


def test_every_rank_starts_from_the_weights_that_are_given(settings: Any, given: Path) -> None:
    """At a rate near zero they are what is saved, and two ranks have the losses of one."""
    same = {"init_from": str(given), "lr": 1e-30, "batches_per_step": 2}
    run = Path(train(settings("warm", **same), console=Console(json=True))["run"])
    assert equal(weights(run), load_file(given / "model.safetensors"))
    alone = Path(train(settings("alone", ranks=1, **same), console=Console(json=True))["run"])
    losses, expected = ([event["loss"] for event in events(folder, "step")] for folder in (run, alone))
    assert losses == pytest.approx(expected, rel=1e-5)
    cold = Path(train(settings("cold", **same | {"init_from": None}), console=Console(json=True))["run"])
    assert not equal(weights(cold), weights(run))


def test_where_it_came_from_is_told_and_kept(settings: Any, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(train(settings("warm", init_from=str(given)), console=Console(json=True))["run"])
    (told,) = events(run, "warm_start")
    made = json.loads((run / "provenance.json").read_text())["init"]
    assert {key: told[key] for key in made} == made
    assert (made["folder"], made["layout"]) == (str(given), "z-lab")
    assert made["differences"] == ["it was trained with blocks of 8; this run has 4 (drafter.block_size)"]
    assert made["sha256"].keys() == {"model.safetensors"}
    printed = capsys.readouterr().err
    assert f"starting from the z-lab drafter in {given}" in printed
    assert "it was trained with blocks of 8; this run has 4" in printed
    cold = Path(train(settings("cold"), console=Console(json=True))["run"])
    assert events(cold, "warm_start") == []
    assert json.loads((cold / "provenance.json").read_text())["init"] is None


def test_a_run_goes_on_without_the_folder(
    settings: Any, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(train(settings("whole", init_from=str(given)), console=Console(json=True))["run"])
    cut = settings("cut", init_from=str(given))
    stop_after(3, cut, monkeypatch)
    shutil.rmtree(given)
    train(cut, console=Console(json=True), resume=True)
    assert equal(weights(tmp_path / "cut"), weights(whole))


def test_what_it_started_from_may_not_change(settings: Any, given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(3, settings("cut", init_from=str(given)), monkeypatch)
    with pytest.raises(UserError, match=r"train\.init_from was '.*given' and is None\. Put that back"):
        train(settings("cut"), console=Console(json=True), resume=True)


def test_a_run_that_ended_before_its_first_checkpoint_starts_from_the_weights_again(
    settings: Any, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = settings("cut", init_from=str(given), lr=1e-30)
    stop_after(1, cut, monkeypatch)
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    train(cut, console=Console(json=True), resume=True)
    assert equal(weights(tmp_path / "cut"), load_file(given / "model.safetensors"))


def test_what_cannot_be_used_is_refused_before_the_run_folder_is_made(settings: Any, given: Path) -> None:
    tensors = load_file(given / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, given / "model.safetensors")
    tree = settings("warm", init_from=str(given))
    with pytest.raises(UserError, match=r"given \(train\.init_from\) lacks norm\.weight\."):
        train(tree, console=Console(json=True))
    assert not Path(tree.run_dir).exists()


@pytest.mark.parametrize("key", ["embed_scale", "logit_cap"])
def test_a_drafter_of_a_target_without_this_ones_scale_or_cap_is_refused(
    settings: Callable[..., RunSettings], tiny: TargetFacts, given: Path, key: str
) -> None:
    asked = settings("scaled", init_from=str(given))
    assert warm_start(asked, tiny, Console(json=True)) is not None
    scaled = replace(tiny, conventions=replace(tiny.conventions, **{key: 8.0}))
    with pytest.raises(UserError, match=r"has 8 there\. Take a drafter of this target\."):
        warm_start(asked, scaled, Console(json=True))
