"""Input files to a dataset: the workshop of pieces beside it, the ledger of every row, the folder in one rename.

Everything that decides the rows is hashed into the recipe: input files, target, tokenizer, chat template, mask rule,
limits, evaluation sets, the rules of this program and the versions of what it calls. A dataset of the same recipe is
found finished; pieces of a killed command are found in the workshop.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from paceline.data.manifest import VERSION, Manifest, Origin
from paceline.data.pieces import Job, PieceFacts, find_finished, tokenize_pieces
from paceline.data.rows import EXCLUDED, RULES, UNSUPERVISED
from paceline.data.sources import SourceFile
from paceline.data.store import open_dataset
from paceline.data.workshop import clear, gather_quarantine, place_quarantine, quarantine_of, workshop
from paceline.data.writer import check_place, placing, seal, shard_name
from paceline.records import UserError, many

_CALLED = ("transformers", "tokenizers", "jinja2")  # whose versions may decide what a row becomes
Progress = Callable[[int, int | None], None]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The dataset that was written or found, and what there is to say about it."""

    manifest: Manifest
    quarantine: Path | None  # refused rows, where there are any
    notes: tuple[str, ...]  # what was found finished, and warnings


def recipe_of(job: Job, files: Sequence[SourceFile], origin: Origin) -> str:
    """Return the hash of everything that decides a dataset's rows and what its manifest says of them."""
    decides = [
        VERSION,
        RULES,
        {name: version(name) for name in _CALLED},
        [origin.target, origin.target_revision, origin.tokenizer],
        job.chat.decides,
        asdict(job.limits),
        job.exclude.digest if job.exclude else None,
        [file.sha256 for file in files],
    ]
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()


def find_prepared(out: Path, recipe: str, *, max_quarantined: float, stop_at_bad: bool) -> Prepared | None:
    """Return the dataset at the place if it was made by this very recipe and is whole.

    Raises:
        UserError: it is of this recipe, but damaged, or with too many rows refused.
    """
    if not (out / "manifest.json").is_file():
        return None
    try:
        manifest = open_dataset(out).manifest
    except UserError as error:
        if recipe in (out / "manifest.json").read_text(errors="replace"):
            raise UserError(f"{error} With --overwrite it is made anew.") from None
        return None
    if manifest.origin.recipe != recipe:
        return None
    refused = Counter(manifest.origin.quarantined)
    entries, first = _entries(quarantine_of(out)) if refused else (0, b"")
    listed = entries == refused.total()  # else it is gone or of another dataset
    quarantine = quarantine_of(out) if refused and listed else None
    if stop_at_bad and any(reason != EXCLUDED for reason in refused):
        raise _first_refused(out, refused, first if listed else b"")
    _check_share(refused, manifest.rows + refused.total(), quarantine, max_quarantined)
    age = _age(time.time() - (out / "manifest.json").stat().st_mtime)
    notes = [f"{out} holds this very dataset already (made {age} ago: same inputs, tokenizer, template, mask rule)."]
    if not listed:
        notes.append(f"{quarantine_of(out)} does not list the rows that were refused; --overwrite writes it again.")
    return Prepared(manifest, quarantine, (*notes, *_warnings(manifest, "")))


