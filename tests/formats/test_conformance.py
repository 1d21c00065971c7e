"""What the loaders of SGLang and vLLM ask of a folder, as rules of their own that are held against what is exported.

Both need a GPU server, so they do not run here. Each rule names the file it was read from and when; a server of another
date may ask for something else.

    SGLang, August 2026   python/sglang/srt: speculative/dflash_utils.py, speculative/dflash_worker.py, models/dflash.py
    vLLM, August 2026     vllm: model_executor/models/qwen3_dflash.py, v1/spec_decode/dflash.py, v1/worker/gpu/
                          spec_decode/eagle/eagle3_utils.py, transformers_utils/configs/speculators/{base,algos}.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from small_drafter import N_L, SHAPE, H, V
from torch import Tensor

Folder = tuple[dict[str, Any], dict[str, Tensor]]


def read(folder: Path) -> Folder:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.fixture
def exported(zlab: Path) -> Folder:
    return read(zlab)


@pytest.fixture
def speculator(speculators: Path) -> Folder:
    return read(speculators)


# ------------------------------------------------------------------------------------------- SGLang, the z-lab layout


def sglang(config: dict[str, Any], key: str) -> Any:
    """dflash_utils.py: dflash_config first, then the top level."""
    return config["dflash_config"].get(key, config.get(key))


def test_sglang_finds_the_drafters_own_keys(exported: Folder) -> None:
    config, _ = exported
    assert config["architectures"] == ["DFlashDraftModel"]  # models/dflash.py: the name it is registered under
    assert "auto_map" not in config  # no code is to be fetched
    assert sglang(config, "block_size") == SHAPE.block_size  # dflash_utils.py: 16 where it is missing
    assert sglang(config, "mask_token_id") == SHAPE.mask_token_id
    assert 0 <= sglang(config, "mask_token_id") < config["vocab_size"]  # dflash_worker.py
    assert sglang(config, "mask_token") is None  # would be looked up in the tokenizer and has to agree
    assert sglang(config, "projector_type") is None  # another kind of drafter
    assert not [
        key for key in (*config, *config["dflash_config"]) if key.startswith(("conv_", "selector_"))
    ]  # DFlash 2


def test_sglang_can_capture_every_tap(exported: Folder) -> None:
    config, _ = exported
    assert sglang(config, "num_target_layers") == N_L  # not the number of taps
    ids = sglang(config, "target_layer_ids")
    assert all(0 <= number <= N_L - 2 for number in ids)  # dflash_utils.py: it captures the input of layer id + 1


def test_sglang_builds_the_same_layers(exported: Folder) -> None:
    config, tensors = exported
    assert config["hidden_act"] == "silu"  # models/dflash.py: nothing else
    assert config["rope_theta"] == SHAPE.rope_theta  # the older keys are read
    assert config["rope_scaling"] is None
    assert config.get("rope_is_neox_style", config.get("is_neox_style", True)) is True
    assert config["layer_types"] == ["full_attention"] * SHAPE.layers  # sliding layers would be causal
    assert config["sliding_window"] is None
    taps = len(sglang(config, "target_layer_ids"))
    assert tuple(tensors["fc.weight"].shape) == (H, taps * H)  # another width raises
    # Unknown tensors are passed over in silence, so there must be none, and none of the target's.
    assert all(name.startswith(("fc.", "hidden_norm.", "norm.", "layers.")) for name in tensors)


# ---------------------------------------------------------------------------------------------- vLLM, the z-lab layout


def vllm_causal(config: dict[str, Any], layer: int) -> bool:
    """qwen3_dflash.py: is_causal, then dflash_config.causal, then whether the layer slides."""
    for said in (config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")):
        if said is not None:
            return bool(said)
    return config["layer_types"][layer] == "sliding_attention"


def test_vllm_finds_the_drafters_own_keys(exported: Folder) -> None:
    config, tensors = exported
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"]["mask_token_id"] == SHAPE.mask_token_id  # v1/spec_decode/dflash.py: there only
    ids = config["dflash_config"]["target_layer_ids"]  # eagle3_utils.py: there only, and one is added
    width = config.get("target_hidden_size") or config["hidden_size"]
    assert tuple(tensors["fc.weight"].shape) == (H, width * len(ids))
    assert not {"use_aux_hidden_state", "attention_sink_bias", "use_swa", "swa_window_size"} & {
        *config["dflash_config"]
    }
    assert not {"logit_scale", "draft_vocab_size", "target_hidden_size"} & {*config}


def test_vllm_sees_whole_blocks(exported: Folder) -> None:
    config, _ = exported
    assert not any(vllm_causal(config, layer) for layer in range(SHAPE.layers))
    assert config["layer_types"] == ["full_attention"] * SHAPE.layers  # mixed ones need its second model runner


def test_vllm_turns_by_the_drafters_base(exported: Folder) -> None:
    config, _ = exported
    # qwen3_dflash.py: 1,000,000 where it is missing, and axes of their own are refused
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": SHAPE.rope_theta}
    assert config.get("is_neox_style", True) is True


def test_vllm_finds_every_weight_under_its_own_prefix(exported: Folder) -> None:
    _, tensors = exported
    assert not [name for name in tensors if name.startswith("model.")]  # it puts that before each
    assert "mask_hidden" not in tensors  # refused
    for i in range(SHAPE.layers):  # it fuses these
        assert {f"layers.{i}.self_attn.{name}_proj.weight" for name in "qkv"} <= tensors.keys()
        assert {f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")} <= tensors.keys()


# ---------------------------------------------------------------------------------------- vLLM, the speculators layout


def as_vllm_reads(config: dict[str, Any]) -> dict[str, Any]:
    """base.py and algos.py: the inner configuration with the drafter's own keys put in."""
    inner = dict(config["transformer_layer_config"])
    inner["dflash_config"] = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [number - 1 for number in config["aux_hidden_state_layer_ids"]],
        "causal": not config.get("sliding_window_non_causal", True),
    }
    return inner


def test_vllm_takes_a_speculators_folder_for_one(speculator: Folder) -> None:
    config, _ = speculator
    assert config["speculators_model_type"] == "dflash"  # which becomes the method
    asked = config["speculators_config"]
    assert asked["proposal_methods"][0]["speculative_tokens"] == SHAPE.block_size - 1  # which it drafts if not told
    assert asked["verifier"]["name_or_path"] == "org/target"
    assert isinstance(config["transformer_layer_config"], dict)
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == V  # no pruned head, no d2t
    assert config["sample_from_anchor"] is False


def test_vllm_reads_the_same_drafter_from_both_layouts(exported: Folder, speculator: Folder) -> None:
    inner = as_vllm_reads(speculator[0])
    config, tensors = exported
    assert inner["dflash_config"]["target_layer_ids"] == config["dflash_config"]["target_layer_ids"]
    assert inner["dflash_config"]["mask_token_id"] == config["dflash_config"]["mask_token_id"]
    same = set(inner) - {"dflash_config"}
    assert {key: inner[key] for key in same} == {key: config[key] for key in same}
    assert set(speculator[1]) == {*tensors, "embed_tokens.weight", "lm_head.weight"}


def test_vllm_sees_whole_blocks_in_a_speculators_folder(speculator: Folder) -> None:
    """The package's own default, sliding_window_non_causal: false, would make every layer causal."""
    inner = as_vllm_reads(speculator[0])
    assert inner["dflash_config"]["causal"] is False
    assert not any(vllm_causal(inner, layer) for layer in range(SHAPE.layers))
    del inner["is_causal"]  # for a version that does not ask that key
    assert not any(vllm_causal(inner, layer) for layer in range(SHAPE.layers))
