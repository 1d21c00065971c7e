"""Input files as pieces of raw rows: JSON lines, Parquet, Arrow files and folders of them.

A file is looked at once: checksum, rows, and where it is cut into pieces, which are tokenized independently and in any
order. The cut follows from the file alone, so it is the same on every machine. A file that cannot be read, or that
changes meanwhile, stops the command; a row is passed on as it is and judged elsewhere (rows.py). Lines without anything
but blanks are no rows. Memory is bounded by one line or one record batch.
"""

import hashlib
import itertools
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.folders import SUFFIXES, files_of
from paceline.data.tables import COLUMNS, TableRow, objects
from paceline.records import UserError

_TABLE_ROWS = 256  # rows of a table that are Python objects at a time
_READ = 1 << 20  # bytes
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_PIECES = 32  # a file is cut into about this many pieces,
_SMALLEST, _LARGEST = 4 << 20, 64 << 20  # but a piece has at least and at most so many bytes

Row = bytes | TableRow


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive rows of an input file."""

    path: str
    start: int  # first byte of JSON lines, first row of a table
    end: int  # behind the last
    first_line: int  # from 1
    rows: int  # blank lines included
    sha256: str  # of what is in it


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file, as the manifest records it, and its pieces."""

    path: str
    sha256: str
    rows: int  # blank lines included
    pieces: tuple[Piece, ...]


def find_files(sources: Iterable[Path]) -> list[Path]:
    """Return the files behind the sources: a folder stands for the JSONL, Parquet and Arrow files in it, by name.

    Raises:
        UserError: a source is missing, empty, given twice or of an unknown kind, or a folder holds other data too.
    """
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            files += files_of(source)
        elif source.exists() and source.suffix.lower() not in SUFFIXES:
            raise UserError(
                f"Input {source} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} or be a folder, "
                f"got {source.suffix!r}."
            )
        else:
            files.append(source)
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        _check_file(file)
        status = file.stat()
        if (other := seen.setdefault((status.st_dev, status.st_ino), file)) is not file:
            raise UserError(f"An input must be given once, got {other} and {file}, which are one file. Leave one out.")
    return files


def inspect_file(path: Path) -> SourceFile:
    """Return the file's checksum, how many lines or rows it holds and its pieces.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        step = min(max(size // _PIECES, _SMALLEST), _LARGEST)
        if path.suffix.lower() == ".jsonl":
            return _inspect_lines(path, step)
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return _inspect_table(path, checksum, size // step)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line (or row number) from 1: a line of JSON as bytes, a table's row as an object.

    Raises:
        UserError: the file cannot be read, or is not what it was when it was inspected; the latter after the last row.
    """
    path = Path(piece.path)
    try:
        yield from _json_lines(path, piece) if path.suffix.lower() == ".jsonl" else _table_rows(path, piece)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _inspect_lines(path: Path, step: int) -> SourceFile:
    whole = hashlib.sha256()
    pieces: list[Piece] = []
    rows = 0
    with path.open("rb") as file:
        while True:
            start, first_line = file.tell(), rows + 1
            part = hashlib.sha256()
            left, newlines, last = step, 0, b"\n"
            while left > 0 and (block := file.read(min(_READ, left))):
                left -= len(block)
                newlines += block.count(b"\n")
                last = block[-1:]
                part.update(block)
                whole.update(block)
            if last != b"\n":  # the piece ends with its line
                rest = file.readline()
                newlines += rest.endswith(b"\n")
                last = rest[-1:] or last
                part.update(rest)
                whole.update(rest)
            end = file.tell()
            if end == start:
                break
            rows += newlines + (last != b"\n")
            pieces.append(Piece(str(path), start, end, first_line, rows + 1 - first_line, part.hexdigest()))
    return SourceFile(str(path), whole.hexdigest(), rows, tuple(pieces))


def _inspect_table(path: Path, checksum: str, pieces: int) -> SourceFile:
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as parquet:
            sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    else:
        sizes = [batch.num_rows for batch in _batches(path)]
    ends = np.cumsum([0, *sizes])
    # A piece inside a group decodes the group from its start, so that no group may have any number of them.
    cuts = _cuts(ends, max(1, min(pieces, _PIECES * len(sizes))))
    parts = tuple(
        Piece(str(path), start, end, start + 1, end - start, f"{checksum}[{start}:{end}]")
        for start, end in itertools.pairwise(cuts)
    )
    return SourceFile(str(path), checksum, int(ends[-1]), parts)


