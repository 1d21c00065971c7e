"""What another tool's folder says of its drafter, in paceline's words; its config.json read key by key."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.records import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignDrafter:
    """A drafter that another tool wrote. None: its folder does not say."""

    layout: str
    block_size: int | None
    mask_token_id: int | None
    taps: tuple[int, ...] | None  # 0-based, as drafter.taps
    num_target_layers: int | None
    hidden_size: int
    vocab_size: int | None
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float | None
    rms_norm_eps: float | None
    embed_scale: float = 1.0  # embedding rows times this are what it reads
    logit_cap: float = 0.0  # its logits are softly capped at this; 0: not at all
    remarks: tuple[str, ...] = ()  # in what its training differs from a drafter's here; each goes on after "it "


class ConfigFile:
    """A JSON object of a foreign config.json. Whatever is no number where one belongs is refused by its key."""

    def __init__(self, path: Path, tree: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._tree, self._prefix = path, tree, prefix

    def __contains__(self, key: str) -> bool:
        return self._tree.get(key) is not None

    def get(self, key: str) -> Any:
        """Return a value as it stands, or None."""
        return self._tree.get(key)

    def section(self, key: str) -> "ConfigFile":
        """Return an object inside this one, an empty one where it is missing."""
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self.wrong(key, "an object", value)
        return ConfigFile(self._path, value or {}, f"{self._prefix}{key}.")

    def needed(self, key: str) -> int:
        """Return a whole number that has to be there, 1 or more."""
        value = self.whole(key)
        if not value:
            raise self.wrong(key, "a whole number from 1 up", self.get(key))
        return value

    def whole(self, key: str) -> int | None:
        """Return a whole number from 0 up, or None where there is none."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise self.wrong(key, "a whole number", value)

    def number(self, key: str) -> float | None:
        """Return a positive number, or None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        raise self.wrong(key, "a positive number", value)

    def layers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of layer numbers, or None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
            return tuple(value)
        raise self.wrong(key, "a list of layer numbers", value)

    def wrong(self, key: str, rule: str, value: object) -> UserError:
        """Return the error of a key that does not follow its rule."""
        found = "it is missing" if value is None else f"got {shown(value)}"
        return UserError(
            f"{self._path} must give {self._prefix}{key} as {rule}, but {found}. Correct it there, or take another "
            "drafter for train.init_from."
        )

    def refused(self, what: str) -> UserError:
        """Return the error of a drafter that does what drafters here do not; `what` goes on after "it "."""
        return UserError(
            f"The drafter of {self._path.parent} (train.init_from) cannot be taken up: it {what}. Take another one."
        )


def shown(value: object) -> str:
    """Return what to show of a value that somebody else wrote: printable, and not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_config(folder: Path) -> ConfigFile:
    """Return a drafter folder's config.json.

    Raises:
        UserError: it is no folder, or config.json is missing or no JSON object.
    """
    path = folder / "config.json"
    remedy = "Name the folder of a z-lab, speculators, SpecForge or TorchSpec drafter."
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder} (train.init_from). {remedy}")
    if (folder / "drafter" / "drafter.json").is_file():
        raise UserError(
            f"{folder} (train.init_from) is a run of paceline. Export its drafter with `paceline export --dtype "
            "float32` and name that folder."
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} (train.init_from) has no config.json. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} (train.init_from) cannot be read as JSON: {error}. Fetch the folder again.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} (train.init_from) must hold a JSON object, found {type(tree).__name__}. {remedy}")
    return ConfigFile(path, tree)
