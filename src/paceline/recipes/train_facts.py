"""What a run says of itself in its checkpoints, its provenance, its drafter and its first events."""

from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.best import Best
from paceline.checkpoint.drafter import DrafterMeta, save_provenance, versions
from paceline.checkpoint.store import Saved
from paceline.config import DrafterSettings, RunSettings
from paceline.drafter.flops import useful_flops
from paceline.formats.warm_start import WarmStart
from paceline.observe.events import EventLog
from paceline.observe.gpus import describe_gpus
from paceline.probe.machine import about_machine
from paceline.recipes.train_inputs import Inputs
from paceline.records import StepReport
from paceline.target.load import TargetFacts


def fixed_facts(settings: RunSettings, inputs: Inputs) -> dict[str, Any]:
    """Return what a checkpoint says of its run: what must be the same when it goes on, and what made it."""
    held_out = inputs.held_out
    return {
        "settings": settings.model_dump(mode="json"),
        "total_steps": inputs.total_steps,
        "target_revision": inputs.facts.revision,
        "datasets": [dataset.fingerprint for dataset in inputs.mixture.datasets],
        "held_out": held_out.dataset.fingerprint if held_out else None,
        "prompts": inputs.prompts.sha256 if inputs.prompts else None,
        "drafter": drafter_meta(settings.drafter, inputs.facts, 0).tree(),
        "versions": versions(),
    }


def drafter_meta(settings: DrafterSettings, facts: TargetFacts, steps: int) -> DrafterMeta:
    """Return what the drafter of a run is after so many steps."""
    return DrafterMeta(
        settings=settings,
        target=str(facts.folder),
        target_revision=facts.revision,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        steps=steps,
        embed_scale=facts.conventions.embed_scale,
        logit_cap=facts.conventions.logit_cap,
    )


def say_what_made_it(run: Path, inputs: Inputs, warm: WarmStart | None) -> None:
    """Write provenance.json."""
    facts, held_out = inputs.facts, inputs.held_out
    target = {"name": facts.name, "folder": str(facts.folder), "revision": facts.revision}
    made = [
        {"folder": str(dataset.folder), "rows": dataset.fingerprint, "longest": dataset.manifest.longest}
        for dataset in inputs.mixture.datasets
    ]
    save_provenance(
        run,
        target=target,
        dataset=made[0] if len(made) == 1 else made,
        held_out={"folder": str(held_out.dataset.folder), "rows": held_out.dataset.fingerprint} if held_out else None,
        init=warm.as_dict() if warm else None,
    )


def tell_begin(
    events: EventLog, settings: RunSettings, inputs: Inputs, start: Saved | None, warm: WarmStart | None, best: Best
) -> None:
    """Write what a run begins with, or goes on from."""
    tree = settings.model_dump(mode="json")
    if start is not None:
        events.write("resumed", steps=start.steps, checkpoint=str(start.folder), best=best.state(), settings=tree)
        _tell_where(events, settings, inputs)
        return
    events.write("started", settings=tree)
    _tell_where(events, settings, inputs)
    best_by = settings.evaluate.best_by
    events.write("plan", **inputs.buckets.as_dict(), steps=inputs.total_steps, best_by=best_by)
    if warm is not None:
        events.write("warm_start", **warm.as_dict())


def _tell_where(events: EventLog, settings: RunSettings, inputs: Inputs) -> None:
    """Write what machine this is, and what data."""
    datasets, facts = inputs.mixture.datasets, inputs.facts
    gpus = describe_gpus(settings.devices)
    events.write("machine", **about_machine(), torch=torch.__version__, gpus=gpus)
    events.write(
        "data",
        folders=[str(dataset.folder) for dataset in datasets],
        fingerprints=[dataset.fingerprint for dataset in datasets],
        samples=sum(len(dataset) for dataset in datasets),
        tokens=sum(dataset.manifest.tokens for dataset in datasets),
        target=facts.name,
        target_revision=facts.revision,
    )


def step_flops(settings: RunSettings, facts: TargetFacts, report: StepReport) -> float:
    """Return the operations of a step's useful work, all drafter ranks together."""
    return useful_flops(
        settings.drafter,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        tokens=report.tokens,
        visible=report.visible,
        blocks=report.blocks,
    )
