"""`paceline export`: a trained drafter as folders that serving engines load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.checkpoint.drafter import DrafterMeta, SavedDrafter, find_drafter, load_record, weights_sha256
from paceline.config_file import load_settings
from paceline.drafter.model import Drafter
from paceline.formats.card import model_card
from paceline.formats.folder import is_empty_or_export, read_size
from paceline.formats.speculators import export_speculators
from paceline.formats.zlab import export_zlab
from paceline.records import UserError
from paceline.target.load import TargetFacts, architectures, describe, load_ends

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
    meta, weights = found.meta, found.weights()
    _check_finite(found, weights)
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, weights)
    target, revision = _target(run, meta)
    evaluation = _evaluation(run, found, weights)
    card = _card(run, found, layout, out, target, revision, evaluation)
    made = {
        "checkpoint": found.checkpoint,
        "train_steps": meta.steps,
        "evaluation": None if evaluation is None else str(run / found.evaluation),
    }
    numbers = getattr(torch, dtype)
    if layout == "zlab":
        return export_zlab(drafter, meta, out, dtype=numbers, card=card, max_shard_bytes=shard_bytes) | made
    facts = _target_of_ends(run, meta)
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
    check_place(run, out, "zlab", overwrite=overwrite)  # which has a name behind which another can be put
    beside = out and out.with_name(f"{out.name}-speculators")
    places: dict[Layout, Path | None] = {"zlab": out, "speculators": beside}
    check_place(run, beside, "speculators", overwrite=overwrite)
    _target_of_ends(run, find_drafter(run, checkpoint).meta)  # before anything is written
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
    if out.is_symlink() and not out.exists():  # a folder cannot take its place
        raise UserError(f"{out} (--out) is a link that leads nowhere. Choose another place.")
    try:
        here = out.resolve() == Path.cwd()
    except RuntimeError:  # of Python up to 3.12
        raise UserError(f"{out} (--out) leads through a link to itself. Choose another place.") from None
    if here:  # the shell would stay in the folder that was there before
        raise UserError(f"{out} (--out) is the working folder, which cannot be replaced. Choose another place.")
    if out.exists() and not (out.is_dir() and is_empty_or_export(out)):
        raise UserError(f"{out} (--out) exists and is no export, so it is never replaced. Choose another place.")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise UserError(f"Folder {out} exists and is not empty. Choose another --out or add --overwrite.")
    return out


def _target_of_ends(run: Path, meta: DrafterMeta) -> TargetFacts:
    """Return the target whose embedding and head are copied.

    Raises:
        UserError: it is not where it was, or another one is, or the layout cannot say what it does.
    """
    if meta.embed_scale != 1 or meta.logit_cap:
        raise UserError(
            f"The speculators layout has no key for what {meta.target} does at its ends (embeddings times "
            f"{meta.embed_scale:g}, logits capped at {meta.logit_cap:g}; 0: not), and without it the drafter in {run} "
            "is not accepted. Export with --format zlab."
        )
    facts = describe(meta.target)
    if facts.revision != meta.target_revision:
        raise UserError(
            f"The speculators layout copies the target's embedding and head, but {meta.target} is of revision "
            f"{facts.revision} now, and the drafter in {run} was trained for {meta.target_revision}. Put that target "
            "back, or export with --format zlab."
        )
    return facts


def _check_finite(found: SavedDrafter, weights: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{found.path} holds values that are not finite in {name}. Export a checkpoint before it.")


def _target(run: Path, meta: DrafterMeta) -> tuple[str, str | None]:
    """Return the target as others find it: its hub id and commit, or its folder and none."""
    made = (load_record(run, "provenance.json") or {}).get("target")
    name = made.get("name") if isinstance(made, dict) else None
    if not isinstance(name, str):  # an earlier run's, which says no more than its drafter does
        name = meta.target
    if Path(name).expanduser().exists() or name == meta.target:
        return str(Path(meta.target).resolve()), None
    return name, _settings(run).target.revision


def _settings(run: Path) -> Any:
    return load_settings(run / "settings.yaml")


def _evaluation(run: Path, found: SavedDrafter, weights: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return what `evaluate` measured of these weights; None: nothing, or it was of others under the same name."""
    evaluation = load_record(run, found.evaluation)
    if evaluation is None or evaluation.get("drafter_sha256") != weights_sha256(weights):
        return None
    return evaluation


def _card(
    run: Path,
    found: SavedDrafter,
    layout: Layout,
    out: Path,
    target: str,
    revision: str | None,
    evaluation: dict[str, Any] | None,
) -> str:
    settings = _settings(run) if (run / "settings.yaml").is_file() else None
    provenance = load_record(run, "provenance.json") or {}
    try:
        return model_card(
            found.meta,
            layout,
            out,
            target=target,
            revision=revision,
            settings=settings,
            provenance=provenance,
            evaluation=evaluation,
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"provenance.json or {found.evaluation} in {run} is not as paceline writes it ({type(error).__name__}: "
            f"{error}). Restore it, or remove it."
        ) from None
