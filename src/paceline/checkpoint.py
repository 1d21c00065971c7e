"""What a run is on disk.

    RUN/settings.yaml       the resolved settings; `paceline train RUN/settings.yaml` starts the same run again
    RUN/provenance.json     versions, argv, target and dataset fingerprints
    RUN/events.jsonl        what happened, one event a line
    RUN/drafter/            the drafter's weights (float32) and what is needed to build it again

A folder is written aside and renamed, so it is whole or not there.
"""

import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import DrafterSettings
from paceline.records import RunError, UserError


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill beside `folder`, then put it in that place, replacing what was there.

    What was there is moved away first and comes back if the new folder cannot take its place.

    Raises:
        RunError: the weights could not be written, as on a full disk.
    """
    folder = folder.resolve()
    _sweep(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _replace(folder, aside)
    except SafetensorError as error:  # not an OSError, although that is what lies behind it
        raise RunError(f"{folder} cannot be written: {error}. Check the place and its free space.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left beside `folder`, and bring back what it had only moved away."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        owner = path.name.rsplit(".", 1)[-1]
        if not owner.isdecimal() or _alive(int(owner)):
            continue
        if ".old." in path.name and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def claimed(run: Path) -> Iterator[None]:
    """Make a run folder and keep other processes out of it until the block ends, also by a kill.

    Raises:
        UserError: another process is training into it, or the place cannot be written to.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / ".lock").open("w")
    except OSError as error:
        raise UserError(f"Run folder {run} (run_dir) cannot be written to: {error.strerror}. Choose another.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is training into {run} (run_dir). Choose another run_dir.") from None
        yield


def _replace(folder: Path, aside: Path) -> None:
    old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def save_provenance(run: Path, *, target: dict[str, str], dataset: dict[str, str] | list[dict[str, str]]) -> None:
    """Write what made a run: command line, versions, machine, and which target and dataset it read."""
    packages: dict[str, str | None] = {}
    for name in ("paceline", "torch", "transformers", "pyarrow", "numpy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    tree = {
        "argv": sys.argv,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "packages": packages,
        "target": target,
        "dataset": dataset,
    }
    (run / "provenance.json").write_text(json.dumps(tree, indent=2) + "\n")


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
