"""A run that a test trains in this process, and what it told, without what the clock decides."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.recipes.train import train


def run(settings: RunSettings) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train; return the events and the final weights."""
    train(settings, console=Console(json=True))
    place = Path(settings.run_dir)
    return events(place), load_file(place / "drafter" / "model.safetensors")


def events(place: Path) -> list[dict[str, Any]]:
    measured = ("t", "since")  # by this process
    return [{key: value for key, value in event.items() if key not in measured} for event in read_events(place)]


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["event"] == kind]
