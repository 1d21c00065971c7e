"""`paceline init`: look at a target and write a complete, commented RUN.yaml for it."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from paceline.config import DataSettings, DrafterSettings, PipelineSettings, RunSettings, TargetSettings
from paceline.config_file import dump_settings, explain
from paceline.data.plan import ROUND
from paceline.drafter.taps import default_taps
from paceline.pipeline.cards import usable_of
from paceline.recipes.evaluator_memory import smallest_device
from paceline.recipes.mask_token import choose_mask_token
from paceline.recipes.target_memory import fewest_devices
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe
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
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    try:
        settings = RunSettings(
            run_dir=run_dir,
            target=TargetSettings(model=model, revision=revision),
            drafter=drafter_for(facts, mask_token_id=choose_mask_token(facts, mask_token_id, dataset)),
            data=data_for(facts, dataset),
            pipeline=pipeline_for(gpus),
        )
    except ValidationError as error:
        raise UserError(explain(error, f"the options or target {model}", {})) from None
    check_taps(settings.drafter.taps, facts)
    settings = _with_large_target(settings, facts, gpus)
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


def data_for(facts: TargetFacts, dataset: str) -> DataSettings:
    """Return the default settings of data, with shorter samples where the target turns long ones by other angles."""
    settings, limit = DataSettings(dataset=dataset), facts.conventions.rope_limit
    if not 0 < limit < settings.max_length:
        return settings
    return settings.model_copy(update={"max_length": max(limit // ROUND * ROUND, 2)})


def pipeline_for(gpus: list[str], **changes: Any) -> PipelineSettings:
    """Return device lists: all on the CPU, colocated on one GPU, or the last of several GPUs for the drafter."""
    if not gpus:
        return PipelineSettings(**changes)
    return PipelineSettings(targets=tuple(gpus[:-1] or gpus), drafters=(gpus[-1],), **changes)


def _with_large_target(settings: RunSettings, facts: TargetFacts, gpus: list[str]) -> RunSettings:
    """Return the settings with each replica on as few GPUs as hold it, where one does not and there are enough."""
    found = fewest_devices(settings, facts, usable_of(smallest_device(gpus))) if gpus else None
    each = found[0] if found else 1
    replicas = (len(gpus) - 1) // each
    if each == 1 or not replicas:
        return settings
    target = settings.target.model_copy(update={"devices_per_replica": each})
    pipeline = settings.pipeline.model_copy(update={"targets": tuple(gpus[: replicas * each])})
    return settings.model_copy(update={"target": target, "pipeline": pipeline})
