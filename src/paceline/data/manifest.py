"""What a dataset says of itself: counts, files with checksums, and where its rows come from.

The manifest lies beside the data as `manifest.json`. Whoever opens a dataset holds its tokenizer against the target's.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from paceline.records import UserError

VERSION = 2
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One Arrow file of a dataset."""

    file: str
    rows: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dataset comes from."""

    target: str
    target_revision: str
    tokenizer: str  # tokenizer_fingerprint; empty where nobody wrote it down
    chat_template: str | None  # sha256
    mask_rule: str  # where the loss mask of conversations comes from, with the options in force
    mask_token_id: int | None  # an id known not to occur
    sources: list[dict[str, Any]]  # of each input file: path, sha256, and how each of its rows ended
    quarantined: dict[str, int]  # refused rows per reason
    truncated: int  # rows cut to the longest length
    tokens_cut: int = 0  # what they lost
    supervised_cut: int = 0  # of that, supervised tokens
    recipe: str = ""  # hash of everything that decides the rows: inputs, tokenizer, template, mask rule, limits


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a dataset holds. `fingerprint` hashes the rows, shard by shard."""

    version: int
    rows: int
    tokens: int
    supervised_tokens: int
    longest: int  # tokens
    largest_id: int
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
        shards = tuple(Shard(**shard) for shard in tree["shards"])
        manifest = Manifest(**{**tree, "shards": shards, "origin": Origin(**tree["origin"])})
        _check_types(manifest)
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be understood ({type(error).__name__}: {error}). Prepare it again.") from None


def check_fits(manifest: Manifest, tokenizer: str, target: str) -> None:
    """Refuse a dataset whose ids were made by another tokenizer than the target's.

    Raises:
        UserError: the fingerprints differ, or nobody wrote down whose tokenizer it was.
    """
    made = manifest.origin
    if not made.tokenizer:
        raise UserError(
            f"The dataset has no {NAME}, so nobody knows which tokenizer made its ids, and target {target} needs its "
            f"own ({tokenizer[:12]}). Make a dataset of it with `paceline prepare FOLDER --target {target}`."
        )
    if made.tokenizer != tokenizer:
        raise UserError(
            f"The dataset was prepared with the tokenizer of {made.target} ({made.tokenizer[:12]}), but target "
            f"{target} has another one ({tokenizer[:12]}). Prepare the data again with --target {target}."
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash everything that decides which ids a text gets: vocabulary, added tokens, normalizer, pre-tokenizer."""
    tree = cast(dict[str, Any], json.loads(tokenizer.backend_tokenizer.to_str()))
    for passing in ("truncation", "padding"):  # state of the last call, not of the tokenizer
        tree.pop(passing, None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _check_types(manifest: Manifest) -> None:
    numbers = [manifest.rows, manifest.tokens, manifest.supervised_tokens, manifest.longest, manifest.largest_id]
    for shard in manifest.shards:
        numbers += [shard.rows, shard.tokens, shard.bytes]
    if not all(type(number) is int for number in numbers):
        raise TypeError("a count is no whole number")
    texts = [manifest.origin.tokenizer, *(shard.file for shard in manifest.shards)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the tokenizer's fingerprint or a file's name is no text")
    if any(Path(shard.file).name != shard.file for shard in manifest.shards):
        raise ValueError("a shard lies outside the folder")
