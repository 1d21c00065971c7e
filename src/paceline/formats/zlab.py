"""The z-lab checkpoint layout: a Qwen3-style config.json and model.safetensors without embedding and head.

Loaded by the `dflash` package, by SGLang and by vLLM. Loaders disagree in their defaults, so block size, mask token,
taps, layer types, rope and causality are written out, each where every loader looks for it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.checkpoint.drafter import DrafterMeta
from paceline.checkpoint.folder import whole_folder
from paceline.drafter.model import Drafter
from paceline.records import RunError


def zlab_config(meta: DrafterMeta, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json's content."""
    shape = meta.settings
    dflash = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
        "causal": False,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
        "num_target_layers": meta.num_target_layers,
        "dflash_config": dflash,
        "is_causal": False,
        "num_hidden_layers": shape.layers,
        "hidden_size": meta.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": meta.max_positions,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "vocab_size": meta.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def export_zlab(drafter: Drafter, meta: DrafterMeta, out: Path, *, dtype: torch.dtype) -> dict[str, Any]:
    """Write a drafter to `out`, read it back and compare every tensor; return what was written.

    Raises:
        RunError: what lies on disk is not what was in memory.
    """
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    with whole_folder(out) as aside:
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(zlab_config(meta, dtype), indent=2) + "\n")
        _check_file(aside / "model.safetensors", weights)
    return {
        "format": "zlab",
        "folder": str(out),
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": len(weights),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "bytes": (out / "model.safetensors").stat().st_size,
        "reload_checked": True,
    }


def is_empty_or_export(folder: Path) -> bool:
    """Return whether a folder holds nothing but what `export_zlab` writes, so that replacing it loses nothing else."""
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    if names != {"config.json", "model.safetensors"}:
        return False
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("architectures") == ["DFlashDraftModel"]


def _check_file(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Compare a written file with what was in memory, before it takes the place of an earlier export."""
    try:
        back = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"The exported weights could not be read back ({error}). Check the disk.") from None
    wrong = sorted(name for name in weights.keys() | back.keys() if not _same(weights.get(name), back.get(name)))
    if wrong:
        raise RunError(f"The exported weights read back differ from the drafter in {wrong[:3]}. Check the disk.")


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
