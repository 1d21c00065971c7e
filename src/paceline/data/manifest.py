"""What a dataset says of itself: counts, files with checksums, and where its rows come from.

The manifest lies beside the data as `manifest.json`. Whoever opens a dataset holds its tokenizer against the target's.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from paceline.records import UserError

VERSION = 2
NAME = "manifest.json"

# Held when a manifest is read, not when one is made: pydantic would take "5", 5.0 and true for whole numbers.
Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
_Id = Annotated[int, Field(strict=True, ge=-1, le=2**31 - 1)]
_Checksum = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_NO_OTHER_KEYS = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Shard:
    """One Arrow file of a dataset."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHER_KEYS
    file: str
    rows: Count
    tokens: Count
    bytes: Count
    sha256: _Checksum  # empty where a folder has no manifest


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dataset comes from."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHER_KEYS
    target: str
    target_revision: str
    tokenizer: str  # tokenizer_fingerprint; empty where nobody wrote it down
    chat_template: str | None  # sha256
    mask_rule: str  # where the loss mask of conversations comes from, with the options in force
    mask_token_id: _Id | None  # an id known not to occur
    sources: list[dict[str, Any]]  # of each input file: path, sha256, and how each of its rows ended
    quarantined: dict[str, Count]  # refused rows per reason
    truncated: Count  # rows cut to the longest length
    tokens_cut: Count = 0  # what they lost
    supervised_cut: Count = 0  # of that, supervised tokens
    recipe: str = ""  # hash of everything that decides the rows: inputs, tokenizer, template, mask rule, limits


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a dataset holds. `fingerprint` hashes the rows, shard by shard."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHER_KEYS
    version: int
    rows: Count
    tokens: Count
    supervised_tokens: Count
    longest: Count  # tokens
    largest_id: _Id  # -1 without rows
    fingerprint: str
    shards: tuple[Shard, ...]
    origin: Origin


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a dataset's manifest."""
    (folder / NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def load_manifest(folder: Path) -> Manifest:
    """Return a dataset's manifest.

    Raises:
        UserError: there is none, or it cannot be understood.
    """
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"{folder} is no dataset: it has no {NAME}. Write one with `paceline prepare`.")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["version"] != VERSION:
            raise UserError(f"{path} has version {tree['version']}, this program reads {VERSION}. Prepare it again.")
        manifest: Manifest = _reader().validate_python(tree)
        for shard in manifest.shards:
            check_file_name(shard.file)
        _check_sums(manifest)
        return manifest
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = what_is_wrong(error)
    raise UserError(f"{path} cannot be understood ({reason}). Prepare it again.")


def what_is_wrong(error: Exception) -> str:
    """Return in one line why a file of ours could not be read."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors()[0]  # it speaks in several lines
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}"


def check_file_name(name: str) -> None:
    """Refuse a name that is no file's in the folder itself.

    Raises:
        ValueError: it leads elsewhere, or no file can have it.
    """
    if name in ("", ".", "..") or "/" in name or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r:.80} names no file in the folder")


def check_fits(manifest: Manifest, tokenizer: str, target: str, *, what: str = "The dataset") -> None:
    """Refuse a dataset whose ids were made by another tokenizer than the target's.

    Raises:
        UserError: the fingerprints differ, or nobody wrote down whose tokenizer it was.
    """
    made = manifest.origin
    if not made.tokenizer:
        raise UserError(
            f"{what} has no {NAME}, so nobody knows which tokenizer made its ids, and target {target} needs its "
            f"own ({tokenizer[:12]}). Make a dataset of it with `paceline prepare FOLDER --target {target}`."
        )
    if made.tokenizer != tokenizer:
        raise UserError(
            f"{what} was prepared with the tokenizer of {made.target} ({made.tokenizer[:12]}), but target "
            f"{target} has another one ({tokenizer[:12]}). Prepare the data again with --target {target}."
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash everything that decides which ids a text gets: vocabulary, added tokens, normalizer, pre-tokenizer."""
    tree = cast(dict[str, Any], json.loads(tokenizer.backend_tokenizer.to_str()))
    for passing in ("truncation", "padding"):  # state of the last call, not of the tokenizer
        tree.pop(passing, None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@cache
def _reader() -> Any:
    return TypeAdapter(Manifest)


def _check_sums(manifest: Manifest) -> None:
    """Hold a manifest's counts against one another."""
    for key in ("rows", "tokens"):
        total, listed = getattr(manifest, key), sum(getattr(shard, key) for shard in manifest.shards)
        if total != listed:
            raise ValueError(f"{key} is {total:,}, but its shards' sum up to {listed:,}")
    if manifest.supervised_tokens > manifest.tokens:
        raise ValueError(f"supervised_tokens is {manifest.supervised_tokens:,} of {manifest.tokens:,} tokens")
