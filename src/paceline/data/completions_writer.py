"""Writing a folder of completions, so that a kill at any moment loses nothing but what was under way.

A conversation goes to its shard's log after every turn. When all of a shard's are over, its files are written aside,
synced and renamed; then completions.json vouches for them; then the log goes. Whatever a kill leaves of that is done
again from the log.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.data.completions import (
    DROPPED,
    NAME,
    Ledger,
    Sealed,
    Tally,
    check_shard,
    load_ledger,
    save_ledger,
    tally_of,
)
from paceline.data.conversation import Row
from paceline.data.shard_log import Key, Record, ShardLog, json_line, json_rows, write_log
from paceline.data.writer import settle
from paceline.records import RunError, UserError, many

_OWN = re.compile(r"\.lock|completions\.json|(completions|quarantine)-\d{5,}\.jsonl|open-\d{5,}\.log")


@contextmanager
def claimed(folder: Path, *, overwrite: bool) -> Iterator[Ledger | None]:
    """Make the folder, keep other processes out of it until the block ends, and yield the ledger that is in it.

    A folder into which nothing was written is gone again at the end, or is as it was.

    Raises:
        UserError: another process is in it, it holds something that is not ours for certain, or the place cannot be
            written to.
        RunError: the disk is full or broken.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and completions go to a folder. Choose another --out.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    empty = not folder.exists() or not any(folder.iterdir())
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_own(folder, overwrite=overwrite)
        lock = _open_lock(folder)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"Another process is generating into {folder}. Wait for it or choose another --out."
            ) from None
        try:
            yield load_ledger(folder)
        finally:
            if empty and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                with suppress(OSError):  # somebody put something there
                    for path in made:
                        path.rmdir()


def clear(folder: Path) -> None:
    """Remove the completions in a claimed folder.

    Raises:
        UserError, RunError: they cannot be removed.
    """
    with _writing(folder):
        # What vouches for the others goes last.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == NAME):
            if path.name != ".lock":
                path.unlink()


class CompletionsWriter:
    """A claimed folder with its ledger. Threads may call it at once."""

    def __init__(self, folder: Path, ledger: Ledger, on_check: Callable[[int, int], None]) -> None:
        """Open what an earlier command left, and see that its shards are whole; `notes` says what there is to say.

        `on_check` gets shards done and shards in all.

        Raises:
            UserError: a shard is damaged.
            RunError: the disk is full or broken.
        """
        self.folder, self.ledger = folder, ledger
        self.notes: list[str] = []
        self._logs: dict[int, ShardLog] = {}
        self._lock = threading.Lock()
        with _writing(folder):
            self._check_shards(on_check)
            save_ledger(folder, ledger)  # what cannot be written is known before anything is generated
            self.total = ledger.total
            for index in ledger.open_shards:
                if self._log_path(index).exists():
                    self._recover(index)
        self.found = self.total.conversations

    def is_over(self, key: Key) -> bool:
        """Return whether nothing is left to do for a conversation."""
        index = self._index(key)
        with self._lock:
            return index in self.ledger.shards or (index in self._logs and self._logs[index].is_over(key))

    def rows_of(self, key: Key) -> list[Row]:
        """Return what there is of a conversation that is not over."""
        with self._lock:
            log = self._logs.get(self._index(key))
            return list(log.read(key)["rows"]) if log and key in log else []

    def keep(self, key: Key, rows: Sequence[Row], *, over: bool, left_out: dict[str, Any] | None = None) -> None:
        """Write where a conversation is; `left_out` says what of it is not among its rows, and why.

        Raises:
            RunError: the disk is full or broken.
        """
        line, copy = key
        place = {"line": line, **({"copy": copy} if self.ledger.samples > 1 else {})}
        record: Record = {
            "line": line,
            "copy": copy,
            "over": over,
            "rows": [{"id": row["id"], **place, **row} for row in rows],
            "left_out": {"id": left_out["id"], **place, **left_out} if left_out else None,
        }
        index = self._index(key)
        with self._lock, _writing(self.folder):
            if index not in self._logs:
                self._logs[index] = ShardLog(self._log_path(index))
            self._logs[index].append(record)
            if over:
                self.total.add(tally_of(record))
                self._seal_if_finished(index)

    def retry_errors(self) -> int:
        """Forget conversations that were refused, so that they are made once more; return how many.

        Raises:
            RunError: the disk is full or broken.
        """
        count = self.total.errors
        with self._lock, _writing(self.folder):
            for shard in [shard for shard in self.ledger.shards.values() if shard.tally.errors]:
                self._unseal(shard)
            for log in self._logs.values():
                for key in filter(log.is_over, log.ordered()):
                    if _is_error(record := log.read(key)):
                        log.append({**record, "over": False, "left_out": None})
            self.total = self.ledger.total
            for log in self._logs.values():
                self._count(log)
        self.found = self.total.conversations
        return count

    def close(self) -> None:
        """Close the logs of shards that are not finished."""
        for log in self._logs.values():
            log.close()

    def _index(self, key: Key) -> int:
        return (key[0] - 1) // self.ledger.shard_lines

    def _log_path(self, index: int) -> Path:
        return self.folder / f"open-{index:05d}.log"

    def _check_shards(self, on_check: Callable[[int, int], None]) -> None:
        """Forget shards with a missing file, and remove what a kill left of the writing of the others."""
        for path in self.folder.glob("*.part"):
            path.unlink()
        shards = sorted(self.ledger.shards.items())
        for done, (index, shard) in enumerate(shards, 1):
            if check_shard(self.folder, shard):
                self._log_path(index).unlink(missing_ok=True)
                if shard.quarantine_sha256 is None:
                    (self.folder / shard.quarantine).unlink(missing_ok=True)
            else:
                del self.ledger.shards[index]
                self.notes.append(f"{self.folder / shard.file} or its quarantine file is missing and is made again.")
            on_check(done, len(shards))

    def _recover(self, index: int) -> None:
        log = self._logs[index] = ShardLog(self._log_path(index))
        if log.damaged:
            self.notes.append(f"{log.path} had {many(log.damaged, 'damaged line')}; what stood there is made again.")
        self._count(log)
        self._seal_if_finished(index)

    def _count(self, log: ShardLog) -> None:
        for key in filter(log.is_over, log.ordered()):
            self.total.add(tally_of(log.read(key)))

    def _seal_if_finished(self, index: int) -> None:
        """Write a shard's files once all of its conversations are over."""
        log = self._logs[index]
        if log.finished < self.ledger.survey.prompts[index] * self.ledger.samples:
            return
        tally = Tally()
        empty = Sealed(index, 0, "", None, tally)
        rows, left_out = _SumFile(self.folder / empty.file), _SumFile(self.folder / empty.quarantine)
        with rows, left_out:
            for key in log.ordered():
                record = log.read(key)
                tally.add(tally_of(record))
                for row in record["rows"]:
                    rows.write(row)
                if record["left_out"]:
                    left_out.write(record["left_out"])
        rows.settle()
        if tally.reasons:
            left_out.settle()
        else:
            left_out.aside.unlink()
        self.ledger.shards[index] = Sealed(
            index, rows.bytes, rows.sha256, left_out.sha256 if tally.reasons else None, tally
        )
        save_ledger(self.folder, self.ledger)  # also sees that the names are on the disk before the log goes
        if not tally.reasons:
            left_out.path.unlink(missing_ok=True)  # of a shard that was made once more
        del self._logs[index]
        log.close()
        log.path.unlink()

    def _unseal(self, shard: Sealed) -> None:
        """Make a log of a finished shard, without its errors."""
        records: dict[Key, Record] = {}
        for row in json_rows(self.folder / shard.file):
            _record_of(records, row)["rows"].append(row)
        if shard.quarantine_sha256:
            for entry in json_rows(self.folder / shard.quarantine):
                record = _record_of(records, entry)
                if _is_error(record | {"left_out": entry}):
                    record["over"] = False
                else:
                    record["left_out"] = entry
        path = self._log_path(shard.index)
        write_log(path, records.values())
        del self.ledger.shards[shard.index]
        save_ledger(self.folder, self.ledger)
        self._logs[shard.index] = ShardLog(path)


