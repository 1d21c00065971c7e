"""Settings of small whole runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> Any:
    """Return a maker of settings: 24 samples, micro-batches of a few, at most 20 steps."""
    dataset = write_dataset(random_rows)

    def make(name: str, **changes: dict[str, object]) -> RunSettings:
        tree = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3, "reshuffle": "batches"},
            "train": {
                "epochs": 20,
                "max_steps": 20,
                "context_slots": 100,
                "anchor_slots": 16,
                "anchors_per_sample": 4,
                "dtype": "float32",
                "log_every": 1,
                "lr": 1e-2,
            },
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu"]},
        }
        for section, values in changes.items():
            tree[section] |= values  # type: ignore[operator]
        return RunSettings.model_validate(tree)

    return make
