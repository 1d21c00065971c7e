"""The weights of another tool's folder: where each of a drafter's tensors lies, and what is wrong with them.

Nothing is unpickled: weights that are not safetensors are refused.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.formats.folder import INDEX
from paceline.formats.foreign import ForeignDrafter, shown
from paceline.records import UserError

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NUMBERS = {"F32", "BF16", "F16"}  # as safetensors spells float32, bfloat16 and float16
# What a drafter here takes from its target or computes, so a folder's own copy is not needed.
_NOT_NEEDED = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight"}
_FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class Part:
    """Where one of a drafter's tensors lies: rows of a tensor of a file."""

    file: Path
    name: str
    rows: slice
    shape: tuple[int, ...]


def find_parts(folder: Path, drafter: ForeignDrafter, renamed: Mapping[str, str]) -> dict[str, Part]:
    """Return where a drafter's tensors lie, by the names they have here. Reads the files' headers.

    `renamed` holds names of the layout that are others here.

    Raises:
        UserError: files are missing, damaged or pickled, or a tensor is there twice or in a format that is no number.
    """
    parts: dict[str, Part] = {}
    for file in weight_files(folder):
        for name, shape, dtype in _header(file):
            plain = name.removeprefix("model.")
            if plain in _NOT_NEEDED or plain.endswith("rotary_emb.inv_freq"):
                continue
            if dtype not in _NUMBERS:
                raise UserError(
                    f"{file} (train.init_from) holds {name} as {dtype}, and weights have to be float32, bfloat16 or "
                    "float16. Convert the drafter first."
                )
            for own, part in _split(Part(file, name, slice(None), shape), renamed.get(plain, plain), drafter):
                if own in parts:
                    raise UserError(
                        f"{folder} (train.init_from) holds {own} twice, as {parts[own].name} and as {name}. Remove one."
                    )
                parts[own] = part
    return parts


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files: those that its index names, else model.safetensors.

    Raises:
        UserError: there are none, or the index is damaged or names files that are missing.
    """
    there = {path.name: path for path in sorted(folder.glob("*.safetensors")) if path.is_file()}
    index = folder / INDEX
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{index} (train.init_from) cannot be read ({type(error).__name__}). Fetch the folder again."
            ) from None
        missing = sorted(str(name) for name in named if name not in there)  # so none can lie outside the folder
        if missing or not named:
            what = f"{shown(missing[0])}, which is not in the folder" if missing else "no file"
            raise UserError(f"{index} (train.init_from) names {what}. Fetch the folder again.")
        return [there[name] for name in sorted(named)]
    if "model.safetensors" in there:
        return [there["model.safetensors"]]
    if there:
        raise UserError(
            f"{folder} (train.init_from) holds {next(iter(there))} but neither model.safetensors nor {INDEX}, which "
            "would say what belongs together. Fetch the folder again."
        )
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise UserError(
            f"{folder} (train.init_from) holds its weights pickled only ({pickled[0]}), and to read them could run "
            "code. Convert them to model.safetensors first."
        )
    raise UserError(
        f"{folder} (train.init_from) holds no weights: model.safetensors is missing. Fetch the folder again."
    )


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                piece = tensors.get_slice(name)
                yield name, tuple(piece.get_shape()), piece.get_dtype()
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} (train.init_from) is damaged: {error}. Fetch the folder again.") from None


def _split(part: Part, name: str, drafter: ForeignDrafter) -> Iterator[tuple[str, Part]]:
    """Yield a tensor under its name here, or the pieces of a fused one."""
    fused = next((key for key in _FUSED if f".{key}." in name), None)
    if fused is None:
        yield name, part
        return
    kv = drafter.kv_heads * drafter.head_dim
    heights = [drafter.heads * drafter.head_dim, kv, kv] if "qkv" in fused else [drafter.intermediate_size] * 2
    if not part.shape or part.shape[0] != sum(heights):
        raise UserError(
            f"{part.file} (train.init_from) must hold {part.name} with {sum(heights)} rows by the sizes in "
            f"config.json, found shape {list(part.shape)}. Take another drafter."
        )
    start = 0
    for own, height in zip(_FUSED[fused], heights, strict=True):
        rows = slice(start, start + height)
        yield name.replace(fused.split(".")[1], own), Part(part.file, part.name, rows, (height, *part.shape[1:]))
        start += height


def check_parts(folder: Path, parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what is there against what a drafter of the settings has.

    Raises:
        UserError: a tensor is missing, has no place or has another shape.
    """
    where = f"{folder} (train.init_from)"
    missing, extra = sorted(shapes.keys() - parts.keys()), sorted(parts.keys() - shapes.keys())
    if missing:
        raise UserError(f"{where} lacks {_some(missing)}. Fetch the folder again, or take another drafter.")
    if extra:
        raise UserError(
            f"{where} holds tensors that a DFlash drafter has no place for: {_some(extra)}. Take another drafter."
        )
    for name, shape in shapes.items():
        if parts[name].shape != shape:
            raise UserError(
                f"{where} holds {name} in shape {list(parts[name].shape)}, and the settings (drafter) make it "
                f"{list(shape)}. Take another drafter."
            )


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def read_parts(parts: Mapping[str, Part]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, one at a time, as it lies in the file.

    Raises:
        UserError: a file cannot be read any more.
    """
    for file in sorted({part.file for part in parts.values()}):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name, part in parts.items():
                    if part.file == file:
                        yield name, _rows(tensors.get_slice(part.name), part)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} (train.init_from) cannot be read: {error}. Fetch the folder again.") from None


def _rows(piece: Any, part: Part) -> Tensor:
    found: Tensor = piece[:] if part.rows == slice(None) else piece[part.rows]
    return found


def digests(files: list[Path]) -> dict[str, str]:
    """Return the sha256 of weight files by name."""
    found = {}
    for file in files:
        with file.open("rb") as handle:
            found[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def check_finite(folder: Path, parts: Mapping[str, Part]) -> None:
    """Read every tensor once.

    Raises:
        UserError: one holds an infinity or no number at all, or cannot be read.
    """
    for name, tensor in read_parts(parts):
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"{folder} (train.init_from) holds values that are not finite in {name}. Take another drafter."
            )
