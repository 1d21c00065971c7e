"""README.md of an exported drafter: what it is, how it was made, what it reached, how to serve it, its limits."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.drafter import DrafterMeta
from paceline.config import RunSettings
from paceline.records import many

# Settings that decide what is learnt, in the order of the card.
_RECIPE = (
    "train.epochs",
    "train.max_steps",
    "train.optimizer",
    "train.lr",
    "train.schedule",
    "train.warmup_share",
    "train.min_lr_ratio",
    "train.weight_decay",
    "train.clip",
    "train.gamma",
    "train.dtype",
    "train.context_slots",
    "train.anchor_slots",
    "train.anchors_per_sample",
    "train.batches_per_step",
    "train.seed",
    "data.max_length",
    "data.layout",
    "data.token_budget",
    "target.dtype",
)
_RESULTS = (
    ("tau_trained", "acceptance length τ, mean over prompts"),
    ("tau_pooled", "acceptance length τ, pooled over cycles"),
    ("speedup_vs_autoregressive", "speed against plain decoding, same engine"),
    ("prompt_set", "prompts from"),
    ("prompts", "prompts"),
    ("thinking", "thinking"),
    ("max_new_tokens", "longest answer, tokens"),
    ("temperature", "temperature"),
    ("dtype", "number format"),
    ("device", "measured on"),
)


def model_card(
    meta: DrafterMeta,
    layout: str,
    folder: Path,
    *,
    target: str,
    revision: str | None,
    settings: RunSettings | None,
    provenance: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None,
) -> str:
    """Return the card of a folder in a layout. `target` is a hub id, with the commit `revision`, or a folder.

    `settings`, `provenance` and `evaluation` are what the run folder holds.
    """
    shape = meta.settings
    hub = not Path(target).is_absolute()
    front = [f"base_model: {json.dumps(target)}"] if hub else []
    pinned = f" at commit `{revision}`" if revision else ""
    return "\n".join(
        [
            "---",
            *front,
            "tags: [dflash, speculative-decoding]",
            "---",
            "",
            f"# DFlash drafter for {Path(target).name}",
            "",
            f"A block-diffusion drafter for `{target}`{pinned}, to be used with that model and no other (paceline's "
            f"fingerprint of it: `{meta.target_revision}`). Tokens drafted at once: {shape.block_size - 1}. Layout: "
            f"{layout}.",
            "",
            "| | |",
            "| --- | --- |",
            f"| block size B | {shape.block_size} |",
            f"| layers, heads, key/value heads, head width | {shape.layers}, {shape.heads}, {shape.kv_heads}, "
            f"{shape.head_dim} |",
            f"| target layers read (0-based outputs) | {', '.join(map(str, shape.taps))} |",
            f"| mask token id | {shape.mask_token_id} |",
            f"| optimizer steps | {meta.steps:,} |",
            "",
            "## Serve",
            "",
            *_serve(shape.block_size, layout, folder, target, revision if hub else None),
            "",
            "## Acceptance",
            "",
            *_results(evaluation),
            "",
            "## Recipe",
            "",
            *_recipe(settings, provenance),
            "",
            "## Limits",
            "",
            *_limits(meta, provenance),
            "",
            "## Licence",
            "",
            "Not stated: whoever publishes this folder chooses one, within the terms of the target and of the data.",
            "",
        ]
    )


def _serve(block_size: int, layout: str, folder: Path, target: str, revision: str | None) -> list[str]:
    pin = f" --revision {shlex.quote(revision)}" if revision else ""
    told = {"method": "dflash", "model": str(folder), "num_speculative_tokens": block_size - 1}
    vllm = [
        f"vllm serve {shlex.quote(target)}{pin} \\",
        f"    --speculative-config {shlex.quote(json.dumps(told))} \\",
        "    --attention-backend flash_attn --max-num-batched-tokens 32768",
    ]
    if layout == "speculators":
        told_sglang = ["SGLang does not read this layout: export with `--format zlab` for it."]
    else:
        told_sglang = [
            "SGLang counts the block, the target's own token included:",
            "",
            "```sh",
            f"python -m sglang.launch_server --model-path {shlex.quote(target)}{pin} \\",
            f"    --speculative-algorithm DFLASH --speculative-draft-model-path {shlex.quote(str(folder))} \\",
            f"    --speculative-num-draft-tokens {block_size}",
            "```",
        ]
    return ["vLLM counts drafted tokens, one less than a block:", "", "```sh", *vllm, "```", "", *told_sglang]


def _results(evaluation: Mapping[str, Any] | None) -> list[str]:
    if evaluation is None:
        return ["Not measured: `paceline evaluate` had not been run on these weights when they were exported."]
    rows = [f"| {label} | {_plain(evaluation[key])} |" for key, label in _RESULTS if key in evaluation]
    near = evaluation.get("near_ties") or 0
    equal = _plain(evaluation["lossless"]) + (f", but for {many(near, 'answer')} parting at a near tie" if near else "")
    rows.append(f"| output equal to plain decoding | {equal} |")
    slots = " ".join(f"{share:.2f}" for share in evaluation["per_slot_acceptance"][1:])
    rows.append(f"| accepted up to slot 1, 2, … | {slots} |")
    return ["Measured by speculative decoding with the target itself:", "", "| | |", "| --- | --- |", *rows]


def _recipe(settings: RunSettings | None, provenance: Mapping[str, Any]) -> list[str]:
    rows = []
    if settings is not None:
        for key in _RECIPE:
            section, name = key.split(".")
            value = getattr(getattr(settings, section), name)
            if value is not None:
                rows.append(f"| `{key}` | {_plain(value)} |")
    for dataset in _datasets(provenance):
        rows.append(f"| data | `{dataset['folder']}`, rows `{dataset['rows']}` |")
    if provenance.get("init"):
        files = ", ".join(f"{name} sha256 `{number}`" for name, number in provenance["init"]["sha256"].items())
        rows.append(f"| started from | `{provenance['init']['folder']}`: {files} |")
    packages = provenance.get("packages") or {}
    made = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    rows += [f"| made with | {made} |"] if made else []
    return ["| | |", "| --- | --- |", *rows] if rows else ["Not recorded in the run's folder."]


def _datasets(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    data = provenance.get("dataset") or []
    return data if isinstance(data, list) else [data]


def _limits(meta: DrafterMeta, provenance: Mapping[str, Any]) -> list[str]:
    longest = max((dataset.get("longest", 0) for dataset in _datasets(provenance)), default=0)
    trained = f"samples of at most {longest:,} tokens" if longest else "samples of a length that is not recorded"
    return [
        f"- Trained on {trained}; acceptance falls beyond that. The target goes to {meta.max_positions:,}.",
        "- It has learnt the target's answers in the mode (chat template, thinking or not) that its data was made in.",
        f"- Blocks larger than {meta.settings.block_size} were not trained; smaller ones work.",
    ]


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
