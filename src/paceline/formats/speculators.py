"""The speculators layout: its own config.json around a Qwen3 body, and embedding and head beside the body's weights.

Loaded by the `speculators` package and by vLLM. Three things differ from the z-lab layout: layers are counted from the
embedding's output, so each id is one more than the tap; how many tokens are drafted is written beside the block; and
embedding and head are copied from the target, for readers that do not fetch them there.

vLLM takes `sliding_window_non_causal: false`, the reader's default, as an order to make every layer causal. A drafter
here has none that is, so true is written, which speculators itself heeds for sliding layers only.
"""

from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.drafter import DrafterMeta
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.formats.folder import write_folder
from paceline.formats.foreign import ConfigFile, ForeignDrafter, shown
from paceline.formats.qwen3 import dtype_name, qwen3_body, read_body, sliding_remark
from paceline.formats.zlab import body_weights

VERSION = "0.9.0"  # of the package whose reader these keys were taken from


def speculators_config(
    meta: DrafterMeta, dtype: torch.dtype, *, verifier: str, verifier_architectures: list[str]
) -> dict[str, Any]:
    """Return config.json's content. `verifier` is the target's hub id or folder."""
    shape = meta.settings
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": dtype_name(dtype),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "draft_vocab_size": meta.vocab_size,
        "target_hidden_size": None,  # the drafter's own
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": qwen3_body(meta),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }


def export_speculators(
    drafter: Drafter,
    meta: DrafterMeta,
    ends: FrozenEnds,
    out: Path,
    *,
    verifier: str,
    verifier_architectures: list[str],
    dtype: torch.dtype,
    card: str,
    max_shard_bytes: int,
) -> dict[str, Any]:
    """Write a drafter with its target's ends to `out`, read it back, compare every tensor; return what was written.

    Raises:
        RunError: what lies on disk is not what was in memory.
    """
    body = body_weights(drafter, dtype)
    own = {
        "embed_tokens.weight": ends.embed_VH.to("cpu", dtype).contiguous(),
        "lm_head.weight": ends.head_VH.to("cpu", dtype).contiguous(),
    }
    if own["lm_head.weight"].data_ptr() == own["embed_tokens.weight"].data_ptr():  # tied: a file shares no memory
        own["lm_head.weight"] = own["lm_head.weight"].clone()
    config = speculators_config(meta, dtype, verifier=verifier, verifier_architectures=verifier_architectures)
    written = write_folder(out, config, {**body, **own}, card, max_shard_bytes=max_shard_bytes)
    parameters = sum(tensor.numel() for tensor in body.values())
    return {"format": "speculators", "dtype": dtype_name(dtype), "parameters": parameters, **written}


def read_speculators(config: ConfigFile) -> ForeignDrafter:
    """Return what a speculators folder says of its drafter.

    Raises:
        UserError: it is of another kind than DFlash, or reads the embedding's output as a feature.
    """
    if config.get("speculators_model_type") != "dflash":
        raise config.refused(
            f"is a {shown(config.get('speculators_model_type'))} speculator, and drafters here are DFlash"
        )
    body = read_body(config.section("transformer_layer_config"), config)
    ids = config.layers("aux_hidden_state_layer_ids")
    if ids and min(ids) < 1:
        raise config.refused("reads the embedding's output as a feature (aux_hidden_state_layer_ids has a 0)")
    return ForeignDrafter(
        layout="speculators",
        block_size=config.whole("block_size"),
        mask_token_id=config.whole("mask_token_id"),
        taps=tuple(number - 1 for number in ids) if ids else None,
        num_target_layers=None,
        remarks=_remarks(config, body["vocab_size"]),
        **body,
    )


def _remarks(config: ConfigFile, vocab_size: int | None) -> tuple[str, ...]:
    remarks = list(sliding_remark(config.section("transformer_layer_config")))
    if config.get("sample_from_anchor"):
        remarks.append("was trained to predict the token after each slot (sample_from_anchor), not the slot's own")
    drafted = config.whole("draft_vocab_size")
    if drafted and drafted != vocab_size:
        remarks.append(
            f"was trained with {drafted:,} of the vocabulary's tokens; all of the target's head is used here"
        )
    return tuple(remarks)
