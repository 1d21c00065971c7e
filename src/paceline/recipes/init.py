"""`paceline init`: look at a target and write a complete, commented RUN.yaml for it."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from paceline.config import DataSettings, DrafterSettings, PipelineSettings, RunSettings, TargetSettings
from paceline.config_file import dump_settings, explain
from paceline.drafter.taps import default_taps
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe, load_tokenizer
from paceline.target.model import check_taps


def init(
    model: str,
    out: Path,
    *,
    revision: str | None,
    dataset: str,
    run_dir: str,
    mask_token_id: int | None,
    overwrite: bool,
) -> RunSettings:
    """Write RUN.yaml with the target's own shapes and this machine's devices; return the settings."""
    if out.is_dir() or (out.exists() and not overwrite):
        remedy = "" if out.is_dir() else " or add --overwrite"
        raise UserError(f"{out} exists. Choose another --out{remedy}.")
    facts = describe(model, revision)
    on_gpu = torch.cuda.is_available()
    try:
        settings = RunSettings(
            run_dir=run_dir,
            target=TargetSettings(model=model, revision=revision),
            drafter=drafter_for(facts, mask_token_id=choose_mask_token(facts, mask_token_id)),
            data=DataSettings(dataset=dataset),
            pipeline=pipeline_for([f"cuda:{i}" for i in range(torch.cuda.device_count())] if on_gpu else []),
        )
    except ValidationError as error:
        raise UserError(explain(error, f"the options or target {model}", {})) from None
    check_taps(settings.drafter.taps, facts)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(dump_settings(settings), encoding="utf-8")
    return settings


def drafter_for(facts: TargetFacts, *, mask_token_id: int, **changes: Any) -> DrafterSettings:
    """Return a drafter with the target's MLP width and rotary base, its head shape where drafters can have it, and five
    taps where they fit."""
    num_taps = 5 if facts.num_layers >= 9 else 3 if facts.num_layers >= 6 else 1
    shape = {
        "taps": default_taps(facts.num_layers, num_taps),
        "mask_token_id": mask_token_id,
        **_heads(facts),
        "intermediate_size": facts.intermediate_size,
        "rope_theta": facts.rope_theta,
    }
    return DrafterSettings.model_validate(shape | changes)


def _heads(facts: TargetFacts) -> dict[str, int]:
    """Return the target's head shape, or where its attention is of another kind (latent, wide heads, turned in part)
    that of published drafters of such targets: 32 heads of 128 with 8 for keys and values, fewer for narrow targets."""
    if facts.own_head_shape:
        return {"heads": facts.heads, "kv_heads": facts.kv_heads, "head_dim": facts.head_dim}
    heads = min(32, 1 << max(0, (facts.hidden_size // 64).bit_length() - 1))
    return {"heads": heads, "kv_heads": max(1, heads // 4), "head_dim": 128}


def pipeline_for(gpus: list[str], **changes: Any) -> PipelineSettings:
    """Return device lists: all on the CPU, colocated on one GPU, or the last of several GPUs for the drafter."""
    if not gpus:
        return PipelineSettings(**changes)
    return PipelineSettings(targets=tuple(gpus[:-1] or gpus), drafters=(gpus[-1],), **changes)


def choose_mask_token(facts: TargetFacts, wanted: int | None) -> int:
    """Return the mask token: the one asked for, the tokenizer's, a row without a token, or an unused special.

    Raises:
        UserError: the id is no row of the embedding, or there is no obvious choice.
    """
    if wanted is not None:
        if not 0 <= wanted < facts.vocab_size:
            raise UserError(
                f"--mask-token-id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {wanted}."
            )
        return wanted
    tokenizer = load_tokenizer(str(facts.folder))
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if len(tokenizer) < facts.vocab_size:
        return len(tokenizer)
    template = tokenizer.chat_template or ""
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    named |= set(facts.eos_ids)
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and token_id not in named and token.content not in template:
            return token_id
    raise UserError(
        f"{facts.name} has no spare embedding row and no unused special token for the mask. Name one that never occurs "
        f"in your data with --mask-token-id."
    )
