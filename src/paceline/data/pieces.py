"""Tokenizing pieces of the inputs, in this process or in several, so that a kill loses only what was under way.

A finished piece is three files in the workshop folder, named after everything that decides its rows: the shard, the
rows that were refused, and its facts, which get their name last. A piece that is there already is not made again.
Files are written aside and renamed, never written over: a shard may be a hard link of one in a finished dataset.

Shapes: S tokens of a row.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from paceline.data.chat import ChatEncoder
from paceline.data.exclude import EvalPrompts
from paceline.data.rows import EXCLUDED, UNSUPERVISED, Refused, RowLimits, Sample, encode_rows
from paceline.data.sources import Piece, Row, read_rows
from paceline.data.writer import ShardFacts, ShardWriter, settle
from paceline.records import RunError, UserError

_ROWS, _BYTES = 64, 1 << 19  # rows that are tokenized in one call: so many, of about so many bytes
_SHOWN = 400  # characters of an example


@dataclass(frozen=True, slots=True)
class Job:
    """How rows become samples; travels to the processes that do it."""

    chat: ChatEncoder
    limits: RowLimits
    exclude: EvalPrompts | None
    folder: str  # the workshop
    stop_at_bad: bool  # the first refused row is an error

    def key(self, recipe: str, piece: Piece, source: int) -> str:
        """Return the name of a finished piece: equal only if it holds equal rows that come from equal lines."""
        where = f"{recipe} {source} {piece.sha256} {piece.first_line}"
        return hashlib.sha256(where.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class PieceFacts:
    """What came of a piece's rows."""

    key: str
    source: int
    read: int
    truncated: int
    tokens_cut: int
    supervised_cut: int
    quarantined: dict[str, int]
    example: str  # the first sample, decoded
    unsupervised: str  # the first row that was refused because nothing in it is learnt from, decoded
    refused_bytes: int
    shard: ShardFacts

    def file(self, folder: Path, suffix: str) -> Path:
        """Return one of the piece's files."""
        return folder / f"{self.key}{suffix}"


def find_finished(folder: Path, key: str) -> PieceFacts | None:
    """Return the facts of a finished piece whose files are whole, or None."""
    try:
        tree = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        facts = PieceFacts(**{**tree, "shard": ShardFacts(**tree["shard"])})
        whole = facts.file(folder, ".refused").stat().st_size == facts.refused_bytes
        with facts.file(folder, ".arrow").open("rb") as shard:
            whole = whole and hashlib.file_digest(shard, "sha256").hexdigest() == facts.shard.sha256
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if whole else None


def tokenize_piece(job: Job, key: str, piece: Piece, source: int) -> PieceFacts:
    """Write a piece's samples and refused rows into the workshop and return its facts.

    Raises:
        UserError: the input cannot be read or changed meanwhile, or its first refused row ends the command.
    """
    folder = Path(job.folder)
    aside = {suffix: folder / f"{key}{suffix}.{os.getpid()}" for suffix in (".arrow", ".refused", ".json")}
    quarantined: Counter[str] = Counter()
    read = truncated = tokens_cut = supervised_cut = 0
    example = unsupervised = ""
    with closing(ShardWriter(aside[".arrow"])) as writer, aside[".refused"].open("w", encoding="utf-8") as refused:
        for end in _ends(job, piece):
            read += 1
            if isinstance(end, Refused):
                quarantined[end.reason] += 1
                refused.write(_entry(piece.path, end))
                if end.reason == UNSUPERVISED:
                    unsupervised = unsupervised or _decoded(job.chat, end.input_ids)
                continue
            writer.add(
                end.input_ids, end.loss_mask, end.candidates, source=source, line=end.line, tokens_cut=end.tokens_cut
            )
            truncated += end.tokens_cut > 0
            tokens_cut += end.tokens_cut
            supervised_cut += end.supervised_cut
            example = example or _decoded(job.chat, end.input_ids)
        shard = writer.finish()
    facts = PieceFacts(
        key,
        source,
        read,
        truncated,
        tokens_cut,
        supervised_cut,
        dict(quarantined),
        example=example,
        unsupervised=unsupervised,
        refused_bytes=aside[".refused"].stat().st_size,
        shard=shard,
    )
    aside[".json"].write_text(json.dumps(asdict(facts)), encoding="utf-8")
    for suffix, path in aside.items():  # the facts last: they vouch for the others
        settle(path, folder / f"{key}{suffix}")
    return facts


