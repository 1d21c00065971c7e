"""`paceline export`: a trained drafter as folders that serving engines load."""

from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint.drafter import DrafterMeta, SavedDrafter, find_drafter, load_record
from paceline.config_file import load_settings
from paceline.drafter.model import Drafter
from paceline.formats.card import model_card
from paceline.formats.folder import is_empty_or_export, read_size
from paceline.formats.speculators import export_speculators
from paceline.formats.zlab import export_zlab
from paceline.records import UserError
from paceline.target.load import architectures, describe, load_ends

Layout = Literal["zlab", "speculators"]


def export(
    run: Path,
    out: Path | None,
    *,
    dtype: str,
    overwrite: bool,
    layout: Layout = "zlab",
    max_shard_size: str = "5GB",
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Write the run's drafter in a layout, read it back and compare; return what was written.

    `checkpoint` (latest, best, or steps) takes its weights instead of the finished drafter's.
    """
    shard_bytes = read_size(max_shard_size, "--max-shard-size")
    out = check_place(run, out, layout, overwrite=overwrite)
    found = find_drafter(run, checkpoint)
    meta, made = found.meta, {"checkpoint": found.checkpoint, "train_steps": found.meta.steps}
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, found.weights())
    target, revision = _target(run, meta)
    card = _card(run, found, layout, out, target, revision)
    numbers = getattr(torch, dtype)
    if layout == "zlab":
        return export_zlab(drafter, meta, out, dtype=numbers, card=card, max_shard_bytes=shard_bytes) | made
    facts = describe(meta.target)
    if facts.revision != meta.target_revision:
        raise UserError(
            f"The speculators layout copies the target's embedding and head, but {meta.target} is of revision "
            f"{facts.revision} now, and the drafter in {run} was trained for {meta.target_revision}. Put that target "
            "back, or export with --format zlab."
        )
    written = export_speculators(
        drafter,
        meta,
        load_ends(facts),
        out,
        verifier=target,
        verifier_architectures=architectures(facts.folder),
        dtype=numbers,
        card=card,
        max_shard_bytes=shard_bytes,
    )
    return written | made


def export_all(
    run: Path,
    out: Path | None,
    *,
    dtype: str,
    overwrite: bool,
    max_shard_size: str = "5GB",
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Write every layout: z-lab's to `out`, speculators' beside it with its name behind."""
    beside = out and out.with_name(f"{out.name}-speculators")
    places: dict[Layout, Path | None] = {"zlab": out, "speculators": beside}
    for layout, place in places.items():
        check_place(run, place, layout, overwrite=overwrite)
    said: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "checkpoint": checkpoint}
    written = [
        export(run, place, layout=layout, max_shard_size=max_shard_size, **said) for layout, place in places.items()
    ]
    return {"format": "all", "folders": written}


def check_place(run: Path, out: Path | None, layout: Layout, *, overwrite: bool) -> Path:
    """Return where a layout goes.

    Raises:
        UserError: something lies there that is no export, or an export that is not to be replaced.
    """
    out = out or run / ("export" if layout == "zlab" else f"export-{layout}")
    if out.exists() and not (out.is_dir() and is_empty_or_export(out)):
        raise UserError(f"{out} (--out) exists and is no export, so it is never replaced. Choose another place.")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise UserError(f"Folder {out} exists and is not empty. Choose another --out or add --overwrite.")
    return out


def _target(run: Path, meta: DrafterMeta) -> tuple[str, str | None]:
    """Return the target as others find it: its hub id and commit, or its folder and none."""
    made = (load_record(run, "provenance.json") or {}).get("target") or {}
    name = made.get("name", meta.target)
    if Path(name).expanduser().exists() or name == meta.target:
        return str(Path(meta.target).resolve()), None
    return name, _settings(run).target.revision


def _settings(run: Path) -> Any:
    return load_settings(run / "settings.yaml")


def _card(run: Path, found: SavedDrafter, layout: Layout, out: Path, target: str, revision: str | None) -> str:
    # An evaluation is of the weights that its name says.
    evaluation = "evaluation.json" if found.checkpoint is None else f"evaluation-{found.checkpoint}.json"
    return model_card(
        found.meta,
        layout,
        out,
        target=target,
        revision=revision,
        settings=_settings(run) if (run / "settings.yaml").is_file() else None,
        provenance=load_record(run, "provenance.json") or {},
        evaluation=load_record(run, evaluation),
    )
