"""`paceline evaluate --probe`: which conventions drafter, target and data share, one line each."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.drafter import DrafterMeta, find_drafter
from paceline.config_file import load_settings
from paceline.data.manifest import tokenizer_fingerprint
from paceline.data.prompt_sets import Source
from paceline.data.store import CompletionDataset, find_token, open_dataset
from paceline.observe.console import Console
from paceline.probe import parity
from paceline.probe.parity import Check, Plain
from paceline.probe.parity_features import decoding_features, training_features
from paceline.recipes.evaluate_asked import Asking, ask, template_hash
from paceline.recipes.probe_reference import against_reference, open_reference
from paceline.target.load import TargetFacts, describe, load_causal, load_ends, load_tokenizer
from paceline.target.model import DecodingTarget, FeatureTarget

_PROMPTS, _TOKENS = 4, 256  # that are computed; all prompts are searched for the mask token


def evaluate_probe(
    run: Path,
    prompts: Source,
    asking: Asking,
    *,
    device: str,
    dtype: str,
    console: Console,
    moved_to: str | None = None,
    checkpoint: str | None = None,
    reference: str | None = None,
) -> dict[str, Any]:
    """Check every convention and return what was found; of a `reference` also how far features are from its."""
    meta = find_drafter(run, checkpoint).meta
    facts = describe(moved_to or meta.target)
    other = None if reference is None else open_reference(reference, facts)
    tokenizer = load_tokenizer(facts.name)
    ids = ask(prompts, asking, tokenizer, facts).ids
    some = [prompt[:_TOKENS] for prompt in ids[:_PROMPTS]]

    # 1. What was written down.
    datasets = _datasets(run)
    checks = [
        _check_settings(run, meta),
        _check_shape(meta, facts),
        parity.check_made("tokenizer", tokenizer_fingerprint(tokenizer), _made(datasets, "tokenizer")),
        parity.check_made("chat template", template_hash(tokenizer), _made(datasets, "chat_template")),
        parity.check_mask(meta.settings, facts, ids, _mask_rows(datasets, meta.settings.mask_token_id)),
    ]

    # 2. What is computed: no more than one copy of the target is loaded at a time.
    effect = None
    if all(check.state != "off" for check in checks[1:2]):
        numbers = getattr(torch, dtype)
        with console.progress("probe", 3 + (other is not None)) as tick:
            trained, computed = _computed(meta, facts, some, numbers, device, tick)
            checks += computed
            if other is not None:
                effect = against_reference(other, meta.settings.taps, trained, some, dtype=numbers, device=device)
                tick(4)
    return {
        "run": str(run),
        "target": facts.name,
        "dtype": dtype,
        "prompts": len(ids),
        "checks": [{"convention": one.convention, "state": one.state, "text": one.text} for one in checks],
        "reference": effect,
    }


def _computed(
    meta: DrafterMeta, facts: TargetFacts, some: list[list[int]], dtype: torch.dtype, device: str, tick: Any
) -> tuple[list[Tensor], list[Check]]:
    """Return the features as training captures them, and what was found."""
    taps, settings = meta.settings.taps, meta.settings
    trained = training_features(FeatureTarget(facts, taps, dtype=dtype, device=device), some)
    tick(1)
    model, ends = load_causal(facts, dtype=dtype, device=device), load_ends(facts).to(device, dtype)
    plain: list[Plain] = [parity.plain_forward(model, ids) for ids in some]
    width = facts.hidden_size
    rebuilt = [
        parity.rebuilt_logits(model, ids, features[:, -width:], taps[-1], ends)
        for ids, features in zip(some, trained, strict=True)
    ]
    checks = [
        parity.check_features("taps in training", taps, trained, plain),
        parity.check_logprobs(rebuilt, plain, taps[-1]),
        parity.check_head(ends, plain, model),
        parity.check_rope(settings, facts, model),
    ]
    del model
    tick(2)
    decoded = decoding_features(DecodingTarget(facts, taps, dtype=dtype, device=device), some)
    tick(3)
    checks.insert(1, parity.check_features("taps in decoding", taps, decoded, plain))
    return trained, checks


def _datasets(run: Path) -> dict[str, CompletionDataset]:
    """Return the datasets of a run that lie where they lay."""
    path = run / "settings.yaml"
    folders = load_settings(path).data.folders if path.is_file() else ()
    return {folder: open_dataset(Path(folder)) for folder in folders if Path(folder).is_dir()}


def _made(datasets: dict[str, CompletionDataset], key: str) -> dict[str, str | None]:
    return {folder: getattr(dataset.manifest.origin, key) for folder, dataset in datasets.items()}


def _mask_rows(datasets: dict[str, CompletionDataset], mask: int) -> dict[str, int | None]:
    """Return the first row of each dataset that holds the mask token; `prepare` has left such rows out for its own."""
    return {
        folder: None if dataset.manifest.origin.mask_token_id == mask else find_token(dataset, mask)
        for folder, dataset in datasets.items()
    }


def _check_settings(run: Path, meta: DrafterMeta) -> Check:
    """Hold the drafter against the settings of its run."""
    path = run / "settings.yaml"
    if not path.is_file():
        return Check("settings", "unchecked", "the run has no settings.yaml")
    asked, own = load_settings(path).drafter.model_dump(), meta.settings.model_dump()
    if wrong := [key for key in asked if asked[key] != own[key]]:
        key = wrong[0]
        return Check("settings", "off", f"drafter.{key} is {asked[key]} in settings.yaml, {own[key]} in drafter.json")
    return Check("settings", "ok", "drafter.json is what settings.yaml asks for")


def _check_shape(meta: DrafterMeta, facts: TargetFacts) -> Check:
    """Hold what the drafter knows of its target against the target."""
    pairs = {
        "hidden size": (meta.hidden_size, facts.hidden_size),
        "vocabulary": (meta.vocab_size, facts.vocab_size),
        "layers": (meta.num_target_layers, facts.num_layers),
        "revision": (meta.target_revision, facts.revision),
    }
    for what, (trained, found) in pairs.items():
        if trained != found:
            return Check("target", "off", f"{what} {found} now, {trained} when the drafter was trained")
    if meta.settings.taps[-1] > facts.num_layers - 2:
        return Check("target", "off", f"tap {meta.settings.taps[-1]} of {facts.num_layers} layers, the last has none")
    return Check("target", "ok", f"revision {facts.revision}, {facts.num_layers} layers, width {facts.hidden_size}")
