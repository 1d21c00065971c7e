"""The cases of benchmarks/small_cards.py, and what becomes of one that fails; what they measure needs a GPU."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline.bench.weights import random_drafter, random_ends
from paceline.pipeline.cards import usable_of
from paceline.train.step import DrafterStep

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "small_cards.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("small_cards", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_has_settings_that_fit(script: ModuleType) -> None:
    """And on smaller cards more of them are changed."""
    asked = script.parsed([])
    for name in script.NAMES:
        shape = script.sized(name, anchor_slots=asked.anchor_slots, context_slots=asked.context_slots)
        found = [script.named(shape, card << 30) for card in script.CARDS]
        for card, fit in zip(script.CARDS, found, strict=True):
            assert fit.most <= usable_of(card << 30), (name, card)
        assert set(found[0].changes) >= set(found[1].changes) >= set(found[2].changes) == set()


@pytest.mark.parametrize("features", ["as_trained", "fp8"])
def test_features_lie_in_the_slots_of_a_run(script: ModuleType, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes a GPU
    shape, device = script.SHAPES["tiny"], torch.device("cpu")
    run = script.named(shape, 80 << 30).settings
    run = run.model_copy(update={"target": run.target.model_copy(update={"features": features})})
    ends = random_ends(shape, device, torch.bfloat16)
    step = DrafterStep(random_drafter(shape, device), ends, run.train)
    slots, batches = script.in_slots(step, run, shape)
    assert sum(map(len, slots._free)) + len(batches) > 2
    assert len(batches) > 1
    assert {batch.features_TD.dtype for batch in batches} == {torch.uint8 if features == "fp8" else torch.bfloat16}
    for batch in batches:
        step.load(batch)
        step.micro()
    step.update(1e-3)
    assert torch.isfinite(step.norm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a case does not fail at once")
def test_a_case_that_fails_is_a_row_and_a_status(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "80:qwen3-4b", "24:qwen3-4b", "--until", "0"]
    assert script.main(script.parsed(only), only) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["card_gib"], row["failed"]) for row in rows] == [(80, "not begun in time"), (24, "not begun in time")]
    assert script.run_case("80:qwen3-4b", script.parsed([])) == 1
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert "CUDA" in row["failed"]
    assert row["shape"] == "qwen3-4b"