class _SumFile:
    """A file of JSON lines that is written aside, with its checksum."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside, self.bytes = path, path.with_name(f"{path.name}.part"), 0
        self._digest = hashlib.sha256()
        self._file = self.aside.open("wb")

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, row: Any) -> None:
        line = json_line(row)
        self._file.write(line)
        self._digest.update(line)
        self.bytes += len(line)

    def __enter__(self) -> "_SumFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def settle(self) -> None:
        """Give it its name once it is on the disk."""
        settle(self.aside, self.path)


def cannot_write(folder: Path, error: OSError) -> RunError | UserError:
    """Return the sentence for a folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return RunError(
            f"{folder} (--out) cannot be written: {error.strerror}. What was finished is kept: make room and run the "
            "same command again."
        )
    return UserError(f"{folder} (--out) cannot be written: {error.strerror}. Choose another place.")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None


def _record_of(records: dict[Key, Record], row: dict[str, Any]) -> Record:
    line, copy = row["line"], row.get("copy", 0)
    return records.setdefault((line, copy), {"line": line, "copy": copy, "over": True, "rows": [], "left_out": None})


def _is_error(record: Record) -> bool:
    return bool(record["left_out"]) and record["left_out"]["reason"] not in DROPPED


def _check_own(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with anything in it that is not ours: names alone do not say so, a ledger does."""
    found = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    if foreign := [name for name in found if not _OWN.fullmatch(name.removesuffix(".part"))]:
        raise UserError(
            f"A folder of completions must hold nothing else, got {foreign[0]} in {folder} (--out). Move that away, or "
            "choose another --out."
        )
    if load_ledger(folder) is not None:
        return
    begun = folder / f"{NAME}.part"  # which a kill leaves of the first writing
    if any(name != begun.name for name in found) or begun.is_symlink():
        raise UserError(
            f"{folder} (--out) holds {found[0]}, but no {NAME} that says what was asked for"
            f"{', so --overwrite replaces nothing' if overwrite else ''}. Restore that file, choose another --out, or "
            "remove the folder by hand."
        )
    lock = folder / ".lock"
    if not found and lock.is_file() and not lock.is_symlink() and lock.stat().st_size:  # ours is empty
        raise UserError(f"{folder} (--out) holds a .lock of something else. Choose another --out.")


def _open_lock(folder: Path) -> IO[bytes]:
    """Open the lock, which is left as it is where it is there.

    Raises:
        UserError: it is no file of ours.
    """
    path = folder / ".lock"
    handle = None
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
            raise
        regular = False
    if handle is None or not regular:
        if handle is not None:
            os.close(handle)
        raise UserError(f"{path} must be a regular file, got a link or something else. Choose another --out.")
    return os.fdopen(handle, "r+b", buffering=0)
