"""`evaluate` and `export` take the weights of a checkpoint that is named, of a run that is finished or not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import RunSettings
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.export import export
from paceline.recipes.texts import evaluation_text
from paceline.recipes.train import train
from paceline.recipes.train_stop import StopRequest
from paceline.records import Interrupted, UserError

PROMPTS = [[{"role": "user", "content": f"w{5 + i} w{9 + i} w20"}] for i in range(3)]


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> RunSettings:
    """14 steps, saved every 4 and looked at every 6."""
    dataset, held = write_dataset(random_rows), write_dataset([(ids[::-1], 3) for ids, _ in random_rows[:4]], "held")
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3},
        "train": {"epochs": 20, "max_steps": 14, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
        | {"dtype": "float32", "log_every": 1, "lr": 1e-2},
        "checkpoint": {"every_steps": 4, "keep": 9},
        "evaluate": {"held_out": str(held), "every_steps": 6},
    }
    return RunSettings.model_validate(tree)


@pytest.fixture
def unfinished(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stopped after step 7, with checkpoints after 4, 6 (the best so far) and 7."""
    run = Path(settings.run_dir)

    def asked(self: object) -> bool:
        return (run / "events.jsonl").read_text().count('"event": "step"') >= 6 and bool(looked(run))

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(StopRequest, "__call__", asked)
        train(settings, console=Console(json=True))
    return run


def looked(run: Path) -> int:
    return (run / "events.jsonl").read_text().count('"event": "held_out"')


def measured(run: Path, checkpoint: str | None) -> dict[str, Any]:
    return evaluate(
        run,
        PROMPTS,
        device="cpu",
        dtype="float32",
        asking=Asking(12),
        rows=3,
        timed_prompts=0,
        untrained_prompts=0,
        console=Console(json=True),
        checkpoint=checkpoint,
    )


@pytest.mark.parametrize(("name", "steps"), [("best", 6), ("latest", 7), ("4", 4)])
def test_of_a_run_that_is_not_finished(
    unfinished: Path, name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"step-{steps:08d}"
    written = export(unfinished, None, dtype="float32", overwrite=False, checkpoint=name)
    assert (written["checkpoint"], written["train_steps"]) == (folder, steps)
    exported = load_file(unfinished / "export" / "model.safetensors")
    saved = load_file(unfinished / "checkpoints" / folder / "drafter.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[key], saved[key]) for key in saved)
    taken: list[dict[str, torch.Tensor]] = []
    make = Drafter.from_weights
    monkeypatch.setattr(Drafter, "from_weights", lambda *rest: taken.append(rest[-1]) or make(*rest))
    report = measured(unfinished, name)
    assert all(torch.equal(taken[0][key], saved[key]) for key in saved)
    assert (report["checkpoint"], report["train_steps"], report["lossless"]) == (folder, steps, True)
    assert evaluation_text(report).startswith(f"drafter   of checkpoint {folder}, after step {steps}\nprompts ")
    stored = json.loads((unfinished / f"evaluation-{folder}.json").read_text())
    assert len(stored.pop("per_prompt")["key"]) == 3
    assert stored == json.loads(json.dumps(report))
    assert not (unfinished / "evaluation.json").exists()


def test_the_finished_drafter_has_to_be_there(unfinished: Path) -> None:
    sentence = r"it has no drafter/drafter\.json\. Train it first, or name a checkpoint with --checkpoint\.$"
    with pytest.raises(UserError, match=sentence):
        export(unfinished, None, dtype="float32", overwrite=False)
    with pytest.raises(UserError, match=sentence):
        measured(unfinished, None)


def test_what_is_no_checkpoint_or_a_damaged_one(unfinished: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint after step 5 .* There are checkpoints after step 4, 6, 7\.$"):
        export(unfinished, None, dtype="float32", overwrite=False, checkpoint="5")
    path = unfinished / "checkpoints" / "step-00000006" / "drafter.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for take in (measured, lambda run, name: export(run, None, dtype="float32", overwrite=False, checkpoint=name)):
        with pytest.raises(UserError, match=r"step-00000006 is damaged: the sha256 of drafter\.safetensors"):
            take(unfinished, "best")
    assert not (unfinished / "export").exists()
    assert measured(unfinished, "7")["lossless"]


def test_a_checkpoint_of_the_last_step_is_the_finished_drafter(settings: RunSettings) -> None:
    """Whichever way its weights went: the best is the end, so both are there."""
    summary = train(
        settings.model_copy(update={"train": settings.train.model_copy(update={"lr": 1e-3})}),
        console=Console(json=True),
    )
    run = Path(settings.run_dir)
    assert summary["best"]["steps"] == 14
    last, best = measured(run, None), measured(run, "best")
    assert best == last | {"checkpoint": "step-00000014"}
    assert last["checkpoint"] is None
    assert evaluation_text(last).startswith("prompts ")
    exports = [
        export(run, run / name, dtype="bfloat16", overwrite=False, checkpoint=checkpoint)
        for name, checkpoint in (("one", None), ("two", "14"))
    ]
    files = [Path(written["folder"]) for written in exports]
    for name in ("config.json", "model.safetensors"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
