"""What a run says of itself in its checkpoints, its provenance and its drafter."""

from pathlib import Path
from typing import Any

from paceline.checkpoint.drafter import DrafterMeta, save_provenance, versions
from paceline.config import RunSettings
from paceline.data.held_out import HeldOut
from paceline.data.mixture import Mixture
from paceline.formats.warm_start import WarmStart
from paceline.target.load import TargetFacts


def fixed_facts(
    settings: RunSettings, facts: TargetFacts, mixture: Mixture, held_out: HeldOut | None, total_steps: int
) -> dict[str, Any]:
    """Return what a checkpoint says of its run: what must be the same when it goes on, and what made it."""
    return {
        "settings": settings.model_dump(mode="json"),
        "total_steps": total_steps,
        "target_revision": facts.revision,
        "datasets": [dataset.fingerprint for dataset in mixture.datasets],
        "held_out": held_out.dataset.fingerprint if held_out else None,
        "drafter": drafter_meta(settings, facts, 0).tree(),
        "versions": versions(),
    }


def drafter_meta(settings: RunSettings, facts: TargetFacts, steps: int) -> DrafterMeta:
    """Return what the drafter of a run is after so many steps."""
    return DrafterMeta(
        settings=settings.drafter,
        target=str(facts.folder),
        target_revision=facts.revision,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        steps=steps,
    )


def say_what_made_it(
    run: Path, facts: TargetFacts, mixture: Mixture, held_out: HeldOut | None, warm: WarmStart | None
) -> None:
    """Write provenance.json."""
    target = {"name": facts.name, "folder": str(facts.folder), "revision": facts.revision}
    made = [
        {"folder": str(dataset.folder), "rows": dataset.fingerprint, "longest": dataset.manifest.longest}
        for dataset in mixture.datasets
    ]
    save_provenance(
        run,
        target=target,
        dataset=made[0] if len(made) == 1 else made,
        held_out={"folder": str(held_out.dataset.folder), "rows": held_out.dataset.fingerprint} if held_out else None,
        init=warm.as_dict() if warm else None,
    )
