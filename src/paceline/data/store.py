"""The dataset of tokenized completions, mapped into memory: an Arrow folder that `datasets` opens too.

Lengths come from Arrow's list offsets, and a row is touched only when it is asked for. A folder of Arrow files that
somebody else wrote (`datasets.save_to_disk`, plain shards) opens as well if it has the columns; without a manifest
nobody vouches for its tokenizer, so it can be planned but not trained on. writer.py writes datasets.

Shapes: N rows, S tokens of a row, T tokens of rows that lie end to end.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from paceline.data.arrays import joined
from paceline.data.chunks import Chunks, Views
from paceline.data.columns import (
    NEEDED,
    check_candidates,
    check_columns,
    check_ends,
    check_rows,
    ends_of,
    one_line,
)
from paceline.data.manifest import NAME, Manifest, Origin, Shard, check_file_name, load_manifest
from paceline.data.parquet import as_arrow
from paceline.records import UserError, many

# `source` and `line` lead from a row back to the input it came from; `tokens_cut` is what truncation took from it.
SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("candidates", pa.int32()),
        ("source", pa.int32()),
        ("line", pa.int32()),
        ("tokens_cut", pa.int32()),
    ]
)
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class CompletionDataset:
    """A dataset mapped into memory. Reading rows from several threads at once is safe: nothing in it changes."""

    def __init__(self, folder: Path, manifest: Manifest, tables: Iterable[pa.Table]) -> None:
        """Keep where the rows of the mapped tables lie; none is read, and no table is held longer than its turn."""
        self.folder = folder
        self.manifest = manifest
        self._chunks = Chunks()
        self._given = Views()  # candidates, by chunk
        self._counted: Int[np.ndarray, " N"] | None = None  # where nobody gave them
        self._supervised: int | None = None
        for table in tables:
            self._chunks.add(table)
            if manifest.version:  # in somebody else's file a column of that name may be anything
                self._given.extend(table.column("candidates"))
            del table  # before the next one is opened
        if not manifest.version:
            counted = list(self._chunks.counts())
            self._counted = joined(lambda: (part for _, part in counted))
            self._supervised = sum(int(part.sum()) for part, _ in counted)

    def __len__(self) -> int:
        return self._chunks.first_row[-1]

    @property
    def lengths(self) -> Int[np.ndarray, " N"]:
        """Tokens of each row, put together anew from the mapped files, so that nobody holds them without need."""
        return joined(self.length_parts, np.int32)

    @property
    def candidates(self) -> Int[np.ndarray, " N"]:
        """How many positions of each row may be anchors (blocks.anchor_candidates), put together anew as well."""
        return joined(self.candidate_parts, np.int32)

    def length_parts(self) -> Iterator[Int[np.ndarray, " n"]]:
        """Yield `lengths` in parts."""
        return (np.diff(ends) for ends in self._chunks.ends)

    def candidate_parts(self) -> Iterator[Int[np.ndarray, " n"]]:
        """Yield `candidates` in parts."""
        return iter(self._given if self._counted is None else [self._counted])

    def candidates_of(self, rows_n: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return `candidates` of these rows."""
        return self._given.take(*self._chunks.find(rows_n)) if self._counted is None else self._counted[rows_n]

    @property
    def fingerprint(self) -> str:
        """Hash of the rows, as written."""
        return self.manifest.fingerprint

    def row(self, index: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return a read-only view of a row's ids and a copy of its loss mask."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)}")
        return self._chunks.row(index)

    def chunks(self) -> Iterator[tuple[int, Int[np.ndarray, " tokens"], Int[np.ndarray, " ends"]]]:
        """Yield (first row, ids of all its rows, their ends from 0) for each piece that lies together in memory."""
        held = self._chunks
        for first, ids, ends in zip(held.first_row, held.ids, held.ends, strict=False):
            yield first, ids[ends[0] : ends[-1]], ends - ends[0]

    def supervised(self) -> int:
        """Return how many tokens are learnt from; reads every mask unless opening has."""
        if self._supervised is None:
            return sum(int(part.sum()) for part, _ in self._chunks.counts())
        return self._supervised


def open_dataset(folder: Path) -> CompletionDataset:
    """Return the dataset in a folder; a folder of Arrow or Parquet files without a manifest is counted first.

    Raises:
        UserError: the folder holds no dataset, or a damaged one.
    """
    if (folder / NAME).is_file():
        manifest = load_manifest(folder)
        dataset = CompletionDataset(folder, manifest, (_open_shard(folder, shard) for shard in manifest.shards))
        longest = max((int(part.max()) for part in dataset.length_parts()), default=0)
        if longest != manifest.longest:
            raise UserError(
                f"The longest row of dataset {folder} has {longest:,} tokens, its manifest says {manifest.longest:,}. "
                "Prepare it again."
            )
        return dataset
    files = arrow_files(folder) or [as_arrow(path) for path in sorted(folder.glob("*.parquet"))]
    if not files:
        load_manifest(folder)  # raises: what a dataset without one lacks is said there
    dataset = CompletionDataset(folder, _no_manifest(), (_open_foreign(path) for path in files))
    dataset.manifest = _counted(dataset, files)
    return dataset


def arrow_files(folder: Path) -> list[Path]:
    """Return a folder's Arrow files in order: those its state.json lists (`datasets`), else all of them.

    Raises:
        UserError: the folder is a DatasetDict of several splits, or its state.json cannot be understood.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise UserError(
            f"{folder} holds the splits {', '.join(splits)} and not one dataset. Give one of them, {folder}/SPLIT."
        )
    if not (folder / "state.json").is_file():
        return sorted(folder.glob("*.arrow"))
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [item["filename"] for item in state["_data_files"]]
        for name in names:
            check_file_name(name)
        return [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"Folder {folder} has no readable state.json, so it is not one that `datasets` saved (one split, "
            "save_to_disk). Give its files one by one, or save it again."
        ) from None


def map_file(path: Path) -> pa.Table:
    """Return an Arrow file, of the stream or the file format, mapped into memory.

    Raises:
        UserError: the file is missing, cut or no Arrow file.
    """
    try:
        # Not pa.memory_map, which asks the system to read ahead every record batch: 10 GB of a cold disk.
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _advise(mapped, mmap.MADV_RANDOM)  # else each batch's header may bring megabytes of the ids behind it along
        whole = pa.py_buffer(mapped)
        new = pa.ipc.open_file if mapped[:6] == b"ARROW1" else pa.ipc.open_stream
        table = new(pa.BufferReader(whole)).read_all()
        _read_ahead(mapped, whole.address, table)
        _advise(mapped, mmap.MADV_NORMAL)  # reading from front to back is many times as fast with reading ahead
        return table
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: an empty file cannot be mapped
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be opened as an Arrow file: {reason}. Write it again.") from None


def find_token(dataset: CompletionDataset, token_id: int) -> int | None:
    """Return the first row that holds the token, or None; reads every id once."""
    for first, ids, ends in dataset.chunks():
        hits = np.flatnonzero(ids == token_id)
        if len(hits):
            return first + int(np.searchsorted(ends, hits[0], side="right")) - 1
    return None


def _open_shard(folder: Path, shard: Shard) -> pa.Table:
    path = folder / shard.file
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(size - len(_END_OF_STREAM), 0))
            whole = file.read() == _END_OF_STREAM
    except OSError as error:
        raise UserError(f"Shard {path} cannot be read: {error.strerror}. Prepare the dataset again.") from None
    if size != shard.bytes or not whole:
        raise UserError(
            f"Shard {path} must have the {shard.bytes:,} bytes that the manifest lists and end as an Arrow stream, it "
            f"has {size:,}: it was cut or replaced. Copy it anew or prepare the dataset again."
        )
    table = map_file(path)
    if not table.schema.equals(SCHEMA):
        raise UserError(f"Shard {path} must have the columns {one_line(SCHEMA)}, got {one_line(table.schema)}.")
    if table.num_rows != shard.rows:
        raise UserError(
            f"Shard {path} holds {many(table.num_rows, 'row')}, the manifest says {shard.rows:,}. Prepare again."
        )
    advice = f"Look at it with `paceline prepare {folder} --verify`."
    check_ends(path, table, advice)
    check_candidates(path, table, advice)
    tokens = sum(int(ends[-1] - ends[0]) for ends in ends_of(table, "input_ids"))
    if tokens != shard.tokens:
        raise UserError(
            f"Shard {path} holds {many(tokens, 'token')}, the manifest says {shard.tokens:,}. Prepare again."
        )
    return table


def _open_foreign(path: Path) -> pa.Table:
    table = map_file(path)
    check_columns(path, table)
    check_ends(path, table, "Write it again.")
    check_rows(path, table)
    return table


def _read_ahead(mapped: mmap.mmap, address: int, table: pa.Table) -> None:
    """Ask for what opening looks at, all at once: the ends of rows and of masks, and the candidates."""
    looked_at = [c for n, c in zip(table.column_names, table.columns, strict=True) if n in (*NEEDED, "candidates")]
    for column in looked_at:
        for buffer in (buffer for chunk in column.chunks for buffer in chunk.buffers()[1:2]):
            start = buffer.address - address if buffer is not None else -1
            if 0 <= start < len(mapped):  # decompressed buffers lie elsewhere
                start -= start % mmap.PAGESIZE
                _advise(mapped, mmap.MADV_WILLNEED, start, buffer.address + buffer.size - address - start)


def _advise(mapped: mmap.mmap, advice: int, *where: int) -> None:
    with suppress(OSError, ValueError):  # a file system that takes no advice is slower, not wrong
        mapped.madvise(advice, *where)


def _no_manifest() -> Manifest:
    origin = Origin("", "", "", None, "as given", None, [], {}, 0)
    return Manifest(0, 0, 0, 0, 0, 0, "", (), origin)


def _counted(dataset: CompletionDataset, files: Sequence[Path]) -> Manifest:
    largest = max((int(ids.max(initial=0)) for _, ids, _ in dataset.chunks()), default=0)
    shards = tuple(Shard(path.name, 0, 0, path.stat().st_size, "") for path in files)
    lengths = dataset.lengths
    return Manifest(
        0,
        rows=len(dataset),
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised_tokens=dataset.supervised(),
        longest=int(lengths.max(initial=0)),
        largest_id=largest,
        fingerprint="",
        shards=shards,
        origin=dataset.manifest.origin,
    )
