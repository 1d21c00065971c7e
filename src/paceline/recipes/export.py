"""`paceline export`: a trained drafter as a folder that serving engines load."""

from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.drafter import find_drafter
from paceline.drafter.model import Drafter
from paceline.formats.zlab import export_zlab, is_empty_or_export
from paceline.records import UserError


def export(
    run: Path, out: Path | None, *, dtype: str, overwrite: bool, checkpoint: str | None = None
) -> dict[str, Any]:
    """Write the run's drafter in the z-lab layout, read it back and compare; return what was written.

    `checkpoint` (latest, best, or steps) takes its weights instead of the finished drafter's.
    """
    out = out or run / "export"
    if out.exists() and not (out.is_dir() and is_empty_or_export(out)):
        raise UserError(f"{out} (--out) exists and is no export, so it is never replaced. Choose another place.")
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise UserError(f"Folder {out} exists and is not empty. Choose another --out or add --overwrite.")
    found = find_drafter(run, checkpoint)
    meta = found.meta
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, found.weights())
    written = export_zlab(drafter, meta, out, dtype=getattr(torch, dtype))
    return {**written, "checkpoint": found.checkpoint, "train_steps": meta.steps}
