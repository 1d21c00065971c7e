"""True acceptance while a run trains on a CUDA device: graphs are there before step 1, and training knows nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_requests import DEVICE

from paceline.config import RunSettings
from paceline.decode import engine as engine_module
from paceline.observe.console import Console
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.train import train
from paceline.recipes.train_tell import Teller
from paceline.records import StepReport
from paceline.runtime.capture import Captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

NEW, PROMPTS = 24, 20


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list[Any]
) -> Callable[..., RunSettings]:
    dataset = str(write_dataset(random_rows))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{5 + at} w{9 + at}"}) + "\n" for at in range(PROMPTS)))

    def make(name: str, device: str | None) -> RunSettings:
        tree = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": dataset, "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"max_steps": 20, "context_slots": 128, "anchor_slots": 32, "anchors_per_sample": 4}
            | {"dtype": "float32", "log_every": 1, "lr": 1e-2, "epochs": 20, "policy": "captured"},
            "pipeline": {"targets": [str(DEVICE)], "drafters": [str(DEVICE)]},
            "checkpoint": {"every_steps": 1000, "keep": 9},
            "evaluate": {"device": device, "prompts": str(path), "tau_every_steps": 5, "max_new_tokens": NEW}
            | {"rows": 16, "max_prompts": PROMPTS},
        }
        return RunSettings.model_validate(tree)

    return make


def test_graphs_are_captured_before_step_1_and_it_is_what_evaluate_measures(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, captured, on_step = [0], [], Teller.on_step

    class Noted(Captured):
        def __init__(self, work: Callable[[], None], *, pool: Any) -> None:
            captured.append(steps[0])
            super().__init__(work, pool=pool)

    def noted(self: Teller, report: StepReport) -> None:
        steps[0] += 1
        on_step(self, report)

    plain = settings("plain", None)
    train(plain, console=Console(json=True))
    monkeypatch.setattr(engine_module, "Captured", Noted)
    monkeypatch.setattr(Teller, "on_step", noted)
    tree = settings("one", str(DEVICE))
    train(tree, console=Console(json=True))
    assert len(captured) >= 2  # widths 8 and 16
    assert set(captured) == {0}

    one, other = (events(Path(which.run_dir)) for which in (tree, plain))
    losses, expected = ([e["loss"] for e in found if e["event"] == "step"] for found in (one, other))
    assert losses == expected
    told = [event for event in one if event["event"] == "evaluated"]
    assert told[-1]["steps"] == 20
    for event in told:
        report = evaluate(
            Path(tree.run_dir), tree.evaluate.prompts, Asking(NEW), device=str(DEVICE), dtype="float32", rows=16,
            timed_prompts=0, untrained_prompts=0, console=Console(json=True), checkpoint=str(event["steps"]),
        )  # fmt: skip
        assert event["tau"] == pytest.approx(report["tau_trained"], abs=1e-9)


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
