"""A run on given devices, from a dataset to every step's loss."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.recipes.train import train


@pytest.fixture
def losses(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list[Any]
) -> Any:
    """Return a function that trains 20 steps on given devices and returns every step's loss."""
    dataset = write_dataset(random_rows)

    def run(
        name: str,
        devices: tuple[str, ...],
        dtype: str,
        slots: int = 100,
        more: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        **data: Any,
    ) -> list[float]:
        """`devices` are the target's, joined by + if there are several, and those of the drafter's ranks; `more` are
        settings of train."""
        tree = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": dtype} | (target or {}),
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3} | data,
            "train": {"max_steps": 20, "context_slots": slots, "anchor_slots": slots // 6, "anchors_per_sample": 4}
            | {"dtype": dtype, "log_every": 1, "lr": 1e-3, "epochs": 20}
            | (more or {}),
            "pipeline": {"targets": devices[0].split("+"), "drafters": list(devices[1:])},
        }
        train(RunSettings.model_validate(tree), console=Console(json=True))
        events = list(read_events(tmp_path / name))
        return [event["loss"] for event in events if event["event"] == "step"]

    return run
