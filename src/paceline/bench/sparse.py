"""Datasets of full apparent size on little disk: the ids are zero and the file system keeps no pages for them.

Everything that opening and planning read is real: rows, offsets, record batches, shards and the manifest; where rows
are to be read, masks too, at a bit a token. Checksums are made up unless asked for: they take longer to compute than
all the rest, and only training compares them.

Shapes: N rows, n rows of a record batch.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from paceline.data.manifest import Manifest, Origin
from paceline.data.store import SCHEMA
from paceline.data.writer import ShardFacts, seal, shard_name

_HOLE = 4096  # bytes: shorter runs of zeros are written
_BATCH_TOKENS = 1 << 21  # of a record batch, as the writer of datasets makes them
_SHARD_ROWS = 65_536
ORIGIN = Origin("none", "none", "none", None, "none", None, [], {}, 0)


class SparseFile:
    """A file to write to, front to back, that leaves a hole where it is given nothing but zeros."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Append the bytes."""
        piece = np.frombuffer(data, dtype=np.uint8)
        if len(piece) >= _HOLE and not piece.any():
            self._file.seek(len(piece), 1)
        else:
            self._file.write(data)
        self._size += len(piece)
        return len(piece)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._file.flush()

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._size

    def close(self) -> None:
        """Give the file its full size, also where it ends with a hole."""
        if not self.closed:
            self.closed = True
            self._file.truncate(self._size)
            self._file.close()

    def __enter__(self) -> "SparseFile":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SparseSize:
    """What a sparse dataset seems to take and what it takes."""

    apparent_bytes: int
    disk_bytes: int


def write_sparse_dataset(
    folder: Path, lengths_N: Int[np.ndarray, " N"], *, masks: bool = False, trainable: Origin | None = None
) -> tuple[Manifest, SparseSize]:
    """Write a dataset with rows of these lengths, all of whose ids are zero; the folder is made.

    With `masks`, each row's last tokens are supervised, as many as its candidates need; else none is. With
    `trainable`, where it says that it comes from, checksums are real, as a run that trains on it wants them.
    """
    folder.mkdir(parents=True)
    parts = [lengths_N[at : at + _SHARD_ROWS] for at in range(0, len(lengths_N), _SHARD_ROWS)]
    shards = []
    for index, part in enumerate(parts):
        name = shard_name(index, len(parts))
        with SparseFile(folder / name) as sink, pa.ipc.new_stream(pa.PythonFile(sink, "w"), SCHEMA) as stream:
            for batch in _batches(part, masks):
                stream.write_batch(batch)
        shards.append((name, _facts(folder / name, part, checksums=trainable is not None)))
    files = [(folder / name).stat() for name, _ in shards]
    size = SparseSize(sum(file.st_size for file in files), sum(file.st_blocks for file in files) * 512)
    return seal(folder, shards, trainable or ORIGIN), size


def _batches(lengths_N: Int[np.ndarray, " N"], masks: bool) -> Iterator[pa.RecordBatch]:
    longest = _BATCH_TOKENS + int(lengths_N.max())
    ids = pa.array(np.zeros(longest, dtype=np.int32))  # all batches share these zeros
    unmarked = pa.Array.from_buffers(pa.bool_(), longest, [None, pa.py_buffer(bytes(longest // 8 + 1))])
    batch_N = np.cumsum(lengths_N, dtype=np.int64) // _BATCH_TOKENS
    line = 1
    for length_n in np.split(lengths_N, np.flatnonzero(np.diff(batch_N)) + 1):
        offsets = pa.array(np.concatenate([[0], np.cumsum(length_n)]).astype(np.int32))
        tokens, candidates_n = int(length_n.sum()), np.maximum(length_n // 2, 1)
        marks = _marks(length_n, candidates_n) if masks else unmarked[:tokens]
        columns = [
            pa.ListArray.from_arrays(offsets, ids[:tokens]),
            pa.ListArray.from_arrays(offsets, marks),
            pa.array(candidates_n, pa.int32()),
            pa.array(np.zeros(len(length_n), dtype=np.int32)),
            pa.array(np.arange(line, line + len(length_n), dtype=np.int32)),
            pa.array(np.zeros(len(length_n), dtype=np.int32)),
        ]
        line += len(length_n)
        yield pa.record_batch(columns, schema=SCHEMA)


def _marks(length_n: Int[np.ndarray, " n"], candidates_n: Int[np.ndarray, " n"]) -> pa.Array:
    """Return the masks of rows end to end, in which each one's last tokens are supervised."""
    ends = np.cumsum(length_n)
    turns_T = np.zeros(int(ends[-1]) + 1, dtype=np.int8)
    turns_T[ends - candidates_n - 1] += 1
    turns_T[ends] -= 1
    return pa.array(np.cumsum(turns_T[:-1], dtype=np.int8).view(np.bool_))


def _facts(path: Path, lengths_N: Int[np.ndarray, " N"], *, checksums: bool) -> ShardFacts:
    sha256 = "0" * 64
    if checksums:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardFacts(
        rows=len(lengths_N),
        tokens=int(lengths_N.sum(dtype=np.int64)),
        supervised_tokens=0,
        longest=int(lengths_N.max()),
        largest_id=0,
        digest=path.name,
        bytes=path.stat().st_size,
        sha256=sha256,
    )
