"""What a run may change when it goes on, what is refused, and what the whole run says of itself."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli import _resumed
from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.quarantine import Quarantine
from paceline.observe.reading import read_events
from paceline.recipes import train_resume
from paceline.recipes.train import train
from paceline.recipes.train_stop import StopRequest
from paceline.recipes.train_tell import known_rows
from paceline.records import Interrupted, UserError
from paceline.target.replica import Pace


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> Callable[..., RunSettings]:
    dataset = write_dataset(random_rows)

    def make(name: str, **changes: Any) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"epochs": 3, "max_steps": 12, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
            | {"dtype": "float32", "log_every": 1, "lr": 1e-2, "batches_per_step": 2},
            "checkpoint": {"every_steps": 3},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        return RunSettings.model_validate(tree)

    return make


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunSettings], Path]:
    """Return what trains a run and stops it after 5 steps."""

    def stop(tree: RunSettings) -> Path:
        run = Path(tree.run_dir)
        with monkeypatch.context() as patch:
            patch.setattr(StopRequest, "__call__", lambda self: _steps(run) >= 4)
            with pytest.raises(Interrupted, match=rf"^after step 5 of 12, saved\. .*`paceline train {run} --resume`"):
                train(tree, console=Console(json=True))
        return run

    return stop


def _steps(run: Path) -> int:
    return sum(event["event"] == "step" for event in read_events(run))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "drafter" / "model.safetensors")


def resume(tree: RunSettings, *, previous: bool = False) -> dict[str, Any]:
    return train(tree, console=Console(json=True), resume=True, resume_previous=previous)


def test_the_summary_and_the_events_are_those_of_the_whole_run(settings: Any, stopped: Any) -> None:
    whole = train(settings("whole"), console=Console(json=True))
    run = stopped(settings("cut"))
    parts = resume(settings("cut"))
    same = ("train_steps", "loss", "real_anchor_share", "padding_share", "policy", "recompiles")
    assert {key: parts[key] for key in same} == {key: whole[key] for key in same}
    events = list(read_events(run))
    besides = ("role", "checkpoint", "machine", "data", "stage", "sample")
    kinds = [event["event"] for event in events if event["event"] not in besides]
    assert kinds[:10] == ["started", "plan", "checksums", *["step"] * 5, "interrupted", "resumed"]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(12))
    (resumed,) = (event for event in events if event["event"] == "resumed")
    assert (resumed["steps"], Path(resumed["checkpoint"]).name) == (5, "step-00000005")
    assert kinds[-1] == "trained"
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(Path(whole["run"])).items())


FREE: dict[str, Any] = {
    "three replicas": {"pipeline": {"targets": ["cpu"] * 3, "credit_gib": 1e-6}},
    "a cache": {"pipeline": {"feature_cache": "memory"}},
    "other saves": {"checkpoint": {"every_steps": None, "keep": 1, "grace_s": 1}},
    "layers again": {"train": {"recompute": "layers"}},
    "other telling": {"train": {"log_every": 3}, "data": {"prefetch": 1}},
}


def test_how_a_run_is_carried_out_may_change(settings: Any, stopped: Any) -> None:
    data = {"reshuffle": "batches"}
    whole = train(settings("whole", data=data), console=Console(json=True))
    cut = stopped(settings("cut", data=data))
    for name, free in FREE.items():
        run = shutil.copytree(cut, cut.with_name(name))
        changes = free | {"data": data | free.get("data", {})}
        assert resume(settings(name, **changes))["loss"] == whole["loss"], name
        equal = (torch.equal(tensor, weights(run)[key]) for key, tensor in weights(Path(whole["run"])).items())
        assert all(equal), name


def test_another_number_of_drafter_ranks_keeps_the_batch(settings: Any, stopped: Any) -> None:
    """Only the order of sums changes, so only rounding."""
    train_ = {"lr": 1e-3}
    whole = train(settings("whole", train=train_), console=Console(json=True))
    for before, after in ((1, 2), (2, 1), (2, 3)):
        name = f"{before}-to-{after}"
        stopped(settings(name, train=train_, pipeline={"drafters": ["cpu"] * before}))
        parts = resume(settings(name, train=train_, pipeline={"drafters": ["cpu"] * after}))
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4), name
        assert parts["real_anchor_share"] == whole["real_anchor_share"], name


LEARNT: tuple[tuple[dict[str, Any], str], ...] = (
    ({"train": {"lr": 0.5}}, r"train\.lr was 0\.01 and is 0\.5\. Put that back"),
    ({"train": {"seed": 3, "batches_per_step": 1}}, r"batches_per_step was 2 and is 1, train\.seed was 0 and is"),
    ({"data": {"layout": "bucketed"}}, r"data\.layout was 'trimmed' and is 'bucketed'"),
    ({"target": {"dtype": "bfloat16"}}, r"target\.dtype was 'float32' and is 'bfloat16'"),
    ({"target": {"features": "fp8"}}, r"target\.features was 'as_trained' and is 'fp8'"),
    ({"train": {"moments": "8bit"}}, r"train\.moments was 'float32' and is '8bit'\. Put that back"),
    ({"train": {"max_steps": 6}}, r"train\.max_steps was 12 and is 6"),
)


def test_what_is_learnt_may_not(settings: Any, stopped: Any) -> None:
    run = stopped(settings("cut"))
    before = _steps(run)
    for changes, sentence in LEARNT:
        with pytest.raises(UserError, match=sentence):
            resume(settings("cut", **changes))
        assert _steps(run) == before
    resume(settings("cut"))


def test_a_dataset_may_move_but_not_change(
    settings: Any, stopped: Any, tmp_path: Path, write_dataset: Any, random_rows: list
) -> None:
    run = stopped(settings("cut"))
    ids, prompt = random_rows[0]
    other = write_dataset([([ids[1], *ids[1:]], prompt), *random_rows[1:]], "other")
    with pytest.raises(UserError, match=r"needs the data as before, [0-9a-f]{12}, got [0-9a-f]{12}\. Put data"):
        resume(settings("cut", data={"dataset": str(other)}))
    (tmp_path / "dataset").rename(tmp_path / "moved")
    run.rename(tmp_path / "elsewhere")
    tree = _resumed(tmp_path / "elsewhere", [f"data.dataset={tmp_path / 'moved'}"])
    assert tree.run_dir == str(tmp_path / "elsewhere")
    assert resume(tree)["train_steps"] == 12


def test_a_run_with_checkpoints_is_not_started_over(settings: Any, stopped: Any) -> None:
    run = stopped(settings("cut"))
    sentence = rf"checkpoint after step 5\. Go on with `paceline train {run} --resume`, or choose another run_dir"
    with pytest.raises(UserError, match=sentence):
        train(settings("cut"), console=Console(json=True))


def test_there_must_be_something_to_resume(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no run in .*none \(run_dir\) to resume"):
        resume(settings("none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="is no run folder"):
        _resumed(tmp_path, [])
    train(settings("done"), console=Console(json=True))
    with pytest.raises(UserError, match=r"The run in .*done \(run_dir\) is finished: there is nothing to resume"):
        resume(settings("done"))


@pytest.mark.usefixtures("every_save")
def test_a_damaged_checkpoint_is_left_behind_only_on_request(settings: Any, stopped: Any) -> None:
    whole = train(settings("whole"), console=Console(json=True))
    run = stopped(settings("cut"))
    path = run / "checkpoints" / "step-00000005" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"step-00000005 is damaged: optimizer.safetensors has .* --resume-previous`"):
        resume(settings("cut"))
    assert resume(settings("cut"), previous=True)["loss"] == whole["loss"]
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-00000006", "step-00000009"]
    assert all(torch.equal(tensor, weights(run)[key]) for key, tensor in weights(Path(whole["run"])).items())


@pytest.fixture
def held_out(write_dataset: Callable[..., Path], random_rows: list) -> str:
    return str(write_dataset([(ids[::-1], prompt) for ids, prompt in random_rows[:9]], "held"))


def looked(run: Path) -> list[dict[str, Any]]:
    found = list(read_events(run))
    return [{**event, "t": 0} for event in found if event["event"] == "held_out"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [4, 5], ids=["before the step is told of", "while it is looked at"])
def test_a_run_that_stops_where_a_held_out_loss_is_due_has_it_once(
    settings: Any, monkeypatch: pytest.MonkeyPatch, held_out: str, steps: int, ranks: int
) -> None:
    changes = {"evaluate": {"held_out": held_out, "every_steps": 5}, "pipeline": {"drafters": ["cpu"] * ranks}}
    whole = train(settings("whole", **changes), console=Console(json=True))
    run = Path(settings("cut").run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", lambda self: _steps(run) >= steps)
        with pytest.raises(Interrupted, match=r"^after step 5 of 12, saved\."):
            train(settings("cut", **changes), console=Console(json=True))
    assert [event["steps"] for event in looked(run)] == [5]
    state = json.loads((run / "checkpoints" / "step-00000005" / "state.json").read_text())
    assert state["best"] == {"steps": 5, "loss": looked(run)[0]["loss"]}
    parts = resume(settings("cut", **changes))
    assert looked(run) == looked(Path(whole["run"]))
    assert (parts["best"], parts["held_out_loss"]) == (whole["best"], whole["held_out_loss"])


@pytest.fixture
def cut_behind_the_best(settings: Any, held_out: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RunSettings, Any]:
    """Settings of a run that was stopped after step 11, and the summary of it whole: best after 9, worse after 12."""
    rises = {"epochs": 20, "lr": 3e-3, "warmup_share": 0.0, "schedule": "wsd"}
    changes = {"evaluate": {"held_out": held_out, "every_steps": 3}, "train": rises}
    whole = train(settings("whole", **changes), console=Console(json=True))
    assert [event["best"] for event in looked(Path(whole["run"]))] == [True, True, True, False]
    tree = settings("cut", **changes)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(StopRequest, "__call__", lambda self: _steps(Path(tree.run_dir)) >= 10)
        train(tree, console=Console(json=True))
    return tree, whole


def test_the_best_so_far_is_known_when_a_run_goes_on(cut_behind_the_best: tuple[RunSettings, Any]) -> None:
    tree, whole = cut_behind_the_best
    run = Path(tree.run_dir)
    pointer = run / "checkpoints" / "best"
    pointer.write_text("step-00000099")  # as a crash may leave it, ahead of the state
    assert resume(tree)["best"] == whole["best"]
    assert looked(run) == looked(Path(whole["run"]))
    assert pointer.read_text() == "step-00000009"


def test_a_best_that_is_gone_is_said_and_is_no_bar(
    cut_behind_the_best: tuple[RunSettings, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tree, whole = cut_behind_the_best
    run = Path(tree.run_dir)
    shutil.rmtree(run / "checkpoints" / "step-00000009")
    assert resume(tree)["best"] == {"steps": 12, "loss": whole["held_out_loss"]}
    told = " ".join(capsys.readouterr().err.split())
    assert "the best checkpoint, after step 9, is gone: the next held-out loss counts as the best" in told
    events = list(read_events(run))
    assert [event["best"] for event in events if event["event"] == "resumed"] == [None]


def test_held_out_rows_may_move_and_come_more_often_but_not_change(
    settings: Any, stopped: Any, tmp_path: Path, held_out: str, write_dataset: Any, random_rows: list
) -> None:
    changes = {"evaluate": {"held_out": held_out, "every_steps": 3, "max_rows": 7}}
    run = stopped(settings("cut", **changes))
    other = str(write_dataset(random_rows[3:12], "other"))
    for section, sentence in (
        (
            {"held_out": other},
            r"needs the held-out data as before, [0-9a-f]{16}, got [0-9a-f]{16}\. Put evaluate\.held_",
        ),
        (
            {"held_out": None},
            r"needs the held-out data as before, [0-9a-f]{16}, got None\. Put evaluate\.held_out back",
        ),
        ({"max_rows": 8}, r"evaluate\.max_rows was 7 and is 8\. Put that back"),
    ):
        with pytest.raises(UserError, match=sentence):
            resume(settings("cut", evaluate=changes["evaluate"] | section))
    (tmp_path / "held").rename(tmp_path / "moved")
    resume(settings("cut", evaluate={"held_out": str(tmp_path / "moved"), "every_steps": 4, "max_rows": 7}))
    assert [event["steps"] for event in looked(run)] == [3, 8, 12]


def test_room_for_the_best_is_asked_for_too(settings: Any, held_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = []
    for changes in ({}, {"evaluate": {"held_out": held_out}}):
        tree = settings("full", **changes)
        with monkeypatch.context() as patch:
            patch.setattr(train_resume, "free_bytes", lambda run: 1000)
            with pytest.raises(UserError, match=r"for 2 checkpoints \(checkpoint.keep\),(.*) one more while") as told:
                train(tree, console=Console(json=True))
        needed.append(float(str(told.value).split(" needs ")[1].split()[0]))
    assert needed[1] / needed[0] == pytest.approx(5 / 4, rel=0.01)
    assert " the best one (evaluate.held_out)," in str(told.value)


def test_no_room_is_said_before_anything_is_loaded(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_resume, "free_bytes", lambda run: 1000)
    with pytest.raises(UserError, match=r"needs .* GiB for 2 checkpoints \(checkpoint.keep\).* has 9.31e-07 GiB free"):
        train(settings("full"), console=Console(json=True))


def test_the_room_that_is_asked_for_is_what_is_written(settings: Any, stopped: Any, tiny: Any) -> None:
    for optimizer in ("adamw", "muon"):
        tree = settings(optimizer, train={"optimizer": optimizer})
        place = stopped(tree) / "checkpoints" / "step-00000005"
        written = sum(path.stat().st_size for path in place.glob("*.safetensors"))
        assert train_resume.state_bytes(tree, tiny) == pytest.approx(written, rel=0.01, abs=20_000)
        shutil.rmtree(place.parent)


def test_rows_that_were_set_aside_are_known_again_and_rejected_steps_are_none(tmp_path: Path) -> None:
    with Quarantine(tmp_path) as quarantine:
        quarantine.write("quarantined", reason="no tokens", fingerprint="f", row=3)
        quarantine.write("rejected", step=2, fingerprint="f", row=4, rows=[{"row": 5, "dataset": "d"}])
    with Quarantine(tmp_path) as quarantine:
        assert known_rows(quarantine) == [("f", 3)]


def test_fp8_stays_what_it_was_whatever_the_doctor_has_found_since(
    settings: Callable[..., RunSettings], stopped: Callable[[RunSettings], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = settings("run", train={"fp8": "auto"}, target={"fp8": "auto"})
    run = stopped(tree)
    assert "fp8: auto" in (run / "settings.yaml").read_text()
    for kind in ("train", "target"):
        monkeypatch.setattr(f"paceline.recipes.choose_fp8._of_{kind}", lambda *asked: (True, "it works now"))
    summary = train(tree, console=Console(json=True), resume=True)
    assert summary["fp8"] == {"train": "off", "target": "off"}


def test_a_target_stays_in_fp8_that_began_so(
    settings: Callable[..., RunSettings], stopped: Callable[[RunSettings], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor_says(works: bool) -> None:
        monkeypatch.setattr("paceline.recipes.choose_fp8._of_target", lambda *asked: (works, "so it is"))

    for name in ("paceline.target.replica.pace_of", "paceline.pipeline.threads.pace_of"):  # eagerly, as CPUs can
        monkeypatch.setattr(name, lambda target, *_: Pace(fast=True, fp8=target.fp8 != "off"))
    tree = settings("run", target={"fp8": "auto", "dtype": "bfloat16"}, train={"dtype": "bfloat16"})
    doctor_says(works=True)
    place = stopped(tree)
    doctor_says(works=False)
    summary = train(tree, console=Console(json=True), resume=True)
    assert summary["fp8"] == {"train": "off", "target": "on"}
    paths = [event["fp8"] for event in read_events(place) if event["event"] == "target_path"]
    assert paths
    assert all(paths)
