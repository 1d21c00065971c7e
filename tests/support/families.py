"""Tiny random targets of many families, each made from transformers' own configuration with what is peculiar to it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 128
EOS = 2
MASK = 3


@dataclass(frozen=True, slots=True)
class Family:
    """What a family is called, what makes it peculiar, and the configuration of its tiny target."""

    name: str
    peculiar: str
    config: Callable[[], Any]
    theta: float = 10000.0  # the rotary base that its drafter must have
    heads: tuple[int, int, int] = (4, 2, 16)  # its drafter's: heads, kv_heads, head_dim
    model: str = ""  # its class, where it is not the one of its configuration


PUBLISHED = (1, 1, 128)  # of a drafter that does not inherit its target's heads, at a width of 64


def _common(layers: int = 6, **more: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # larger than usual, so that answers vary
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return shape | more


def _of(kind: str, layers: int = 6, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{kind}Config")(**_common(layers, **more))


VISION = {"hidden_size": 16, "intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MIXED = ["sliding_attention", "full_attention"] * 3
GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

FAMILIES = [
    Family("Llama 3", "llama3 rope scaling", _of("Llama", rope_parameters=LLAMA3), theta=500000.0),
    Family("SmolLM2", "tied head", _of("Llama", tie_word_embeddings=True)),
    Family("Mistral", "sliding window", _of("Mistral", sliding_window=8)),
    Family("Qwen2.5", "attention bias", _of("Qwen2", tie_word_embeddings=True)),
    Family("Qwen3", "q and k norms", _of("Qwen3")),
    Family("Qwen3-MoE", "experts", _of("Qwen3Moe", **MOE, decoder_sparse_step=1)),
    Family(
        "Qwen3-Next",
        "linear attention, partial rotary, gated attention, experts",
        _of("Qwen3Next", 8, **LINEAR, **MOE, shared_expert_intermediate_size=32, rope_parameters=PARTIAL),
        1e7,
        PUBLISHED,
    ),
    Family(
        "Qwen3.5",
        "linear attention, partial rotary of several axes, gated attention",
        _of("Qwen3_5Text", 8, **LINEAR, rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
        1e7,
        PUBLISHED,
    ),
    Family(
        "Qwen3.5 that sees",
        "the same beside a vision tower",
        lambda: transformers.Qwen3_5Config(
            text_config=_common(8, **LINEAR, rope_parameters=PARTIAL | {"mrope_section": [1, 1, 0]}),
            vision_config={**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        ),
        1e7,
        PUBLISHED,
        "Qwen3_5ForConditionalGeneration",
    ),
    Family(
        "Gemma 2",
        "scaled embeddings, softcapping, sliding and full layers",
        _of(
            "Gemma2",
            layer_types=MIXED,
            sliding_window=8,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=0.5,
            tie_word_embeddings=True,
        ),
    ),
    Family(
        "Gemma 3",
        "scaled embeddings, sliding and full layers with rope of their own",
        _of(
            "Gemma3Text",
            layer_types=MIXED,
            sliding_window=8,
            query_pre_attn_scalar=16,
            rope_parameters=GEMMA3,
            tie_word_embeddings=True,
        ),
        1e6,
    ),
    Family(
        "Gemma 3 that sees",
        "the same beside a vision tower",
        lambda: transformers.Gemma3Config(
            text_config=_common(
                layer_types=MIXED,
                sliding_window=8,
                query_pre_attn_scalar=16,
                rope_parameters=GEMMA3,
                tie_word_embeddings=True,
            ),
            vision_config={
                **VISION,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        ),
        1e6,
        model="Gemma3ForConditionalGeneration",
    ),
    Family("Phi-3", "fused projections, sliding window", _of("Phi3", sliding_window=8)),
    Family(
        "gpt-oss",
        "experts, attention sinks, sliding and full layers, yarn",
        _of(
            "GptOss",
            layer_types=MIXED,
            sliding_window=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=YARN,
        ),
        150000.0,
    ),
    Family(
        "GLM-4",
        "half rotary, interleaved; norms behind attention and MLP",
        _of("Glm4", rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        heads=PUBLISHED,
    ),
    Family("DeepSeek-V3", "latent attention (MLA), experts", _of("DeepseekV3", **MLA, head_dim=8), heads=PUBLISHED),
    Family(
        "LFM2",
        "short convolutions, final norm of another name",
        _of(
            "Lfm2",
            layer_types=["conv", "conv", "full_attention"] * 2,
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
        ),
        1e6,
    ),
]


def save(family: Family, folder: Path, seed: int = 0) -> Path:
    """Write the family's tiny target with random weights; biases, sinks and norms are random, too, so none is idle."""
    torch.manual_seed(seed)
    made = getattr(transformers, family.model)._from_config if family.model else AutoModelForCausalLM.from_config
    model = made(family.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        if "gemma" in model.config.model_type:  # else a token's own scaled embedding is all that it sees
            model.get_input_embeddings().weight.mul_(0.2)
    model.save_pretrained(folder)
    return folder
