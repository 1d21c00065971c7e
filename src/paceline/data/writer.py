"""Writing datasets: shards of rows in bounded pieces, then the folder in one rename.

Shapes: S tokens of a row.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from paceline.checkpoint.folder import whole_folder
from paceline.data.manifest import NAME, VERSION, Manifest, Origin, Shard, save_manifest
from paceline.data.store import SCHEMA
from paceline.records import RunError, UserError

_OTHER_FILES = {NAME, "state.json", "dataset_info.json"}
# What is held in memory while writing, at most; it becomes a record batch, so also a chunk when reading.
_FLUSH_TOKENS, _FLUSH_ROWS = 1 << 21, 1 << 13


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a finished shard holds."""

    rows: int
    tokens: int
    supervised_tokens: int
    longest: int
    largest_id: int
    digest: str  # of the rows
    bytes: int
    sha256: str  # of the file


class ShardWriter:
    """Takes rows one by one and writes a record batch whenever enough tokens have come together."""

    def __init__(self, path: Path) -> None:
        """Open the file."""
        self.path = path
        self.rows = self.tokens = self.supervised = self.longest = 0
        self.largest_id = -1
        self._digest = hashlib.sha256()
        self._waiting: list[tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"], tuple[int, ...]]] = []
        self._waiting_tokens = 0
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, SCHEMA)

    def add(
        self,
        input_ids: Int[np.ndarray, " S"],
        loss_mask: Bool[np.ndarray, " S"],
        candidates: int,
        *,
        source: int = 0,
        line: int = 0,
        tokens_cut: int = 0,
    ) -> None:
        """Append a row; `source` and `line` say which input it came from, `tokens_cut` what truncation took."""
        ids_S = np.ascontiguousarray(input_ids, dtype=np.int32)
        self._digest.update(len(ids_S).to_bytes(8, "little"))
        self._digest.update(ids_S.data)
        self._digest.update(np.packbits(loss_mask).data)
        self._waiting.append((ids_S, loss_mask, (candidates, source, line, tokens_cut)))
        self._waiting_tokens += len(ids_S)
        self.rows += 1
        self.tokens += len(ids_S)
        self.supervised += int(np.count_nonzero(loss_mask))
        self.longest = max(self.longest, len(ids_S))
        self.largest_id = max(self.largest_id, int(ids_S.max(initial=-1)))
        if self._waiting_tokens >= _FLUSH_TOKENS or len(self._waiting) >= _FLUSH_ROWS:
            self._flush()

    def finish(self) -> ShardFacts:
        """Write what is left and close the file."""
        if self._waiting:
            self._flush()
        self.close()
        with self.path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return ShardFacts(
            rows=self.rows,
            tokens=self.tokens,
            supervised_tokens=self.supervised,
            longest=self.longest,
            largest_id=self.largest_id,
            digest=self._digest.hexdigest(),
            bytes=self.path.stat().st_size,
            sha256=checksum,
        )

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if not self._file.closed:
            self._stream.close()
            self._file.close()

    def _flush(self) -> None:
        ids, masks, numbers = zip(*self._waiting, strict=True)
        offsets = pa.array(np.cumsum([0, *map(len, ids)]), pa.int32())
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ids))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))),
            *(pa.array(column, pa.int32()) for column in zip(*numbers, strict=True)),
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._waiting, self._waiting_tokens = [], 0


class DatasetWriter(ShardWriter):
    """A dataset of one shard, written row by row."""

    def __init__(self, folder: Path) -> None:
        """Open the data file in a folder that exists."""
        super().__init__(folder / shard_name(0, 1))

    def complete(self, origin: Origin) -> Manifest:
        """Write what is left and everything beside the data."""
        return seal(self.path.parent, [(self.path.name, self.finish())], origin)


def settle(aside: Path, place: Path) -> None:
    """Give a finished file its name once it is on the disk: no power loss leaves the name without the content."""
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.rename(place)


def shard_name(index: int, count: int) -> str:
    """Return the name of a shard, as `datasets` names them."""
    return f"data-{index:05d}-of-{count:05d}.arrow"


def seal(folder: Path, shards: Sequence[tuple[str, ShardFacts]], origin: Origin) -> Manifest:
    """Write manifest and `datasets`' own files beside finished shards and return the manifest."""
    facts = [fact for _, fact in shards]
    fingerprint = hashlib.sha256("".join(fact.digest for fact in facts).encode()).hexdigest()
    manifest = Manifest(
        VERSION,
        rows=sum(fact.rows for fact in facts),
        tokens=sum(fact.tokens for fact in facts),
        supervised_tokens=sum(fact.supervised_tokens for fact in facts),
        longest=max((fact.longest for fact in facts), default=0),
        largest_id=max((fact.largest_id for fact in facts), default=-1),
        fingerprint=fingerprint,
        shards=tuple(Shard(name, fact.rows, fact.tokens, fact.bytes, fact.sha256) for name, fact in shards),
        origin=origin,
    )
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name, _ in shards],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}\n", encoding="utf-8")
    save_manifest(folder, manifest)
    return manifest


def check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is at the place.

    Raises:
        UserError: something is there and `overwrite` is off, or it is no dataset.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / NAME).is_file():
        raise UserError(f"{folder} exists and is not a dataset, so it is never replaced. Choose another place.")
    shards = {path.name for path in folder.glob("data-?????-of-?????.arrow")}
    others = sorted({path.name for path in folder.iterdir()} - _OTHER_FILES - shards)
    if others:
        raise UserError(
            f"{folder} holds more than a dataset ({others[0]}), so it is never replaced. Choose another place."
        )
    if not overwrite:
        raise UserError(f"There is a dataset at {folder} already. Choose another place or ask to overwrite it.")


@contextmanager
def placing(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to fill that becomes the dataset `folder` when the block ends; after an error nothing is left.

    Raises:
        UserError: see check_place, or the place cannot be written to.
        RunError: the disk is full or broken.
    """
    check_place(folder, overwrite=overwrite)
    try:
        with whole_folder(folder) as aside:
            yield aside
            assert (aside / NAME).is_file(), "a dataset was not sealed"
    except OSError as error:
        raise cannot_write(folder, error) from None


@contextmanager
def writing(folder: Path, *, overwrite: bool = False) -> Iterator[DatasetWriter]:
    """Yield a writer whose rows become the dataset `folder` when the block ends after `complete`.

    Raises:
        UserError, RunError: see placing.
    """
    with placing(folder, overwrite=overwrite) as aside:
        writer = DatasetWriter(aside)
        try:
            yield writer
        finally:
            writer.close()


def cannot_write(folder: Path, error: OSError) -> RunError | UserError:
    """Return the sentence for a dataset that cannot be written."""
    kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
    return kind(f"Dataset {folder} cannot be written: {error}. Check the place and its free space.")
