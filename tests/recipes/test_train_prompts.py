"""Which prompts a run decodes while it trains, what it refuses of them, and of the device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.data.held_out import open_held_out
from paceline.observe.console import Console
from paceline.recipes import evaluator_memory as memory_module
from paceline.recipes.evaluator_memory import check_room_on_device, evaluator_memory, plan_evaluator
from paceline.recipes.train_inputs import open_inputs
from paceline.recipes.train_prompts import Prompts, open_prompts
from paceline.records import UserError
from paceline.target.load import TargetFacts

Make = Callable[..., RunSettings]
HELD: list[tuple[list[int], int]] = [
    ([9, 10, 11, 12], 2),
    ([9, 10, 13, 14], 2),  # the same question again
    ([15, 16, 17], 0),  # all supervised
    ([5] * 30 + [6, 7], 30),
    ([20, 21, 22, 23], 1),
]


@pytest.fixture
def make(tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path]) -> Make:
    dataset = str(write_dataset([([5, 6, 7, 8], 1)] * 4))

    def settings(rows: list[tuple[list[int], int]] | None = None, **evaluate: Any) -> RunSettings:
        if rows is not None:
            evaluate["held_out"] = str(write_dataset(rows, "held"))
        return RunSettings.model_validate(
            {
                "run_dir": str(tmp_path / "run"),
                "target": {"model": str(tiny_folder), "dtype": "float32"},
                "drafter": shape.model_dump(),
                "data": {"dataset": dataset, "bad_rows": 0.5},
                "train": {"context_slots": 128, "anchor_slots": 32, "anchors_per_sample": 8},
                "evaluate": {"device": "cpu", "max_new_tokens": 8, **evaluate},
            }
        )

    return settings


def opened(settings: RunSettings, facts: TargetFacts) -> Prompts:
    held = open_held_out(settings.evaluate, settings.data, settings.train, 4, first_row=0)
    return open_prompts(settings, facts, held, Console(json=False))


def test_those_of_the_held_out_rows(make: Make, tiny: TargetFacts, capsys: pytest.CaptureFixture[str]) -> None:
    assert opened(make(HELD), tiny).ids == [[9, 10], [5] * 30, [20]]
    assert opened(make(HELD, max_rows=2), tiny).ids == [[9, 10]]
    assert opened(make(HELD, max_prompts=2), tiny).ids == [[9, 10], [5] * 30]
    assert capsys.readouterr().out == ""
    few = opened(make(HELD, max_new_tokens=490), tiny)
    assert few.ids == [[9, 10], [20]]
    assert ": 1 prompt of" in capsys.readouterr().out
    assert few.sha256 != opened(make(HELD, max_new_tokens=491), tiny).sha256


def test_those_of_a_file(make: Make, tiny: TargetFacts, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{at} w9"}) + "\n" for at in range(10, 15)))
    found = opened(make(HELD, prompts=str(path)), tiny)
    assert found.ids == [[at, 9] for at in range(10, 15)], "and not of the held-out rows"
    few = opened(make(HELD, prompts=str(path), max_prompts=2), tiny).ids
    assert len(few) == 2
    assert all(ids in found.ids for ids in few)


def refusals(tmp_path: Path) -> list[tuple[dict[str, Any], str]]:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "w5 " * 505}) + "\n")
    return [
        (
            {"rows": HELD, "max_new_tokens": 512},
            r"evaluate\.max_new_tokens \(512\) in the target's 512 positions.*held",
        ),
        (
            {"rows": [([5, 6, 7], 0)]},
            r"of the 1 row of .*held \(evaluate\.held_out\) none begins with tokens that are",
        ),
        (
            {"prompts": str(long)},
            r"long\.jsonl:1 \(evaluate\.prompts\) has 505 tokens and evaluate\.max_new_tokens is 8",
        ),
        ({"prompts": str(tmp_path / "none.jsonl")}, r"none\.jsonl"),
        ({"rows": HELD, "max_new_tokens": 1}, r"evaluate\.max_new_tokens must be at least 2, got 1"),
        ({"rows": HELD, "device": "cuda:7"}, r"evaluate\.device names cuda:7"),
        ({"rows": HELD, "device": "gpu"}, r"evaluate\.device must be cpu or cuda:N, got 'gpu'"),
    ]


def test_what_is_refused_before_a_model_is_loaded(make: Make, tmp_path: Path) -> None:
    for changes, sentence in refusals(tmp_path):
        with pytest.raises(UserError, match=sentence):
            open_inputs(make(**changes), Console(json=True), lambda stage: None)


def test_a_device_without_room_is_refused(make: Make, tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = make(HELD, device="cuda:1")
    prompts = opened(make(HELD), tiny)
    need = evaluator_memory(alone, tiny, prompts).total
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: {"cuda:1": need, "cpu": None}[device])
    check_room_on_device(alone, tiny, prompts)
    check_room_on_device(make(HELD), tiny, prompts)
    shared = alone.model_copy(
        update={
            "pipeline": alone.pipeline.model_copy(update={"targets": ("cuda:0", "cuda:1"), "drafters": ("cuda:1",)})
        }
    )
    with pytest.raises(UserError, match=r"evaluate\.device .*for all: evaluator .*drafter rank 0 .*target replica 1 0"):
        check_room_on_device(shared, tiny, prompts)
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: need - 1)
    with pytest.raises(
        UserError, match=r"evaluate\.device must have room .*lower evaluate\.rows \(16\) or evaluate\.max"
    ):
        check_room_on_device(alone, tiny, prompts)


def test_the_plan_counts_it(
    make: Make, tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    settings = make(HELD, device="cuda:1")
    settings = settings.model_copy(
        update={"pipeline": settings.pipeline.model_copy(update={"targets": ("cuda:1", "cuda:2")})}
    )
    report = plan_evaluator(settings, tiny.folder, Console(json=False))
    want = evaluator_memory(settings, tiny, opened(make(HELD), tiny))
    assert report is not None
    assert {key: report[key] for key in want.as_dict()} == want.as_dict()
    assert (report["device"], [*report["beside"]]) == ("cuda:1", ["target replica 0"])
    text = capsys.readouterr().out
    assert "if cuda:1 (evaluate.device) is a GPU" in text
    assert "target replica 0 is on cuda:1 too" in text
    assert max(map(len, text.splitlines())) <= 80
    assert plan_evaluator(make(HELD, device=None), tiny.folder, Console(json=False)) is None
    assert capsys.readouterr().out == ""
    assert plan_evaluator(settings, None, Console(json=False)) is None
    assert "not estimated: target.model is not on this machine" in capsys.readouterr().out
