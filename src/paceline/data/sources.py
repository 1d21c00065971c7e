"""Input files as pieces of raw rows: JSON lines, Parquet, Arrow files and folders of them.

A file is looked at once: checksum, rows, and where it is cut into pieces, which are tokenized independently and in any
order. The cut follows from the file alone, so it is the same on every machine. A file that cannot be read stops the
command; a row is passed on as it is and judged elsewhere (rows.py). Memory is bounded by one line or one record batch.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.data.store import arrow_files
from paceline.records import UserError

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_TABLE_ROWS = 256  # rows of a table that are Python objects at a time
_READ = 1 << 20  # bytes
_PIECES = 32  # a file is cut into about this many pieces,
_SMALLEST, _LARGEST = 4 << 20, 64 << 20  # but a piece has at least and at most so many bytes

Row = bytes | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some successive rows of an input file."""

    path: str
    start: int  # first byte of JSON lines, first row of a table
    end: int  # behind the last
    first_line: int  # from 1
    rows: int
    sha256: str  # of what is in it


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file, as the manifest records it, and its pieces."""

    path: str
    sha256: str
    rows: int
    pieces: tuple[Piece, ...]


def find_files(sources: Iterable[Path]) -> list[Path]:
    """Return the files behind the sources: a folder stands for its Arrow, Parquet or JSONL files.

    Raises:
        UserError: a source is missing, of an unknown kind or empty.
    """
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            files += _files_of(source)
        elif not source.exists():
            raise UserError(
                f"There is no input file {source}. Give a JSONL, Parquet or Arrow file, or a folder of them."
            )
        elif source.suffix in SUFFIXES:
            files.append(source)
        else:
            raise UserError(
                f"Input {source} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} or be a folder, "
                f"got {source.suffix!r}."
            )
    return files


def inspect_file(path: Path) -> SourceFile:
    """Return the file's checksum, how many rows it holds and its pieces.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        step = min(max(size // _PIECES, _SMALLEST), _LARGEST)
        if path.suffix == ".jsonl":
            return _inspect_lines(path, step)
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return _inspect_table(path, checksum, max(1, size // step))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_rows(piece: Piece) -> Iterator[tuple[int, Row]]:
    """Yield each row with its line (or row number) from 1: a line of JSON as bytes, a table's row as an object.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(piece.path)
    try:
        rows: Iterator[Row] = _json_lines(path, piece) if path.suffix == ".jsonl" else _table_rows(path, piece)
        yield from enumerate(rows, piece.first_line)
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
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    else:
        sizes = [batch.num_rows for batch in _batches(path)]
    ends = np.cumsum([0, *sizes])  # a piece is cut where a group of rows is, so that none is decoded twice
    wanted = np.linspace(0, ends[-1], pieces + 1)
    cuts = sorted({int(ends[np.searchsorted(ends, cut)]) for cut in wanted})
    parts = tuple(
        Piece(str(path), start, end, start + 1, end - start, f"{checksum}[{start}:{end}]")
        for start, end in itertools.pairwise(cuts)
    )
    return SourceFile(str(path), checksum, int(ends[-1]), parts)


def _json_lines(path: Path, piece: Piece) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(piece.start)
        while file.tell() < piece.end:
            yield file.readline()


def _table_rows(path: Path, piece: Piece) -> Iterator[dict[str, Any]]:
    batches = _parquet_batches(path, piece) if path.suffix == ".parquet" else _arrow_batches(path, piece)
    for batch in batches:
        for start in range(0, batch.num_rows, _TABLE_ROWS):
            yield from _objects(batch.slice(start, _TABLE_ROWS))


def _parquet_batches(path: Path, piece: Piece) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as parquet:
        at = 0
        for group in range(parquet.num_row_groups):
            if piece.start <= at < piece.end:
                yield from parquet.iter_batches(batch_size=_TABLE_ROWS, row_groups=[group])
            at += parquet.metadata.row_group(group).num_rows


def _arrow_batches(path: Path, piece: Piece) -> Iterator[pa.RecordBatch]:
    at = 0
    for batch in _batches(path):
        if piece.start <= at < piece.end:
            yield batch
        at += batch.num_rows


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield an Arrow file's record batches, one mapped at a time."""
    with pa.memory_map(str(path)) as stream:
        if stream.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(stream)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            stream.seek(0)
            yield from pa.ipc.open_stream(stream)


def _objects(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield rows as objects; lists of numbers or truth values stay arrays, without a Python object a number."""
    columns = [_values(column) for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield {name: value for name, value in zip(batch.schema.names, values, strict=True) if value is not None}


def _values(column: pa.Array) -> Sequence[Any]:
    kind = column.type
    numbers = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    )
    if not numbers or column.null_count or column.flatten().null_count:
        return [_without_nulls(value) for value in column.to_pylist()]
    flat = column.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(column.value_lengths().to_numpy())
    return np.split(flat, ends[:-1]) if len(column) else []


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null: a table gives every object every key that any of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value] if value and isinstance(value[0], dict) else value
    return value


def _files_of(folder: Path) -> list[Path]:
    files = arrow_files(folder)
    for suffix in SUFFIXES:
        files = files or sorted(folder.glob(f"*{suffix}"))
    if not files:
        raise UserError(
            f"Folder {folder} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} files. Give files, or a folder "
            "that `datasets` saved (one split, save_to_disk)."
        )
    return files


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Check the file.")
