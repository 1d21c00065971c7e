"""Input files as streams of raw rows: JSON lines, Parquet, and folders saved by `datasets`.

A file that cannot be read stops the command; a row is passed on as it is and judged elsewhere (rows.py). Memory is
bounded by one line or one record batch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.records import UserError

_PARQUET_ROWS = 256
_PIECE = 1 << 20  # bytes hashed at a time


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file, as the manifest records it."""

    path: str
    sha256: str
    rows: int


def find_files(sources: Iterable[Path]) -> list[Path]:
    """Return the files behind the sources: a folder stands for its Arrow files.

    Raises:
        UserError: a source is missing or of an unknown kind.
    """
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            files += _arrow_files(source)
        elif not source.exists():
            raise UserError(f"There is no input file {source}. Give a JSONL or Parquet file, or a datasets folder.")
        elif source.suffix in (".jsonl", ".parquet"):
            files.append(source)
        else:
            raise UserError(
                f"Input {source} must end in .jsonl or .parquet or be a datasets folder, got {source.suffix!r}."
            )
    return files


def inspect_file(path: Path) -> SourceFile:
    """Return the file's checksum and how many rows it holds.

    Raises:
        UserError: the file cannot be read.
    """
    digest = hashlib.sha256()
    newlines, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                newlines += piece.count(b"\n")
                last = piece[-1:]
        if path.suffix == ".parquet":
            rows = pq.ParquetFile(path).metadata.num_rows
        elif path.suffix == ".arrow":
            with pa.memory_map(str(path)) as stream:
                rows = sum(batch.num_rows for batch in pa.ipc.open_stream(stream))
        else:
            rows = newlines + (last != b"\n")
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return SourceFile(path=str(path), sha256=digest.hexdigest(), rows=rows)


def read_rows(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield each row with its line (or row number) from 1: a line of JSON as text, a table's row as an object.

    Raises:
        UserError: the file cannot be read or is not UTF-8.
    """
    try:
        yield from enumerate(_json_lines(path) if path.suffix == ".jsonl" else _table_rows(path), 1)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _json_lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number} is not UTF-8 (byte 0x{line[error.start]:02x}). Convert the file to UTF-8."
                ) from None


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        for batch in pq.ParquetFile(path).iter_batches(batch_size=_PARQUET_ROWS):
            yield from map(_without_nulls, batch.to_pylist())
        return
    with pa.memory_map(str(path)) as stream:
        for batch in pa.ipc.open_stream(stream):
            for start in range(0, batch.num_rows, _PARQUET_ROWS):
                yield from map(_without_nulls, batch.slice(start, _PARQUET_ROWS).to_pylist())


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null: a table gives every object every key that any of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value] if value and isinstance(value[0], dict) else value
    return value


def _arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / item["filename"] for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"Folder {folder} has no readable state.json, so it is not one that `datasets` saved (one split, "
            "save_to_disk). Give its files one by one, or save it again."
        ) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Check the file.")
