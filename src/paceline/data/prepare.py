"""Input files to a dataset: the workshop of pieces beside it, the ledger of every row, the folder in one rename.

Everything that decides the rows is hashed into the recipe: input files, tokenizer, chat template, mask rule, limits and
evaluation sets. A dataset of the same recipe is found finished; pieces of a killed command are found in the workshop.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.data.manifest import VERSION, Manifest, Origin
from paceline.data.pieces import Job, PieceFacts, find_finished, tokenize_pieces
from paceline.data.rows import EXCLUDED, UNSUPERVISED
from paceline.data.sources import SourceFile
from paceline.data.store import open_dataset
from paceline.data.writer import cannot_write, check_place, placing, seal, shard_name
from paceline.records import UserError

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The dataset that was written or found, and what there is to say about it."""

    manifest: Manifest
    quarantine: Path | None  # refused rows, where there are any
    notes: tuple[str, ...]  # what was found finished, and warnings


def recipe_of(job: Job, files: Sequence[SourceFile], tokenizer: str, template: str | None) -> str:
    """Return the hash of everything that decides a dataset's rows."""
    limits = asdict(job.limits)
    decides = [
        VERSION,
        tokenizer,
        template,
        job.chat.mask_rule,
        limits,
        job.exclude.digest if job.exclude else None,
        [file.sha256 for file in files],
    ]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def find_prepared(out: Path, recipe: str, *, max_quarantined: float) -> Prepared | None:
    """Return the dataset at the place if it was made by this very recipe and is whole.

    Raises:
        UserError: it is of this recipe, but damaged or with too many rows refused.
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
    quarantine = quarantine_of(out) if refused else None
    _check_share(refused, manifest.rows + refused.total(), quarantine, max_quarantined)
    age = _age(time.time() - (out / "manifest.json").stat().st_mtime)
    note = f"{out} holds this very dataset already (made {age} ago: same inputs, tokenizer, template, mask rule)."
    return Prepared(manifest, quarantine, (note,))


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
) -> Prepared:
    """Tokenize the files into the dataset `out`; `origin` comes without what is counted here.

    Raises:
        UserError: no row is left, or more than the share `max_quarantined` of them was refused; what was tokenized is
            kept for the next try.
        RunError: the disk is full or a process died.
    """
    check_place(out, overwrite=overwrite)
    with _workshop(Path(job.folder), out) as folder:
        todo = [
            (job.key(origin.recipe, piece, source), piece, source)
            for source, file in enumerate(files)
            for piece in file.pieces
        ]
        found = {key: facts for key, _, _ in todo if (facts := find_finished(folder, key)) and not _stops(job, facts)}
        notes = [_found_note(folder, list(found.values()), len(todo))] if found else []
        done = sum(facts.read for facts in found.values())
        total = sum(file.rows for file in files)
        on_progress(done, total)
        with closing(tokenize_pieces(job, [item for item in todo if item[0] not in found], workers=workers)) as made:
            for facts in made:
                found[facts.key] = facts
                done += facts.read
                on_progress(done, total)
        pieces = [found[key] for key, _, _ in todo]
        quarantine = _gather_quarantine(folder, pieces, out)
        _check_ledger(pieces, files, quarantine, max_quarantined)
        origin = _with_ledger(origin, pieces, files)
        with placing(out, overwrite=overwrite) as aside:
            shards = [facts for facts in pieces if facts.shard.rows]
            names = [shard_name(i, len(shards)) for i in range(len(shards))]
            for facts, name in zip(shards, names, strict=True):
                _link(facts.file(folder, ".arrow"), aside / name)
            manifest = seal(aside, [(n, facts.shard) for n, facts in zip(names, shards, strict=True)], origin)
        shutil.rmtree(folder, ignore_errors=True)
    notes += _warnings(manifest, pieces)
    return Prepared(manifest, quarantine, tuple(notes))


def quarantine_of(out: Path) -> Path:
    """Return where a dataset's refused rows are written."""
    return out.with_name(f"{out.name}.quarantine.jsonl")


def workshop_of(out: Path) -> Path:
    """Return the folder of finished pieces beside a dataset that is being made."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def _workshop(folder: Path, out: Path) -> Iterator[Path]:
    """Yield the workshop, ours alone; it stays after an error if a piece in it is finished."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise cannot_write(out, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is preparing {out}. Wait for it or choose another --out.") from None
        try:
            yield folder
        except OSError as error:
            raise cannot_write(out, error) from None
        finally:
            if folder.is_dir() and not any(folder.glob("*.json")):
                shutil.rmtree(folder, ignore_errors=True)


def _gather_quarantine(folder: Path, pieces: Sequence[PieceFacts], out: Path) -> Path | None:
    path = quarantine_of(out)
    path.unlink(missing_ok=True)
    refused = [facts.file(folder, ".refused") for facts in pieces if facts.quarantined]
    if not refused:
        return None
    with path.open("wb") as file:
        for part in refused:
            with part.open("rb") as rows:
                shutil.copyfileobj(rows, file)
    return path


def _check_ledger(
    pieces: Sequence[PieceFacts], files: Sequence[SourceFile], quarantine: Path | None, limit: float
) -> None:
    counts: Counter[str] = Counter()
    for facts in pieces:
        counts.update(facts.quarantined)
    read = sum(facts.read for facts in pieces)
    names = ", ".join(file.path for file in files)
    if read == 0:
        raise UserError(f"{names} holds no rows, so there is nothing to prepare. Give a file with rows.")
    if counts.total() == read:
        hint = ""
        if counts[UNSUPERVISED]:
            hint = " Where 0 % of the tokens are supervised, compare the loss mask with the chat template."
        raise UserError(f"No row of {names} can be used ({_reasons(counts)}). See {quarantine} for each of them.{hint}")
    _check_share(counts, read, quarantine, limit)


def _check_share(counts: Counter[str], read: int, quarantine: Path | None, limit: float) -> None:
    faults = counts.total() - counts[EXCLUDED]
    if faults > limit * read:
        allow = min(1.0, math.ceil(1000 * faults / read) / 1000)
        raise UserError(
            f"At most {limit:.2%} of the rows may be quarantined (--max-quarantined {limit:g}), but {faults:,} of "
            f"{read:,} are ({_reasons(counts)}). See {quarantine} for each of them; correct them, or allow more with "
            f"--max-quarantined {allow:g}."
        )


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count:,}" for reason, count in counts.most_common())


def _stops(job: Job, facts: PieceFacts) -> bool:
    """Tell whether a finished piece holds the refused row at which this command is to stop."""
    return job.stop_at_bad and bool(facts.quarantined)


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


def _warnings(manifest: Manifest, pieces: Sequence[PieceFacts]) -> list[str]:
    if manifest.supervised_tokens < manifest.tokens:
        return []
    example = next((facts.example for facts in pieces if facts.example), "")
    return [
        "Warning: 100 % of the tokens are supervised, prompts included, so the drafter learns to write prompts too. "
        f"Compare the loss mask with the chat template; the first row begins {example!r}."
    ]


def _found_note(folder: Path, found: Sequence[PieceFacts], of: int) -> str:
    oldest = min(facts.file(folder, ".json").stat().st_mtime for facts in found)
    rows = sum(facts.read for facts in found)
    age = _age(time.time() - oldest)
    return f"{folder} holds {len(found)} of {of} pieces ({rows:,} rows, made {age} ago), which are used again."


def _age(seconds: float) -> str:
    for name, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'s' * (count > 1)}"
    return f"{int(seconds)} s"
