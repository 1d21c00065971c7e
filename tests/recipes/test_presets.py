"""The presets in recipes/ are settings that load, and their drafters are those that `init` would choose.

What is not (`PUBLISHED`) is as in a published drafter. Nothing is downloaded: a preset says in a comment what it knows
of its target's config.json, and transformers builds the configuration from that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig

from paceline.config import RunSettings
from paceline.config_file import load_settings
from paceline.drafter.taps import default_taps
from paceline.recipes.init import drafter_for
from paceline.recipes.target_checks import check_data
from paceline.target.load import TargetFacts, describe
from paceline.target.model import check_taps
from paceline.train.memory import sizes_for_tiles

PRESETS = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SAYS = "# Of its config.json: "
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-coder-30b-a3b": {"layers": 8},
    "qwen3.5-4b": {"intermediate_size": 9728},
    "qwen3.5-35b-a3b": {"layers": 8, "kv_heads": 4},
    "lfm2.5-1.2b-instruct": {"layers": 8, "intermediate_size": 6144, "rms_norm_eps": 1e-5},
}
WEIGHTS = {  # of published drafters
    "qwen3-4b": 537_427_200,
    "qwen3-8b": 1_048_626_432,
    "qwen3.5-4b": 537_427_200,
    "qwen3.5-35b-a3b": 473_995_264,
}


def target_of(preset: Path, folder: Path) -> TargetFacts:
    """The facts of a preset's target, from what the preset says of its configuration; weights there are none."""
    said = next(line.removeprefix(SAYS) for line in preset.read_text().splitlines() if line.startswith(SAYS))
    tree = yaml.safe_load(said)
    AutoConfig.for_model(tree.pop("model_type"), eos_token_id=None, pad_token_id=None, **tree).save_pretrained(folder)
    save_file({"model.embed_tokens.weight": torch.zeros(1, 1)}, folder / "model.safetensors")
    return describe(str(folder))


def weights_of(settings: RunSettings, hidden: int) -> int:
    """How many weights a drafter has, by the formula of its publications."""
    d = settings.drafter
    layer = hidden * d.head_dim * (2 * d.heads + 2 * d.kv_heads) + 3 * hidden * d.intermediate_size
    return d.layers * (layer + 2 * hidden + 2 * d.head_dim) + len(d.taps) * hidden**2 + 2 * hidden


def test_there_are_presets() -> None:
    assert {*PUBLISHED, *WEIGHTS} < {path.stem for path in PRESETS}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_fits_its_target(preset: Path, tmp_path: Path) -> None:
    settings, facts = load_settings(preset), target_of(preset, tmp_path)
    drafter = settings.drafter
    check_taps(drafter.taps, facts)
    check_data(facts.conventions, settings.data, facts.name)
    assert drafter.taps == default_taps(facts.num_layers, 5)
    assert drafter.mask_token_id < facts.vocab_size
    assert drafter.rope_theta == facts.rope_theta  # else `train` refuses it
    assert sizes_for_tiles(drafter, settings.train) == ""  # it can be compiled and captured
    assert drafter == drafter_for(facts, mask_token_id=drafter.mask_token_id, **PUBLISHED.get(preset.stem, {}))
    if preset.stem in WEIGHTS:
        assert weights_of(settings, facts.hidden_size) == WEIGHTS[preset.stem]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_has_its_own_folders(preset: Path) -> None:
    settings = load_settings(preset)
    assert (settings.run_dir, settings.data.dataset) == (f"runs/{preset.stem}", f"datasets/{preset.stem}")
    assert settings.target.revision is None  # no preset knows which commit a person has
