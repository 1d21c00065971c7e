"""What a run leaves: the drafter and what is needed to build it, and what made it.

`find_drafter` is the one place that says which weights are meant: the finished drafter's or a checkpoint's.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.folder import sync, sync_files, whole_folder, write_whole
from paceline.config import DrafterSettings
from paceline.records import UserError


def save_provenance(
    run: Path,
    *,
    target: dict[str, str],
    dataset: dict[str, Any] | list[dict[str, Any]],
    held_out: dict[str, str] | None = None,
    init: dict[str, Any] | None = None,
) -> None:
    """Write what made a run: command line, versions, machine, which target and datasets it read, which drafter it began
    with.
    """
    tree = {
        "argv": sys.argv,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": versions(),
        "target": target,
        "dataset": dataset,
        "held_out": held_out,
        "init": init,
    }
    write_whole(run / "provenance.json", json.dumps(tree, indent=2) + "\n")


def versions() -> dict[str, str | None]:
    """Return the versions of what a run is made with."""
    packages: dict[str, str | None] = {}
    for name in ("paceline", "torch", "transformers", "pyarrow", "numpy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return packages


_NO_RULES = {"embed_scale": 1.0, "logit_cap": 0.0}  # of drafters that were written before there were any


@dataclass(frozen=True, slots=True)
class DrafterMeta:
    """What a drafter needs besides its weights to be built, served and checked."""

    settings: DrafterSettings
    target: str
    target_revision: str
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    steps: int
    embed_scale: float = 1.0  # what the target does at its ends, and its drafter, too (see drafter/ends.py)
    logit_cap: float = 0.0

    def tree(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**{k: getattr(self, k) for k in self.__slots__}, "settings": self.settings.model_dump(mode="json")}

    @classmethod
    def from_tree(cls, tree: Any, place: Path) -> "DrafterMeta":
        """Return what `tree` wrote, read from `place`.

        Raises:
            UserError: it is something else.
        """
        try:
            whole = {**_NO_RULES, **tree, "settings": DrafterSettings.model_validate(tree["settings"])}
            wrong = [one for one in fields(cls) if type(whole[one.name]) is not one.type]
            if not wrong:
                return cls(**whole)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{place} cannot be understood ({type(error).__name__}). Train again or restore it."
            ) from None
        name, kind = wrong[0].name, getattr(wrong[0].type, "__name__", wrong[0].type)
        raise UserError(f"{place} must give {name} as {kind}, got {repr(whole[name])[:60]}. Train again or restore it.")


@dataclass(frozen=True, slots=True)
class SavedDrafter:
    """Weights that a run left, and what they are of."""

    meta: DrafterMeta
    path: Path
    checkpoint: str | None  # the checkpoint's name; None: the finished drafter's

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, float32 on the CPU.

        Raises:
            UserError: the file is missing or damaged.
        """
        try:
            return load_file(self.path)
        except (FileNotFoundError, SafetensorError) as error:
            raise UserError(f"{self.path} is missing or damaged: {error}. Train again or restore it.") from None

    @property
    def evaluation(self) -> str:
        """The file of the run folder that `paceline evaluate` writes for them."""
        return evaluation_name(self.checkpoint)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return a checksum of weights, however a file holds them; by it an evaluation says what it measured."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def evaluation_name(checkpoint: str | None) -> str:
    """Return the file of a run folder that holds a checkpoint's evaluation; None: the finished drafter's."""
    return "evaluation.json" if checkpoint is None else f"evaluation-{checkpoint}.json"


def save_drafter(run: Path, weights: Mapping[str, Tensor], meta: DrafterMeta) -> Path:
    """Write the drafter of a run and return its folder."""
    with whole_folder(run / "drafter") as aside:
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(plain, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "drafter.json").write_text(json.dumps(meta.tree(), indent=2) + "\n")
        sync_files(aside)
    sync(run)
    return run / "drafter"


def find_drafter(run: Path, checkpoint: str | None = None) -> SavedDrafter:
    """Return a run's finished drafter, or that of a checkpoint: `latest`, `best` or the number of its steps.

    A checkpoint's weights are compared with its manifest; the run need not be finished.

    Raises:
        UserError: the folder is no run with such a drafter, or the checkpoint is damaged.
    """
    if checkpoint is not None:
        file = "drafter.safetensors"
        saved = store.named(run, checkpoint, [file])
        place = saved.folder / "state.json"
        if "drafter" not in saved.state:
            raise UserError(
                f"{place} does not say what its drafter is: it was written by an earlier paceline. Use that one."
            )
        meta = DrafterMeta.from_tree({**saved.state["drafter"], "steps": saved.steps}, place)
        return SavedDrafter(meta, saved.folder / file, saved.folder.name)
    path = run / "drafter" / "drafter.json"
    if not path.is_file():
        raise UserError(
            f"{run} is no folder of a finished run: it has no drafter/drafter.json. Train it first{_or_another(run)}."
        )
    try:
        tree = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be understood ({type(error).__name__}). Train again or restore it.") from None
    return SavedDrafter(DrafterMeta.from_tree(tree, path), run / "drafter" / "model.safetensors", None)


def _or_another(run: Path) -> str:
    return ", or name a checkpoint with --checkpoint" if store.saved_steps(run) else ""


def load_record(run: Path, name: str) -> dict[str, Any] | None:
    """Return a JSON object of the run folder, such as provenance.json, or None where it was not written.

    Raises:
        UserError: it is damaged.
    """
    path = run / name
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. Restore it, or remove it.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a JSON object, found {type(tree).__name__}. Restore it, or remove it.")
    return tree
