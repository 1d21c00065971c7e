"""`init` writes a file that `train` takes, or nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import PipelineSettings
from paceline.config_file import load_settings
from paceline.recipes.init import choose_mask_token, drafter_for, init, pipeline_for
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe
from paceline.target.model import check_taps

OPTIONS: dict[str, Any] = {
    "revision": None,
    "dataset": "data set",
    "run_dir": "runs/a",
    "mask_token_id": None,
    "overwrite": False,
}


def copy_of(folder: Path, place: Path, **changes: Any) -> Path:
    """A target with another config.json."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def test_the_file_holds_what_is_returned(tmp_path: Path, tiny_folder: Path, tiny: TargetFacts) -> None:
    out = tmp_path / "new" / "RUN.yaml"
    settings = init(str(tiny_folder), out, **OPTIONS)
    assert load_settings(out) == settings
    assert (settings.run_dir, settings.data.dataset) == ("runs/a", "data set")
    assert (settings.target.model, settings.target.revision) == (str(tiny_folder), None)
    drafter = settings.drafter
    assert (drafter.heads, drafter.kv_heads, drafter.head_dim, drafter.intermediate_size) == (4, 2, 16, 128)
    assert (drafter.rope_theta, drafter.mask_token_id, drafter.taps) == (tiny.rope_theta, 3, (1, 2, 3))
    assert settings.pipeline == pipeline_for([f"cuda:{i}" for i in range(torch.cuda.device_count())])


def test_a_file_is_replaced_only_when_asked(tmp_path: Path, tiny_folder: Path) -> None:
    out = tmp_path / "RUN.yaml"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"RUN.yaml exists. Choose another --out or add --overwrite.$"):
        init(str(tiny_folder), out, **OPTIONS)
    assert out.read_text() == "mine"
    settings = init(str(tiny_folder), out, **{**OPTIONS, "overwrite": True})
    assert load_settings(out) == settings
    with pytest.raises(UserError, match=r" exists. Choose another --out.$"):
        init(str(tiny_folder), tmp_path, **{**OPTIONS, "overwrite": True})


def test_settings_that_no_run_can_have(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^run_dir must not be empty, got '' \(in the options or target .*\).$"):
        init(str(tiny_folder), tmp_path / "RUN.yaml", **{**OPTIONS, "run_dir": ""})
    odd = copy_of(tiny_folder, tmp_path / "odd", num_attention_heads=3)
    with pytest.raises(UserError, match=r"^kv_heads must divide heads, got 2 and 3 \(in the options .*odd\).$"):
        init(str(odd), tmp_path / "RUN.yaml", **OPTIONS)
    assert not (tmp_path / "RUN.yaml").exists()


def test_a_target_without_a_tap(tmp_path: Path, tiny_folder: Path) -> None:
    """The last layer cannot be tapped, so one of two layers is left, and the formula names the other."""
    flat = copy_of(tiny_folder, tmp_path / "flat", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(UserError, match=r"^drafter.taps must lie in 0..0 for .*flat \(2 layers\), got \[1\]."):
        init(str(flat), tmp_path / "RUN.yaml", **OPTIONS)
    assert not (tmp_path / "RUN.yaml").exists()


@pytest.mark.parametrize("layers", range(3, 65))
def test_taps_fit_targets_of_any_depth(tiny: TargetFacts, layers: int) -> None:
    facts = TargetFacts(**{name: getattr(tiny, name) for name in tiny.__slots__} | {"num_layers": layers})
    taps = drafter_for(facts, mask_token_id=3).taps
    check_taps(taps, facts)
    assert len(taps) == (5 if layers >= 9 else 3 if layers >= 6 else 1)


def test_devices() -> None:
    assert pipeline_for([]) == PipelineSettings(targets=("cpu",), drafters=("cpu",))
    assert pipeline_for(["cuda:0"]) == PipelineSettings(targets=("cuda:0",), drafters=("cuda:0",))
    four = [f"cuda:{i}" for i in range(4)]
    assert pipeline_for(four) == PipelineSettings(targets=("cuda:0", "cuda:1", "cuda:2"), drafters=("cuda:3",))


def without_mask_token(folder: Path, place: Path, **changes: Any) -> TargetFacts:
    """The target with a tokenizer that names no mask token; <mask> is still one of its special tokens."""
    shutil.copytree(folder, place)
    tree = json.loads((place / "tokenizer_config.json").read_text())
    tree.pop("mask_token")
    (place / "tokenizer_config.json").write_text(json.dumps(tree))
    facts = describe(str(place))
    return TargetFacts(**{name: getattr(facts, name) for name in facts.__slots__} | changes)


def test_the_mask_token_asked_for(tiny: TargetFacts) -> None:
    assert choose_mask_token(tiny, 0) == 0
    assert choose_mask_token(tiny, 127) == 127
    for wrong in (-1, 128):
        with pytest.raises(UserError, match=rf"^--mask-token-id must be .* \(0..127\), got {wrong}.$"):
            choose_mask_token(tiny, wrong)


def test_the_mask_token_of_the_tokenizer(tiny: TargetFacts) -> None:
    assert choose_mask_token(tiny, None) == 3


def test_an_embedding_row_without_a_token(tiny_folder: Path, tmp_path: Path) -> None:
    assert choose_mask_token(without_mask_token(tiny_folder, tmp_path / "t", vocab_size=130), None) == 128


def test_an_unused_special_token(tiny_folder: Path, tmp_path: Path) -> None:
    assert choose_mask_token(without_mask_token(tiny_folder, tmp_path / "t"), None) == 3


def test_no_token_is_left_for_the_mask(tiny_folder: Path, tmp_path: Path) -> None:
    facts = without_mask_token(tiny_folder, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("<mask>{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match=r"has no spare embedding row .* with --mask-token-id.$"):
        choose_mask_token(facts, None)
