"""The log of a shard of completions that is being made: records in the order in which they came, each with a checksum.

A record is one write of one line. A killed process leaves a torn last line at worst, which is cut off when the log is
opened again; a line that was damaged later is left out. The last record of a key counts. The file is synced every 10 s,
so what a power failure takes is made in 10 s; a kill takes nothing that was written.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paceline.data.writer import settle

Key = tuple[int, int]  # line of the prompt, which of its completions
Record = dict[str, Any]  # line, copy, over: nothing follows; rows, and left_out: why something is not among them

_SYNC_S = 10.0


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    length: int
    over: bool


class ShardLog:
    """An open log: what each key's last record is, on disk; the keys alone are in memory."""

    def __init__(self, path: Path) -> None:
        """Open or begin the log; `finished` counts keys that are over, `damaged` lines that could not be used."""
        self.path = path
        self.damaged = self.finished = 0
        self._places: dict[Key, _Place] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            self._end = self._recover()
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise
        self._synced = time.monotonic()

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def is_over(self, key: Key) -> bool:
        """Return whether the key's last record says that nothing follows."""
        return key in self._places and self._places[key].over

    def ordered(self) -> list[Key]:
        """Return the keys in order."""
        return sorted(self._places)

    def read(self, key: Key) -> Record:
        """Return the key's last record."""
        place = self._places[key]
        return cast(Record, json.loads(os.pread(self._file, place.length, place.start)[9:]))

    def append(self, record: Record) -> None:
        """Write a record; after an error it is not in the log.

        Raises:
            OSError: the disk is full or broken.
        """
        line = _line(record)
        written = 0
        while written < len(line):  # a disk that fills up takes a part first, which the next record covers
            written += os.pwrite(self._file, line[written:], self._end + written)
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._file)
            self._synced = time.monotonic()
        self._note(record, self._end, len(line))
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _note(self, record: Record, start: int, length: int) -> None:
        key, over = (record["line"], record["copy"]), bool(record["over"])
        self.finished += over - self.is_over(key)
        self._places[key] = _Place(start, length, over)

    def _recover(self) -> int:
        """Note all records that are whole; return where the last whole line ends."""
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = _record(line)
                if record is None:
                    self.damaged += 1
                else:
                    self._note(record, end, len(line))
                end += len(line)
        return end


def write_log(path: Path, records: Iterable[Record]) -> None:
    """Write a log whole: it is there with all records or not at all."""
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        for record in records:
            file.write(_line(record))
    settle(aside, path)


def json_line(row: Any) -> bytes:
    """Return a row as a line of JSON."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, in something that no template shows
        return json.dumps(row).encode() + b"\n"


def json_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file of JSON lines."""
    with path.open("rb") as file:
        yield from map(json.loads, file)


def _line(record: Record) -> bytes:
    body = json_line(record)
    return b"%08x %s" % (zlib.crc32(body), body)


def _record(line: bytes) -> Record | None:
    body = line[9:]
    try:
        whole = line[8:9] == b" " and int(line[:8], 16) == zlib.crc32(body)
        record = json.loads(body) if whole else None
    except (ValueError, RecursionError):
        return None
    return record if _is_record(record) else None


def _is_record(value: Any) -> bool:
    """Return whether a value has what every record has."""
    return (
        isinstance(value, dict)
        and type(value.get("line")) is int
        and type(value.get("copy")) is int
        and isinstance(value.get("over"), bool)
        and isinstance(value.get("rows"), list)
        and all(isinstance(row, dict) for row in value["rows"])
        and isinstance(value.get("left_out", 0), dict | None)
    )
