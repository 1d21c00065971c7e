"""A folder of completions: `completions.json` says what was asked for and vouches for every finished shard.

    completions.json          what was asked for, of every shard its files with checksums and its counts, and a
                              checksum of all that
    completions-00000.jsonl   rows of the first 1,024 lines of the prompt file, in their order
    quarantine-00000.jsonl    what was refused or left out among them, where there is any
    open-00001.log            a shard that is being made (shard_log.py)

A shard is written when all of its prompts are done, so its bytes do not depend on the order in which they were. A row
has `prompt_ids` and `completion_ids`, or of several turns `input_ids` and `loss_mask`; `prepare` keeps these ids.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from paceline.data.conversation import CUT, LOOP, answer_tokens
from paceline.data.manifest import Count, what_is_wrong
from paceline.data.shard_log import Record
from paceline.data.writer import settle
from paceline.records import UserError, many

VERSION = 2
NAME = "completions.json"
SHARD_LINES = 1024  # of the prompt file
DROPPED = (CUT, LOOP)  # asked for, so no faults

_INSTEAD = "Restore it, generate into another --out, or remove the folder by hand."  # it does not tell whose it is
_SHARD = re.compile(r"completions-\d{5,}\.jsonl")
_Checksum = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(slots=True)
class Tally:
    """Sums over conversations that are over; a prompt has as many as samples were asked for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    conversations: Count = 0
    rows: Count = 0
    answers: Count = 0  # those that were left out are counted from here on too
    tokens: Count = 0  # that the target wrote
    stopped: Count = 0
    cut: Count = 0  # answers that reached the limit of new tokens
    loops: Count = 0  # rows in which an answer ends in a loop
    retokenized: Count = 0  # rows in which ids of an answer were made of its text
    turns_left: Count = 0  # questions that were not asked because their conversation ended before them
    reasons: dict[str, Count] = field(default_factory=dict)  # what was refused or left out, and why

    @property
    def errors(self) -> int:
        """Conversations that were refused."""
        return sum(count for reason, count in self.reasons.items() if reason not in DROPPED)

    def add(self, other: "Tally") -> None:
        """Add another's sums."""
        for name in self.__slots__:
            if name != "reasons":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A finished shard: its files and what is in them."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    index: Count
    bytes: Count
    sha256: _Checksum
    quarantine_sha256: _Checksum | None
    tally: Tally

    @property
    def file(self) -> str:
        """The name of the rows' file."""
        return f"completions-{self.index:05d}.jsonl"

    @property
    def quarantine(self) -> str:
        """The name of the file of what was refused or left out."""
        return f"quarantine-{self.index:05d}.jsonl"


@dataclass(frozen=True, slots=True)
class Survey:
    """What a look at all prompts found before anything is generated."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    prompts: tuple[Count, ...]  # in each shard; blank lines are none
    slots: Count  # tokens of the longest prompt with its answers, at most
    refused: Count  # prompts that cannot be asked
    first_refused: str  # what is wrong with the first of them


@dataclass(frozen=True, slots=True)
class Ledger:
    """What completions.json holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    version: int
    asked: dict[str, Any]  # everything that decides the rows
    made_with: dict[str, Any]  # what else there is to know
    shard_lines: Annotated[int, Field(strict=True, ge=1)]
    survey: Survey
    shards: dict[int, Sealed] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Completions of a prompt."""
        return int(self.asked["samples"])

    @property
    def conversations(self) -> int:
        """How many there are to be."""
        return sum(self.survey.prompts) * self.samples

    @property
    def open_shards(self) -> list[int]:
        """Shards that are not finished."""
        return [index for index, prompts in enumerate(self.survey.prompts) if prompts and index not in self.shards]

    @property
    def total(self) -> Tally:
        """The sums over all finished shards."""
        tally = Tally()
        for shard in self.shards.values():
            tally.add(shard.tally)
        return tally


def tally_of(record: Record) -> Tally:
    """Return the sums of one conversation that is over."""
    left_out = record["left_out"]
    rows = [*record["rows"], *([left_out["row"]] if left_out and left_out["reason"] in DROPPED else [])]
    answers = sum(row["turns"] for row in rows)
    cut = sum(row["finish"] == "length" for row in rows)
    return Tally(
        conversations=1,
        rows=len(record["rows"]),
        answers=answers,
        tokens=sum(map(answer_tokens, rows)),
        stopped=answers - cut,
        cut=cut,
        loops=sum(row["loop"] for row in rows),
        retokenized=sum("retokenized" in row for row in rows),
        turns_left=sum(row.get("turns_left", 0) for row in rows),
        reasons={left_out["reason"]: 1} if left_out else {},
    )


def load_ledger(folder: Path) -> Ledger | None:
    """Return what completions.json says, or None where there is none.

    Raises:
        UserError: it cannot be understood, or is not as it was written.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["version"] != VERSION:
            raise UserError(
                f"{path} has version {tree['version']}, this program reads {VERSION}. Generate again into another "
                "--out, or remove the folder by hand first."
            )
        if tree.pop("sha256", None) != _sha256(tree):
            raise UserError(f"{path} was edited or damaged: its checksum of itself does not fit. {_INSTEAD}")
        ledger: Ledger = _reader().validate_python(tree)
        return ledger
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = what_is_wrong(error)
    raise UserError(f"{path} cannot be understood ({reason}). {_INSTEAD}")