def make(
    job: Job,
    files: Sequence[SourceFile],
    out: Path,
    origin: Origin,
    *,
    workers: int,
    max_quarantined: float,
    overwrite: bool,
    on_progress: Progress,
    on_note: Note,
) -> Prepared:
    """Tokenize the files into the dataset `out`; `origin` comes without what is counted here.

    `on_note` gets a warning that would be lost with the error that follows it.

    Raises:
        UserError: no row is left, or more than the share `max_quarantined` of them was refused; what was tokenized is
            kept for the next try.
        RunError: the disk is full or a process died.
    """
    check_place(out, overwrite=overwrite)
    with workshop(out) as folder:
        pieces, notes = _tokenize(job, files, folder, origin.recipe, workers=workers, on_progress=on_progress)
        if not any(facts.read for facts in pieces):
            clear(folder)
            raise UserError(f"{_names(files)} holds no rows, so there is nothing to prepare. Give a file with rows.")
        refused = gather_quarantine(folder, [facts.file(folder, ".refused") for facts in pieces if facts.quarantined])
        _check_ledger(pieces, files, refused, max_quarantined, on_note)
        origin = _with_ledger(origin, pieces, files)
        with placing(out, overwrite=overwrite) as aside:
            shards = [facts for facts in pieces if facts.shard.rows]
            names = [shard_name(i, len(shards)) for i in range(len(shards))]
            for facts, name in zip(shards, names, strict=True):
                _link(facts.file(folder, ".arrow"), aside / name)
            manifest = seal(aside, [(n, facts.shard) for n, facts in zip(names, shards, strict=True)], origin)
        quarantine = place_quarantine(refused, out)
        clear(folder)
    return Prepared(manifest, quarantine, (*notes, *_warnings(manifest, _example(pieces))))


def _tokenize(
    job: Job, files: Sequence[SourceFile], folder: Path, recipe: str, *, workers: int, on_progress: Progress
) -> tuple[list[PieceFacts], list[str]]:
    """Return the facts of all pieces in order, found or made, and what there is to say about those found."""
    todo = [
        (job.key(recipe, piece, source), piece, source) for source, file in enumerate(files) for piece in file.pieces
    ]
    found = {key: facts for key, _, _ in todo if (facts := find_finished(folder, key)) and not _stops(job, facts)}
    notes = [_found_note(folder, list(found.values()), len(todo))] if found else []
    rows = {key: piece.rows for key, piece, _ in todo}  # with blank lines, as in the sum
    done, total = sum(rows[key] for key in found), sum(file.rows for file in files)
    on_progress(done, total)
    with closing(tokenize_pieces(job, [item for item in todo if item[0] not in found], workers=workers)) as made:
        for facts in made:
            found[facts.key] = facts
            done += rows[facts.key]
            on_progress(done, total)
    return [found[key] for key, _, _ in todo], notes


def _entries(quarantine: Path) -> tuple[int, bytes]:
    """Return how many rows a quarantine file lists, and the first that is bad, not only left out as asked."""
    count, first = 0, b""
    with suppress(OSError), quarantine.open("rb") as file:
        for line in file:
            first = first or (b"" if _is_excluded(line) else line)
            count += 1
    return count, first


def _is_excluded(entry: bytes) -> bool:
    try:
        return EXCLUDED.encode() in entry and json.loads(entry)["reason"] == EXCLUDED
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _first_refused(out: Path, refused: Counter[str], entry: bytes) -> UserError:
    """Return the error that making the dataset would have ended with, as far as that is known."""
    try:
        first = json.loads(entry)
        return UserError(f"{first['file']}:{first['line']}: {first['detail']}")
    except (ValueError, KeyError, TypeError, RecursionError):
        return UserError(
            f"No row may be bad (--on-bad stop), but {refused.total() - refused[EXCLUDED]:,} were when {out} was made "
            f"({_reasons(refused)}). With --overwrite it is made anew."
        )


def _check_ledger(
    pieces: Sequence[PieceFacts], files: Sequence[SourceFile], quarantine: Path | None, limit: float, on_note: Note
) -> None:
    counts: Counter[str] = Counter()
    for facts in pieces:
        counts.update(facts.quarantined)
    read = sum(facts.read for facts in pieces)
    example = next((facts.unsupervised for facts in pieces if facts.unsupervised), "")
    if counts.total() == read:
        if counts[UNSUPERVISED]:  # whoever was encoded and fits has nothing to learn from, or would have been kept
            on_note(_nothing_supervised(counts[UNSUPERVISED], example))
        raise UserError(
            f"No row of {_names(files)} can be used ({_reasons(counts)}). See {quarantine} for each of them."
        )
    _check_share(counts, read, quarantine, limit, example)