def tokenize_pieces(
    job: Job, todo: Sequence[tuple[str, Piece, int]], *, workers: int
) -> Generator[PieceFacts, None, None]:
    """Yield the facts of each (key, piece, source) in order, made by as many processes.

    Raises:
        UserError: see tokenize_piece; of several, the first in order.
        RunError: a process died.
    """
    if workers == 1 or len(todo) < 2:
        for key, piece, source in todo:
            yield tokenize_piece(job, key, piece, source)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # fork would copy torch's and the tokenizer's threads half
    # Sent as bytes, once a process: a tokenizer is megabytes of JSON.
    pool = ProcessPoolExecutor(min(workers, len(todo)), context, initializer=_begin, initargs=(job,))
    try:
        futures: list[Future[PieceFacts]] = []
        for item in todo:
            with _starting():
                futures.append(pool.submit(_work, *item))
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        raise RunError(
            "A process that tokenizes died, most likely because memory ran out. Run the command again: finished pieces "
            "are kept. Lower --workers if it happens again."
        ) from None
    finally:
        for child in set(multiprocessing.active_children()) - others:  # after an error or Ctrl-C: pieces are made anew
            child.terminate()
        pool.shutdown(cancel_futures=True)  # waits for them; a second call, after one without waiting, would not


@contextmanager
def _starting() -> Iterator[None]:
    """Hold back Ctrl-C while a process may be started, which inherits that: else it ends in a traceback of its own.

    In the parent it counts once the block ends.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    came: list[int] = []
    # Two means: another thread may take a signal that is blocked here, and a handler is not inherited.
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number)) or signal.SIG_DFL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what was held back comes now
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


_job: Job | None = None  # of a worker process


def _begin(job: Job) -> None:
    """Prepare a worker process: it leaves Ctrl-C to its parent and dies with it."""
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores already
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(key: str, piece: Piece, source: int) -> PieceFacts:
    assert _job is not None
    return tokenize_piece(_job, key, piece, source)


def _ends(job: Job, piece: Piece) -> Iterator[Sample | Refused]:
    for rows in _together(read_rows(piece)):
        for end in encode_rows(rows, job.chat, job.limits, job.exclude):
            if isinstance(end, Refused) and job.stop_at_bad and end.reason != EXCLUDED:
                raise UserError(f"{piece.path}:{end.line}: {end.detail}")
            yield end


def _together(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    batch: list[tuple[int, Row]] = []
    size = 0
    for line, row in rows:
        batch.append((line, row))
        size += len(row) if isinstance(row, bytes) else _BYTES // _ROWS
        if len(batch) == _ROWS or size >= _BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _entry(path: str, end: Refused) -> str:
    entry = {"file": path, "line": end.line, "reason": end.reason, "detail": end.detail, "row": end.row}
    try:
        return json.dumps(entry, default=_plain) + "\n"
    except RecursionError:  # nested more deeply than can be written again
        return json.dumps(entry | {"row": end.line_text}) + "\n"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _decoded(chat: ChatEncoder, input_ids: Int[np.ndarray, " S"] | None) -> str:
    text = ""
    if input_ids is not None:
        with suppress(ValueError, TypeError, OverflowError):  # ids of rows that have no words behind them
            text = chat.tokenizer.decode(input_ids[:_SHOWN].tolist())
    return str(text)[:_SHOWN]