def save_ledger(folder: Path, ledger: Ledger) -> None:
    """Put completions.json in place, whole and on the disk."""
    aside = folder / f"{NAME}.part"
    tree = asdict(ledger)
    aside.write_text(json.dumps(tree | {"sha256": _sha256(tree)}, indent=1) + "\n", encoding="utf-8")
    settle(aside, folder / NAME)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_same(folder: Path, ledger: Ledger, asked: dict[str, Any]) -> None:
    """Refuse to go on with other settings than those that the folder was begun with.

    Raises:
        UserError: a setting differs; it is named with both values.
    """
    for key in dict.fromkeys((*asked, *ledger.asked)):
        was, now = ledger.asked.get(key), asked.get(key)
        if was != now:
            raise UserError(
                f"{folder} holds completions of other settings: {key} was {_shown(was)} and is {_shown(now)} now. Give "
                "the same settings to go on with them, choose another --out, or add --overwrite."
            )


def check_shard(folder: Path, shard: Sealed) -> bool:
    """Compare a shard with its checksums; False: a file is missing.

    Raises:
        UserError: a file is damaged; it is named.
    """
    for name, sha256 in ((shard.file, shard.sha256), (shard.quarantine, shard.quarantine_sha256)):
        if sha256 is None:
            continue
        path = folder / name
        if not path.is_file():
            return False
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise _damaged(path)
    return True


def shard_files(folder: Path) -> list[Path]:
    """Return the files of rows of a finished folder of completions.

    Raises:
        UserError: it is not finished, or has no rows.
    """
    ledger = load_ledger(folder)
    if ledger is None or ledger.open_shards:
        done = ledger.total.conversations if ledger else 0
        of = f" of {ledger.conversations:,}" if ledger else ""
        raise UserError(
            f"Completions must be finished before they are read, and {folder} has {done:,}{of} in finished shards. Run "
            "its `paceline generate` command again to finish it."
        )
    files = [folder / shard.file for _, shard in sorted(ledger.shards.items()) if shard.tally.rows]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]} is missing. Run `paceline generate` again, which makes that shard anew.")
    if not files:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in ledger.total.reasons.items())
        raise UserError(
            f"{folder} holds no rows: none of its {many(ledger.conversations, 'conversation')} was kept "
            f"({why}). Generate "
            "again with other settings, or leave the folder out."
        )
    return files


def check_sources(files: Mapping[Path, str], tokenizer: str, target: str) -> None:
    """Compare shards among input files, given with their sha256, with what completions.json beside them says.

    Raises:
        UserError: a shard is damaged, or its ids are another tokenizer's than the target's.
    """
    for folder in dict.fromkeys(path.parent for path in files if _SHARD.fullmatch(path.name)):
        ledger = load_ledger(folder)
        if ledger is None:
            continue
        made = ledger.asked["tokenizer"]
        if made != tokenizer:
            raise UserError(
                f"{folder} holds ids of the tokenizer of {ledger.made_with['target']} ({made[:12]}), but target "
                f"{target} has another one ({tokenizer[:12]}). Generate with --target {target}."
            )
        for shard in ledger.shards.values():
            path = folder / shard.file
            if files.get(path, shard.sha256) != shard.sha256:
                raise _damaged(path)


def _sha256(tree: dict[str, Any]) -> str:
    """Return the checksum of what completions.json says, however it is set out."""
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}..."


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged: its checksum is not the one in {NAME}. Restore it, or remove it and run "
        "`paceline generate` again, which makes its shard anew."
    )


@cache
def _reader() -> Any:
    return TypeAdapter(Ledger)
