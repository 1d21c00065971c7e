"""What the events of a real run add up to: sums over steps, stages, roles, and the state folded from all of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DrafterSettings, RunSettings
from paceline.data.store import open_dataset
from paceline.drafter.flops import useful_flops
from paceline.observe.console import Console
from paceline.observe.state import RunState
from paceline.recipes.train import train

STEPS = 11
SUMS = ("tokens", "padded_tokens", "blocks")


@pytest.fixture
def trained(
    tmp_path: Path,
    tiny_folder: Path,
    shape: DrafterSettings,
    write_dataset: Callable[..., Path],
    random_rows: list[tuple[list[int], int]],
) -> Callable[..., list[dict[str, Any]]]:
    """Return what trains with some settings and returns the events."""
    dataset = write_dataset(random_rows)

    def run(name: str, **changes: dict[str, Any]) -> list[dict[str, Any]]:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"epochs": 9, "max_steps": STEPS, "context_slots": 100, "anchor_slots": 16}
            | {"anchors_per_sample": 4, "policy": "eager", "dtype": "float32"},
            "observe": {"sample_s": 0.1},
        }
        for section, values in changes.items():
            tree[section] = tree.get(section, {}) | values
        train(RunSettings.model_validate(tree), console=Console(json=True))
        return [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]

    return run


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_sums_since_the_last_event_are_those_of_the_steps_between(
    trained: Callable[..., list[dict[str, Any]]], shape: DrafterSettings, tmp_path: Path
) -> None:
    each = of(trained("each", train={"log_every": 1}), "step")
    told = trained("some", train={"log_every": 4}, pipeline={"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"]})
    some = of(told, "step")
    assert [event["step"] for event in some] == [0, 4, 8, 10]
    assert [event["since"]["steps"] for event in some] == [1, 4, 4, 2]
    first = 0
    for event in some:
        between = each[first : event["step"] + 1]
        first = event["step"] + 1
        for name in SUMS:
            assert event["since"][name] == sum(step[name] for step in between)
        flops = [
            useful_flops(
                shape,
                hidden_size=64,
                vocab_size=128,
                tokens=step["tokens"],
                visible=step["visible"],
                blocks=step["blocks"],
            )
            for step in between
        ]
        assert event["since"]["flops"] == pytest.approx(sum(flops))
    assert sum(event["since"]["s"] for event in some) <= some[-1]["t"] - of(told, "started")[0]["t"] + 0.01

    state = RunState()
    for event in told:
        state.apply(event)
    seconds = sum(event["since"]["s"] for event in some)
    assert (state.outcome, state.step, state.total_steps) == ("finished", STEPS, STEPS)
    assert state.tokens_per_s == pytest.approx(sum(step["tokens"] for step in each) / seconds)
    assert state.blocks_per_s == pytest.approx(sum(step["blocks"] for step in each) / seconds)
    assert state.mfu is None, "nobody knows a CPU's peak"
    assert {role["state"] for role in state.roles.values()} <= {"done", "stopped", "running"}
    assert len(state.roles) == 4
    assert [stage["name"] for stage in state.stages] == [
        "dataset opened",
        "planned",
        "models loaded",
        "compiled",
        "ready",
    ]
    *parts, ready = [stage["s"] for stage in state.stages]
    assert ready == pytest.approx(sum(parts), abs=0.01)
    dataset = open_dataset(tmp_path / "dataset")
    assert state.data is not None
    assert state.data["fingerprints"] == [dataset.fingerprint]
    assert (state.data["samples"], state.data["tokens"]) == (24, dataset.manifest.tokens)
