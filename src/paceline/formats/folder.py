"""A drafter's folder as others load it: config.json, safetensors in one file or several, README.md.

It is written aside, read back and compared tensor by tensor, and only then takes its place.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.folder import whole_folder
from paceline.records import RunError, UserError

INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_ARCHITECTURES = (["DFlashDraftModel"], ["DFlashSpeculator"])
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def write_folder(
    out: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], card: str, *, max_shard_bytes: int
) -> dict[str, Any]:
    """Write a folder, read it back and compare; return what was written. A folder that lies there is replaced.

    Raises:
        RunError: what lies on disk is not what was in memory; what lay there stays.
    """
    split = split_torch_state_dict_into_shards(dict(weights), max_shard_size=max_shard_bytes)
    with whole_folder(out) as aside:
        for file, names in split.filename_to_tensors.items():
            save_file({name: weights[name] for name in names}, aside / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (aside / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (aside / "README.md").write_text(card, encoding="utf-8")
        _check_files(aside, weights)
    files = sorted(split.filename_to_tensors)
    return {
        "folder": str(out),
        "files": files,
        "tensors": len(weights),
        "bytes": sum((out / file).stat().st_size for file in files),
        "reload_checked": True,
    }


def _check_files(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Read the weights as loaders do, by the index where there is one, and compare them with what was in memory."""
    back: set[str] = set()
    wrong: set[str] = set()
    try:
        for file, listed in _listed(folder).items():
            found = load_file(folder / file)
            wrong |= {name for name in found if not _same(weights.get(name), found[name])}
            wrong |= set() if listed is None else found.keys() ^ listed
            back |= found.keys()
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"The exported weights could not be read back ({error}). Check the disk.") from None
    wrong |= weights.keys() ^ back
    if wrong:
        raise RunError(
            f"The exported weights read back differ from the drafter in {sorted(wrong)[:3]}. Check the disk."
        )


def _listed(folder: Path) -> dict[str, set[str] | None]:
    """Return the weight files, each with the tensors that the index says are in it."""
    if not (folder / INDEX).is_file():
        return {"model.safetensors": None}
    files: dict[str, set[str] | None] = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        listed = files.setdefault(file, set())
        if listed is not None:
            listed.add(name)
    return files


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def is_empty_or_export(folder: Path) -> bool:
    """Return whether a folder holds nothing but what an export writes, so that replacing it loses nothing else."""
    paths = list(folder.iterdir())
    names = {path.name for path in paths}
    if not names:
        return True
    if not all(path.is_file() for path in paths):
        return False
    others = {name for name in names if not _WEIGHTS.fullmatch(name)} - {"config.json", "README.md", INDEX}
    if others or "config.json" not in names or not any(map(_WEIGHTS.fullmatch, names)):
        return False
    try:
        tree = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and tree.get("architectures") in _ARCHITECTURES


def read_size(text: str, option: str) -> int:
    """Return the bytes of a size such as 5GB, in powers of 1000.

    Raises:
        UserError: it is no size.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([KMGT]B)", text.strip().upper(), re.ASCII)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"{option} must be a size such as 5GB or 500MB, got {text!r}.")
    return size
