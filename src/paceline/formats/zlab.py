"""The z-lab layout: a Qwen3-style config.json and the body's weights, without embedding and head.

Loaded by the `dflash` package, by SGLang and by vLLM. Loaders disagree in their defaults, so block size, mask token,
taps and causality are written out, each where every loader looks for it. SpecForge's folders have it too.
"""

from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.drafter import DrafterMeta
from paceline.drafter.model import Drafter
from paceline.formats.folder import write_folder
from paceline.formats.foreign import ConfigFile, ForeignDrafter
from paceline.formats.qwen3 import dtype_name, qwen3_body, read_body, sliding_remark


def zlab_config(meta: DrafterMeta, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json's content."""
    shape = meta.settings
    own = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": dtype_name(dtype),
        **own,
        "num_target_layers": meta.num_target_layers,
        "dflash_config": {**own, "causal": False, **_ends(meta)},
        **qwen3_body(meta),
    }


def _ends(meta: DrafterMeta) -> dict[str, Any]:
    """Return what the reference does to embedding rows and logits, where that is not nothing."""
    scale = {"input_embedding_scale": meta.embed_scale} if meta.embed_scale != 1 else {}
    return scale | ({"final_logit_softcapping": meta.logit_cap} if meta.logit_cap else {})


def body_weights(drafter: Drafter, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a drafter's weights under their published names, which are its own, on the CPU."""
    return {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}


def export_zlab(
    drafter: Drafter, meta: DrafterMeta, out: Path, *, dtype: torch.dtype, card: str, max_shard_bytes: int
) -> dict[str, Any]:
    """Write a drafter to `out`, read it back and compare every tensor; return what was written.

    Raises:
        RunError: what lies on disk is not what was in memory.
    """
    weights = body_weights(drafter, dtype)
    written = write_folder(out, zlab_config(meta, dtype), weights, card, max_shard_bytes=max_shard_bytes)
    parameters = sum(tensor.numel() for tensor in weights.values())
    return {"format": "zlab", "dtype": dtype_name(dtype), "parameters": parameters, **written}


def read_zlab(config: ConfigFile) -> ForeignDrafter:
    """Return what a z-lab or SpecForge folder says of its drafter; dflash_config goes before the top level."""
    dflash = config.section("dflash_config")
    body = read_body(config, dflash)
    causal = config.get("is_causal") if "is_causal" in config else dflash.get("causal")
    return ForeignDrafter(
        layout="z-lab",
        block_size=dflash.whole("block_size") or config.whole("block_size"),
        mask_token_id=dflash.whole("mask_token_id") if "mask_token_id" in dflash else config.whole("mask_token_id"),
        taps=dflash.layers("target_layer_ids") or config.layers("target_layer_ids"),
        num_target_layers=dflash.whole("num_target_layers") or config.whole("num_target_layers"),
        remarks=(*sliding_remark(config), *(["was trained with causal attention in its blocks"] if causal else [])),
        **body,
    )