def _check_share(counts: Counter[str], read: int, quarantine: Path | None, limit: float, example: str = "") -> None:
    faults = counts.total() - counts[EXCLUDED]
    if faults > limit * read:
        allow = min(1.0, math.ceil(1000 * faults / read) / 1000)
        see = f"See {quarantine} for each of them; correct" if quarantine else "Correct"
        raise UserError(
            f"At most {limit:.2%} of the rows may be quarantined (--max-quarantined {limit:g}), but {faults:,} of "
            f"{read:,} are ({_reasons(counts)}). {see} them, or allow more with --max-quarantined {allow:g}."
            f"{_hint(counts, example)}"
        )


def _hint(counts: Counter[str], example: str) -> str:
    """Return what to look at where most rows that were refused have nothing to learn from."""
    if counts.most_common(1)[0][0] != UNSUPERVISED:
        return ""
    shown = f"; the first such row begins {example!r}" if example else ""
    return f" Where 0 % of the tokens are supervised, compare the loss mask with the chat template{shown}."


def _names(files: Sequence[SourceFile]) -> str:
    return ", ".join(file.path for file in files)


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in counts.most_common())


def _stops(job: Job, facts: PieceFacts) -> bool:
    """Tell whether a finished piece holds the refused row at which this command is to stop."""
    return job.stop_at_bad and any(reason != EXCLUDED for reason in facts.quarantined)


def _link(made: Path, place: Path) -> None:
    try:
        os.link(made, place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(made, place)


def _with_ledger(origin: Origin, pieces: Sequence[PieceFacts], files: Sequence[SourceFile]) -> Origin:
    sources = []
    totals: Counter[str] = Counter()
    for index, file in enumerate(files):
        mine = [facts for facts in pieces if facts.source == index]
        refused: Counter[str] = Counter()
        for facts in mine:
            refused.update(facts.quarantined)
        totals.update(refused)
        sources.append(
            {
                "path": file.path,
                "sha256": file.sha256,
                "rows": sum(facts.read for facts in mine),
                "kept": sum(facts.shard.rows for facts in mine),
                "truncated": sum(facts.truncated for facts in mine),
                "quarantined": dict(refused),
            }
        )
    return replace(
        origin,
        sources=sources,
        quarantined=dict(totals),
        truncated=sum(facts.truncated for facts in pieces),
        tokens_cut=sum(facts.tokens_cut for facts in pieces),
        supervised_cut=sum(facts.supervised_cut for facts in pieces),
    )


def _example(pieces: Sequence[PieceFacts]) -> str:
    return next((facts.example for facts in pieces if facts.example), "")


def _warnings(manifest: Manifest, example: str) -> list[str]:
    if manifest.supervised_tokens < manifest.tokens:
        return []
    shown = f"; the first row begins {example!r}" if example else ""
    return [
        "Warning: 100 % of the tokens are supervised, prompts included, so the drafter learns to write prompts too. "
        f"Compare the loss mask with the chat template{shown}."
    ]


def _nothing_supervised(rows: int, example: str) -> str:
    which = "the one row that was" if rows == 1 else f"any of the {rows:,} rows that were"
    shown = f"; the first row begins {example!r}" if example else ""
    return (
        f"Warning: 0 % of the tokens are supervised, or no two in a row, in {which} encoded and checked, so the "
        f"drafter would learn nothing. Compare the loss mask with the chat template{shown}."
    )


def _found_note(folder: Path, found: Sequence[PieceFacts], of: int) -> str:
    oldest = min(facts.file(folder, ".json").stat().st_mtime for facts in found)
    rows = sum(facts.read for facts in found)
    age = _age(time.time() - oldest)
    held = f"{len(found)} of {many(of, 'piece')} ({many(rows, 'row')}, made {age} ago)"
    return f"{folder} holds {held}, which are used again."


def _age(seconds: float) -> str:
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return many(count, name)
    return f"{int(seconds)} s"