def _cuts(ends: np.ndarray, pieces: int) -> list[int]:
    """Return where a table is cut: where a group of rows ends if that is near, so that few are decoded twice."""
    rows = int(ends[-1])
    cuts = {0, rows}
    for cut in np.linspace(0, rows, pieces + 1)[1:-1]:
        end = int(ends[np.searchsorted(ends, cut)])
        cuts.add(end if end - cut <= rows / pieces / 2 else int(cut))
    return sorted(cuts)


def _json_lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    digest = hashlib.sha256()
    number, left = piece.first_line, piece.end - piece.start
    with path.open("rb") as file:
        file.seek(piece.start)
        while left > 0 and (line := file.readline()):  # nothing comes from a file that was cut meanwhile
            digest.update(line)
            left -= len(line)
            if not line.isspace():
                yield number, line
            number += 1
    if digest.hexdigest() != piece.sha256:
        raise _changed(piece)


def _table_rows(path: Path, piece: Piece) -> Iterator[tuple[int, TableRow]]:
    number = piece.first_line
    parquet = path.suffix.lower() == ".parquet"
    columns = pq.read_schema(path).names if parquet else None
    for batch in _parquet_batches(path, piece) if parquet else _part(_batches(path), 0, piece):
        for start in range(0, batch.num_rows, _TABLE_ROWS):
            rows = batch.slice(start, _TABLE_ROWS)
            yield from enumerate(objects(rows, columns or rows.schema.names), number)
            number += rows.num_rows
    if number - piece.first_line != piece.rows:
        raise _changed(piece)


def _parquet_batches(path: Path, piece: Piece) -> Iterator[pa.RecordBatch]:
    # Columns are read as they are decoded; by default a whole group is read first.
    with pq.ParquetFile(path, buffer_size=_READ, pre_buffer=False) as parquet:
        used = [name for name in parquet.schema_arrow.names if name in COLUMNS]
        at = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if at < piece.end and piece.start < at + rows:
                batches = parquet.iter_batches(batch_size=_TABLE_ROWS, row_groups=[group], columns=used)
                yield from _part(batches, at, piece)
            at += rows


def _part(batches: Iterable[pa.RecordBatch], at: int, piece: Piece) -> Iterator[pa.RecordBatch]:
    """Yield what lies in the piece of successive batches, the first of which begins at row `at`."""
    for batch in batches:
        start, stop = max(piece.start - at, 0), min(piece.end - at, batch.num_rows)
        if start < stop:
            yield batch.slice(start, stop - start)
        at += batch.num_rows
        if at >= piece.end:
            return


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield an Arrow file's record batches, views of the mapped file."""
    if path.stat().st_size == 0:  # which cannot be mapped
        raise pa.ArrowInvalid("it is empty")
    # Not pa.memory_map, which asks the system to read ahead every record batch, wanted or not.
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    stream = pa.BufferReader(pa.py_buffer(mapped))
    if mapped[:6] == b"ARROW1":
        reader = pa.ipc.open_file(stream)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(stream)
        _check_end(path, mapped)


def _check_end(path: Path, stream: mmap.mmap) -> None:
    """Refuse a stream without its end: one that was cut between two batches reads as a whole one."""
    mark = _STREAM_END if stream[:4] == _STREAM_END[:4] else _STREAM_END[4:]  # up to Arrow 0.14 zeros alone
    if stream[-len(mark) :] != mark:
        raise UserError(
            f"An Arrow stream must end with its end-of-stream mark, and {path} does not, so it may have lost rows. "
            "Write it again with the stream closed."
        )


def _check_file(path: Path) -> None:
    if not path.exists():
        raise UserError(f"There is no input file {path}. Give a JSONL, Parquet or Arrow file, or a folder of them.")
    if not path.is_file():  # a pipe cannot be read twice, a device has no end
        raise UserError(f"Input {path} must be a regular file, got a pipe or a device. Write its rows to a file.")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"The name of input {str(path)!a} must be UTF-8, and is not. Rename it.") from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Check the file.")


def _changed(piece: Piece) -> UserError:
    last = piece.first_line + piece.rows - 1
    return UserError(
        f"{piece.path} changed while it was read (rows {piece.first_line:,} to {last:,}); run the command again."
    )
