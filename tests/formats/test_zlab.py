"""The exported folder against what the loaders of SGLang, vLLM and the reference ask for, without these packages.

The rules are those that their loaders were read to have: tensor names of the published checkpoints without a prefix,
no embedding and no head, every key of the drafter at each place where one of them looks, no code in the folder. And a
file that does not hold what was meant is noticed.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_drafter import META, N_L, H, V
from transformers import AutoConfig

from paceline.checkpoint.drafter import save_drafter
from paceline.drafter.model import Drafter
from paceline.formats import folder as written_folder
from paceline.formats.zlab import export_zlab
from paceline.recipes.export import export
from paceline.records import RunError, UserError

REST = {"card": "# card\n", "max_shard_bytes": 10**9}


@pytest.fixture
def folder(drafter: Drafter, tmp_path: Path) -> Path:
    export_zlab(drafter, META, tmp_path / "export", dtype=torch.bfloat16, **REST)
    return tmp_path / "export"


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as the published checkpoints have them; two layers are written out by hand."""
    q, kv, inner = 6 * 16, 2 * 16, 80
    layer = {
        "input_layernorm.weight": (H,),
        "self_attn.q_proj.weight": (q, H),
        "self_attn.k_proj.weight": (kv, H),
        "self_attn.v_proj.weight": (kv, H),
        "self_attn.o_proj.weight": (H, q),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate_proj.weight": (inner, H),
        "mlp.up_proj.weight": (inner, H),
        "mlp.down_proj.weight": (H, inner),
    }
    outside = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    return outside | {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_have_the_published_names_the_asked_dtype_and_the_drafters_values(
    drafter: Drafter, tmp_path: Path, dtype: torch.dtype
) -> None:
    written = export_zlab(drafter, META, tmp_path / "export", dtype=dtype, **REST)
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes()
    for name, value in drafter.named_parameters():
        assert tensors[name].dtype == dtype
        assert torch.equal(tensors[name], value.detach().to(dtype)), name
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file that does not say so
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["dtype"] == written["dtype"] == str(dtype).removeprefix("torch.")
    assert written["tensors"] == len(tensors)
    assert written["parameters"] == sum(tensor.numel() for tensor in tensors.values())


def test_keys_stand_at_every_place_where_a_loader_looks(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {"block_size": 8, "mask_token_id": 101, "target_layer_ids": [1, 4, 7]}
    # SGLang and the reference look in dflash_config first, then at the top; vLLM looks in dflash_config alone, and
    # older tools at the top alone.
    assert {key: config[key] for key in own} == own
    assert {key: config["dflash_config"][key] for key in own} == own
    assert config["num_target_layers"] == N_L
    # rope: SGLang reads the older keys, transformers 5 and vLLM the newer
    assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    # whole-block attention, in the words of each
    assert (config["is_causal"], config["dflash_config"]["causal"]) == (False, False)
    assert config["layer_types"] == ["full_attention"] * 2
    assert (config["use_sliding_window"], config["sliding_window"]) == (False, None)
    # SGLang takes silu only; all of them choose the model by architecture, its configuration by type
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["model_type"], config["hidden_act"]) == ("qwen3", "silu")
    shapes = {
        "hidden_size": H,
        "vocab_size": V,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in shapes} == shapes


def test_nothing_is_written_that_a_loader_would_take_for_something_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    # code to be run; the target's rotary variants, which the drafter does not have; SGLang's DFlash 2 keys
    for key in ("auto_map", "partial_rotary_factor", "mrope_section", "target_hidden_size", "draft_vocab_size"):
        assert key not in config
        assert key not in config["dflash_config"]
    assert not [key for key in config["dflash_config"] if key.startswith(("conv_", "selector_", "projector_", "use_"))]


def test_transformers_reads_the_configuration_back_unchanged(folder: Path) -> None:
    read = AutoConfig.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert type(read).__name__ == "Qwen3Config"
    for key in ("layer_types", "sliding_window", "head_dim", "is_causal", "dflash_config", "block_size"):
        assert getattr(read, key) == written[key]
    assert read.rope_parameters.items() >= written["rope_parameters"].items()


def damaged(weights: dict) -> None:
    weights["norm.weight"][3] += 1


def lost(weights: dict) -> None:
    del weights["layers.1.mlp.up_proj.weight"]


def added(weights: dict) -> None:
    weights["embed_tokens.weight"] = torch.zeros(V, H)


def other_dtype(weights: dict) -> None:
    weights["fc.weight"] = weights["fc.weight"].double()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (damaged, "norm.weight"),
        (lost, "layers.1.mlp.up_proj.weight"),
        (added, "embed_tokens.weight"),
        (other_dtype, "fc.weight"),
    ],
)
def test_a_file_that_differs_from_the_drafter_is_noticed(
    drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, name: str
) -> None:
    def save(weights, path, metadata):
        weights = {key: value.clone() for key, value in weights.items()}
        change(weights)
        save_file(weights, path, metadata=metadata)

    monkeypatch.setattr(written_folder, "save_file", save)
    with pytest.raises(RunError, match=f"read back differ from the drafter in .*{name}"):
        export_zlab(drafter, META, tmp_path / "export", dtype=torch.float32, **REST)


def test_the_recipe_exports_a_run_and_replaces_a_folder_only_when_asked(drafter: Drafter, tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_drafter(run, drafter.state_dict(), META)
    written = export(run, None, dtype="bfloat16", overwrite=False)
    assert Path(written["folder"]) == run / "export"
    with pytest.raises(UserError, match="exists and is not empty"):
        export(run, None, dtype="float32", overwrite=False)
    assert json.loads((run / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    export(run, None, dtype="float32", overwrite=True)
    assert json.loads((run / "export" / "config.json").read_text())["dtype"] == "float32"
