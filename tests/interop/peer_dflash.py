"""Run the reference implementation, PyPI's `dflash`, on what a test asks: `PYTHON peer_dflash.py FOLDER`.

It runs in the peer's own virtual environment and imports nothing of paceline.

    FOLDER/request.json         drafter and target: folders (target null: no generating)
                                hidden: sessions, each with `cached` and steps [{"key", "keep"}]
                                generate: groups of {"prompts", "max_new_tokens", "stop_ids"}
    FOLDER/request.safetensors  KEY.features [1, T, m * H], KEY.embeds [1, Q, H], KEY.positions [1, T + Q] of each step
    FOLDER/reply.json           versions of packages; loading: what from_pretrained says; config: how the peer read it;
                                generate: for each prompt of each group, tokens and acceptance_lengths
    FOLDER/reply.safetensors    KEY: hidden states [1, Q, H] of each step; inv_freq: the rotary frequencies
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import dflash.model
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

# The loop's statistics read a clock that waits for a CUDA device first. Nothing else of the peer is changed.
dflash.model._cuda_time = time.perf_counter


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    tensors = load_file(folder / "request.safetensors")
    drafter, loading = dflash.model.DFlashDraftModel.from_pretrained(
        request["drafter"], dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    drafter.eval()
    hidden = {}
    for session in request["hidden"]:
        hidden |= draft(drafter, session, tensors)
    generated = [generate_group(drafter, request["target"], group) for group in request["generate"]]
    reply = {
        "versions": {name: version(name) for name in ("dflash", "torch", "transformers")},
        "loading": {key: sorted(map(str, value)) for key, value in loading.items()},
        "config": as_read(drafter),
        "generate": generated,
    }
    save_file({**hidden, "inv_freq": drafter.rotary_emb.inv_freq}, folder / "reply.safetensors")
    (folder / "reply.json").write_text(json.dumps(reply, indent=2) + "\n")


def as_read(drafter) -> dict:
    """What the peer's model works with, rather than what config.json says."""
    attentions = [layer.self_attn for layer in drafter.layers]
    return {
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
        "num_target_layers": drafter.config.num_target_layers,
        "layers": len(attentions),
        "head_dim": attentions[0].head_dim,
        "heads": drafter.config.num_attention_heads,
        "kv_heads": drafter.config.num_key_value_heads,
        "rope": drafter.config.rope_parameters,
        "attention_scaling": drafter.rotary_emb.attention_scaling,
        "eps": sorted({m.variance_epsilon for m in drafter.modules() if hasattr(m, "variance_epsilon")}),
        "is_causal": [attention.is_causal for attention in attentions],
        "sliding_window": [attention.sliding_window for attention in attentions],
        "dtypes": sorted({str(p.dtype) for p in drafter.parameters()}),
        "parameters": sum(p.numel() for p in drafter.parameters()),
    }


@torch.inference_mode()
def draft(drafter, session: dict, tensors: dict) -> dict:
    """Draft block after block as the peer's loop does: new features in, then the block's own cache entries out."""
    cache = dflash.model._make_cache(drafter.config) if session["cached"] else None
    out = {}
    for step in session["steps"]:
        key = step["key"]
        out[key] = drafter(
            target_hidden=tensors[f"{key}.features"],
            noise_embedding=tensors[f"{key}.embeds"],
            position_ids=tensors[f"{key}.positions"],
            past_key_values=cache,
            use_cache=cache is not None,
        ).contiguous()
        if cache is not None:
            dflash.model._crop_to(cache, step["keep"])
    return out


def generate_group(drafter, folder: str, group: dict) -> list[dict]:
    target = load_target(folder)
    replies = []
    for prompt in group["prompts"]:
        done = dflash.model.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            group["max_new_tokens"],
            group["stop_ids"],
            return_stats=True,
        )
        tokens = done.output_ids[0, len(prompt) :].tolist()
        replies.append({"tokens": tokens, "acceptance_lengths": done.acceptance_lengths})
    return replies


TARGETS: dict = {}


def load_target(folder: str):
    if folder not in TARGETS:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        TARGETS[folder] = model.eval()
    return TARGETS[folder]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
