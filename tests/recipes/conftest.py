"""Finished runs whose drafters have drawn weights, of the tiny target, and prompts for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.drafter import DrafterMeta, save_drafter
from paceline.config import DrafterSettings, RunSettings
from paceline.config_file import dump_settings
from paceline.drafter.model import Drafter
from paceline.target.load import TargetFacts

Run = Callable[..., Path]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: TargetFacts, shape: DrafterSettings, write_dataset: Any
) -> Run:
    """Return a maker of finished runs in an empty working folder, where their data lies too."""
    monkeypatch.chdir(tmp_path)
    write_dataset([([5, 6, 8, 9], 1), ([10, 11, 12, 13, 14], 2)])

    def make(name: str = "run", seed: int = 0, data: dict[str, Any] | None = None, **changes: Any) -> Path:
        settings = shape.model_copy(update=changes.pop("drafter", {}))
        tree = {
            "run_dir": name,
            "target": {"model": tiny.name, "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": "dataset", "align": 8, **(data or {})},
            "train": {"context_slots": 128, "anchor_slots": 32, "anchors_per_sample": 8},
        }
        meta = DrafterMeta(
            settings, tiny.name, tiny.revision, tiny.num_layers, tiny.hidden_size, tiny.vocab_size,
            tiny.max_positions, 1,
        )  # fmt: skip
        meta = DrafterMeta(**{**{key: getattr(meta, key) for key in meta.__slots__}, **changes})
        weights = Drafter(shape, tiny.hidden_size).initialise(seed).state_dict()
        folder = Path(name)
        folder.mkdir()
        save_drafter(folder, weights, meta)
        (folder / "settings.yaml").write_text(dump_settings(RunSettings.model_validate(tree)))
        return folder

    return make


@pytest.fixture
def prompts(run: Run) -> Path:
    rows = [{"prompt": f"w{5 + at} w{9 + 2 * at}", "category": "ab"[at % 2], "id": f"q{at}"} for at in range(6)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path("prompts.jsonl")
