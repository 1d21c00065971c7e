"""The part of config.json that the layouts share: a drafter in the words of a Qwen3 decoder, written and read.

Loaders disagree in their defaults, so layer types, rope and sliding windows are written out.
"""

from typing import Any

import torch

from paceline.checkpoint.drafter import DrafterMeta
from paceline.formats.foreign import ConfigFile, shown


def qwen3_body(meta: DrafterMeta) -> dict[str, Any]:
    """Return sizes, rope and attention of a drafter; every layer sees its whole context and its whole block."""
    shape = meta.settings
    return {
        "model_type": "qwen3",
        "num_hidden_layers": shape.layers,
        "hidden_size": meta.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,  # older readers, SGLang among them
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # transformers 5, vLLM
        "max_position_embeddings": meta.max_positions,
        "layer_types": ["full_attention"] * shape.layers,
        "is_causal": False,  # vLLM asks this before all else
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return a number format in config.json's words."""
    return str(dtype).removeprefix("torch.")


# Keys of drafters that scale what drafters here leave as it is; 1 is the same as none.
_SCALES = ("output_multiplier", "logit_scale")


def read_body(config: ConfigFile, dflash: ConfigFile) -> dict[str, Any]:
    """Return what a foreign folder says of sizes and rope, in ForeignDrafter's words.

    Raises:
        UserError: a size is missing, or the drafter computes what drafters here do not.
    """
    heads, hidden_size = config.needed("num_attention_heads"), config.needed("hidden_size")
    if config.get("hidden_act") not in (None, "silu"):
        raise config.refused(f"has the activation {shown(config.get('hidden_act'))}, and drafters here have silu")
    for place in (config, dflash):
        for key in _SCALES:
            if place.get(key) not in (None, 1, 1.0):
                raise config.refused(f"sets {key} to {shown(place.get(key))}, which drafters here do not follow")
    return {
        "hidden_size": hidden_size,
        "vocab_size": config.whole("vocab_size"),
        "layers": config.needed("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.needed("num_key_value_heads"),
        "head_dim": config.whole("head_dim") or hidden_size // heads,
        "intermediate_size": config.needed("intermediate_size"),
        "rope_theta": _rope_theta(config),
        "rms_norm_eps": config.number("rms_norm_eps"),
        "embed_scale": _either(config, dflash, "input_embedding_scale") or 1.0,
        "logit_cap": _either(config, dflash, "final_logit_softcapping") or 0.0,
    }


def _either(config: ConfigFile, dflash: ConfigFile, key: str) -> float | None:
    return (dflash if key in dflash else config).number(key)


def _rope_theta(config: ConfigFile) -> float | None:
    rope = config.section("rope_parameters")
    for place in (rope, config.section("rope_scaling")):
        kind = place.get("rope_type") or place.get("type")
        if kind not in (None, "default"):
            raise config.refused(f"scales its rotary positions ({shown(kind)}), and drafters here do not")
        if "mrope_section" in place:
            raise config.refused("has rotary positions of several axes (mrope_section), and drafters here have one")
    for place in (config, rope):
        if place.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise config.refused("turns a part of each head only (partial_rotary_factor), and drafters here all of it")
    return rope.number("rope_theta") or config.number("rope_theta")


def sliding_remark(config: ConfigFile) -> tuple[str, ...]:
    """Return what is to be told of layers that see a window only; drafters here see their whole context."""
    kinds = config.get("layer_types") or []
    windowed = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    if not windowed:
        return ()
    width = shown(config.get("sliding_window"))
    return (f"was trained with {windowed} of {len(kinds)} layers seeing a window of {width} tokens",)
