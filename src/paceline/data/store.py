"""The dataset of tokenized completions, mapped into memory: an Arrow folder that `datasets` opens too.

Lengths come from Arrow's list offsets, and a row is touched only when it is asked for. A folder of Arrow files that
somebody else wrote (`datasets.save_to_disk`, plain shards) opens as well if it has the columns; without a manifest
nobody vouches for its tokenizer, so it can be planned but not trained on. writer.py writes datasets.

Shapes: N rows, S tokens of a row, T tokens of rows that lie end to end.
"""

import bisect
import json
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from paceline.data.arrays import joined
from paceline.data.columns import (
    NEEDED,
    Lists,
    aligned_chunks,
    check_candidates,
    check_columns,
    check_ends,
    check_rows,
    ends_of,
    one_line,
)
from paceline.data.manifest import NAME, Manifest, Origin, Shard, check_file_name, load_manifest
from paceline.data.parquet import as_arrow
from paceline.records import UserError

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
_COUNTED = 1 << 20  # tokens whose mask is spread out at a time, where it has to be counted


class CompletionDataset:
    """A dataset mapped into memory. Reading rows from several threads at once is safe: nothing in it changes."""

    def __init__(self, folder: Path, manifest: Manifest, tables: Sequence[pa.Table]) -> None:
        """Keep views of the mapped tables; no row is read."""
        self.folder = folder
        self.manifest = manifest
        self._ids: list[Int[np.ndarray, " tokens"]] = []
        self._id_offsets: list[Int[np.ndarray, " ends"]] = []
        self._masks: list[_Mask] = []
        self._first_row = [0]
        for ids, mask in ((i, m) for table in tables for i, m in aligned_chunks(table)):
            # DLPack and buffers, because pyarrow's own to_numpy imports pandas (0.3 s).
            self._ids.append(np.from_dlpack(ids.values))
            self._id_offsets.append(np.from_dlpack(ids.offsets))
            self._masks.append(_Mask(mask))
            self._first_row.append(self._first_row[-1] + len(ids))
        self._supervised: int | None = None
        if manifest.version:  # in somebody else's file a column of that name may be anything
            given = (chunk for table in tables for chunk in table.column("candidates").chunks)
            self._candidates = [np.from_dlpack(chunk) for chunk in given]
        else:
            counted = [counts for mask in self._masks for counts in mask.counts()]
            self._candidates = [part for _, part in counted]
            self._supervised = sum(int(part.sum()) for part, _ in counted)

    def __len__(self) -> int:
        return self._first_row[-1]

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
        return (np.diff(offsets) for offsets in self._id_offsets)

    def candidate_parts(self) -> Iterator[Int[np.ndarray, " n"]]:
        """Yield `candidates` in parts."""
        return iter(self._candidates)

    @property
    def fingerprint(self) -> str:
        """Hash of the rows, as written."""
        return self.manifest.fingerprint

    def row(self, index: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return a read-only view of a row's ids and a copy of its loss mask."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)}")
        chunk = bisect.bisect_right(self._first_row, index) - 1
        place = index - self._first_row[chunk]
        offsets = self._id_offsets[chunk]
        return self._ids[chunk][offsets[place] : offsets[place + 1]], self._masks[chunk].row(place)

    def chunks(self) -> Iterator[tuple[int, Int[np.ndarray, " tokens"], Int[np.ndarray, " ends"]]]:
        """Yield (first row, ids of all its rows, their ends from 0) for each piece that lies together in memory."""
        for first, ids, offsets in zip(self._first_row, self._ids, self._id_offsets, strict=False):
            yield first, ids[offsets[0] : offsets[-1]], offsets - offsets[0]

    def supervised(self) -> int:
        """Return how many tokens are learnt from; reads every mask unless opening has."""
        if self._supervised is None:
            return sum(int(part.sum()) for mask in self._masks for part, _ in mask.counts())
        return self._supervised


class _Mask:
    """A chunk of loss masks: bits, or any whole numbers where somebody else wrote the file."""

    def __init__(self, chunk: Lists) -> None:
        self._offsets: Int[np.ndarray, " ends"] = np.from_dlpack(chunk.offsets)
        self._values: Int[np.ndarray, " tokens"] | None = None
        values = chunk.values
        if pa.types.is_boolean(values.type):
            self._bits = np.frombuffer(values.buffers()[1] or b"", dtype=np.uint8)
            self._bit0 = values.offset
        else:
            self._values = np.from_dlpack(values)

    def row(self, place: int) -> Bool[np.ndarray, " S"]:
        return self._read(int(self._offsets[place]), int(self._offsets[place + 1]))

    def counts(self) -> Iterator[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]:
        """Yield supervised tokens and anchor candidates of each row, piece by piece of bounded size."""
        offsets, first = self._offsets, 0
        while first < len(offsets) - 1:
            limit = offsets.dtype.type(min(int(offsets[first]) + _COUNTED, int(offsets[-1])))
            behind = int(np.searchsorted(offsets, limit, side="right")) - 1
            behind = max(behind, first + 1)  # a row that is longer comes alone
            ends = offsets[first : behind + 1] - offsets[first]
            mask_T = self._read(int(offsets[first]), int(offsets[behind]))
            pairs_T = mask_T.copy()
            pairs_T[:-1] &= mask_T[1:]
            pairs_T[ends[1:] - 1] = False  # a row's last token is followed by none of its own
            yield _row_sums(mask_T, ends), _row_sums(pairs_T, ends)
            first = behind

    def _read(self, first: int, behind: int) -> Bool[np.ndarray, " T"]:
        if self._values is not None:
            return self._values[first:behind] != 0
        first, behind = first + self._bit0, behind + self._bit0
        bits_T = np.unpackbits(self._bits[first >> 3 : (behind + 7) >> 3], bitorder="little")
        return bits_T[first & 7 : (first & 7) + behind - first].view(np.bool_)


def open_dataset(folder: Path) -> CompletionDataset:
    """Return the dataset in a folder; a folder of Arrow or Parquet files without a manifest is counted first.

    Raises:
        UserError: the folder holds no dataset, or a damaged one.
    """
    if (folder / NAME).is_file():
        manifest = load_manifest(folder)
        tables = [_open_shard(folder, shard) for shard in manifest.shards]
        dataset = CompletionDataset(folder, manifest, tables)
        longest = int(dataset.lengths.max(initial=0))
        if longest != manifest.longest:
            raise UserError(
                f"The longest row of dataset {folder} has {longest:,} tokens, its manifest says {manifest.longest:,}. "
                "Prepare it again."
            )
        return dataset
    files = arrow_files(folder) or [as_arrow(path) for path in sorted(folder.glob("*.parquet"))]
    if not files:
        load_manifest(folder)  # raises: what a dataset without one lacks is said there
    tables = [map_file(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        check_columns(path, table)
        check_ends(path, table, "Write it again.")
        check_rows(path, table)
    dataset = CompletionDataset(folder, _no_manifest(), tables)
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
        raise UserError(f"Shard {path} holds {table.num_rows:,} rows, the manifest says {shard.rows:,}. Prepare again.")
    advice = f"Look at it with `paceline prepare {folder} --verify`."
    check_ends(path, table, advice)
    check_candidates(path, table, advice)
    tokens = sum(int(ends[-1] - ends[0]) for ends in ends_of(table, "input_ids"))
    if tokens != shard.tokens:
        raise UserError(f"Shard {path} holds {tokens:,} tokens, the manifest says {shard.tokens:,}. Prepare again.")
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


def _row_sums(marks_T: Bool[np.ndarray, " T"], ends: Int[np.ndarray, " ends"]) -> Int[np.ndarray, " n"]:
    return np.add.reduceat(marks_T, ends[:-1], dtype=np.int32)  # no row is empty
