"""What a finished run leaves: the drafter and what is needed to build it, and what made it."""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.folder import sync, sync_files, whole_folder, write_whole
from paceline.config import DrafterSettings
from paceline.records import UserError


def save_provenance(run: Path, *, target: dict[str, str], dataset: dict[str, str] | list[dict[str, str]]) -> None:
    """Write what made a run: command line, versions, machine, and which target and dataset it read."""
    tree = {
        "argv": sys.argv,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": versions(),
        "target": target,
        "dataset": dataset,
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


def save_drafter(run: Path, weights: Mapping[str, Tensor], meta: DrafterMeta) -> Path:
    """Write the drafter of a run and return its folder."""
    with whole_folder(run / "drafter") as aside:
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights.items()}
        save_file(plain, aside / "model.safetensors", metadata={"format": "pt"})
        tree = {**{k: getattr(meta, k) for k in meta.__slots__}, "settings": meta.settings.model_dump(mode="json")}
        (aside / "drafter.json").write_text(json.dumps(tree, indent=2) + "\n")
        sync_files(aside)
    sync(run)
    return run / "drafter"


def load_meta(run: Path) -> DrafterMeta:
    """Return what a run's drafter is, without its weights.

    Raises:
        UserError: the folder is no run with a trained drafter.
    """
    path = run / "drafter" / "drafter.json"
    if not path.is_file():
        raise UserError(f"{run} is no folder of a finished run: it has no drafter/drafter.json. Train it first.")
    try:
        tree = json.loads(path.read_text())
        return DrafterMeta(**{**tree, "settings": DrafterSettings.model_validate(tree["settings"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be understood ({type(error).__name__}). Train again or restore it.") from None


def load_weights(run: Path) -> dict[str, Tensor]:
    """Return the weights of a run's drafter, float32 on the CPU.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = run / "drafter" / "model.safetensors"
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged: {error}. Train again or restore it.") from None
