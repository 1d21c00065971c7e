"""The dataset of tokenized completions, mapped into memory: an Arrow folder that `datasets` opens too.

Lengths come from Arrow's list offsets, and a row is touched only when it is asked for. A folder of Arrow files that
somebody else wrote (`datasets.save_to_disk`, plain shards) opens as well if it has the columns; without a manifest
nobody vouches for its tokenizer, so it can be planned but not trained on. writer.py writes datasets.

Shapes: N rows, S tokens of a row.
"""

import bisect
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from paceline.data.manifest import NAME, Manifest, Origin, Shard, load_manifest
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
_NEEDED = ("input_ids", "loss_mask")
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


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
        for ids, mask in ((i, m) for table in tables for i, m in _aligned_chunks(table)):
            # DLPack and buffers, because pyarrow's own to_numpy imports pandas (0.3 s).
            self._ids.append(np.from_dlpack(ids.values))
            self._id_offsets.append(np.from_dlpack(ids.offsets))
            self._masks.append(_Mask(mask))
            self._first_row.append(self._first_row[-1] + len(ids))
        parts = [np.diff(offsets) for offsets in self._id_offsets]
        self.lengths: Int[np.ndarray, " N"] = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
        self.candidates: Int[np.ndarray, " N"] = self._candidates(tables)

    def __len__(self) -> int:
        return len(self.lengths)

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

    def _candidates(self, tables: Sequence[pa.Table]) -> Int[np.ndarray, " N"]:
        if all("candidates" in table.column_names for table in tables):
            chunks = [chunk for table in tables for chunk in table.column("candidates").chunks]
            parts = [np.from_dlpack(chunk) for chunk in chunks]
            return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
        from paceline.blocks import anchor_candidates  # imports torch, which a dataset of ours does without

        counts = (len(anchor_candidates(self.row(i)[1])) for i in range(len(self)))
        return np.fromiter(counts, np.int32, len(self))


class _Mask:
    """A chunk of loss masks: bits, or any whole numbers where somebody else wrote the file."""

    def __init__(self, chunk: pa.ListArray) -> None:
        self._offsets: Int[np.ndarray, " ends"] = np.from_dlpack(chunk.offsets)
        self._values: Int[np.ndarray, " tokens"] | None = None
        values = chunk.values
        if pa.types.is_boolean(values.type):
            self._bits = np.frombuffer(values.buffers()[1] or b"", dtype=np.uint8)
            self._bit0 = values.offset
        else:
            self._values = np.from_dlpack(values)

    def row(self, place: int) -> Bool[np.ndarray, " S"]:
        first, behind = int(self._offsets[place]), int(self._offsets[place + 1])
        if self._values is not None:
            return self._values[first:behind] != 0
        first, behind = first + self._bit0, behind + self._bit0
        bits_S = np.unpackbits(self._bits[first >> 3 : (behind + 7) >> 3], bitorder="little")
        return bits_S[first & 7 : (first & 7) + behind - first].view(np.bool_)


def open_dataset(folder: Path) -> CompletionDataset:
    """Return the dataset in a folder; a folder of Arrow files without a manifest is counted first.

    Raises:
        UserError: the folder holds no dataset, or a damaged one.
    """
    if (folder / NAME).is_file():
        manifest = load_manifest(folder)
        tables = [_open_shard(folder, shard) for shard in manifest.shards]
        dataset = CompletionDataset(folder, manifest, tables)
        if len(dataset) != manifest.rows:
            raise UserError(
                f"Dataset {folder} holds {len(dataset):,} rows, its manifest says {manifest.rows:,}. Prepare it again."
            )
        return dataset
    files = arrow_files(folder)
    if not files:
        load_manifest(folder)  # raises: what a dataset without one lacks is said there
    tables = [map_file(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        _check_columns(path, table)
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
        return [folder / item["filename"] for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
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
        mapped.madvise(mmap.MADV_RANDOM)  # else every look at a batch's offsets reads megabytes behind them
        whole = pa.py_buffer(mapped)
        new = pa.ipc.open_file if mapped[:6] == b"ARROW1" else pa.ipc.open_stream
        table = new(pa.BufferReader(whole)).read_all()
        _read_ahead(mapped, whole.address, table)
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
        raise UserError(f"Shard {path} must have the columns {_one_line(SCHEMA)}, got {_one_line(table.schema)}.")
    if table.num_rows != shard.rows:
        raise UserError(f"Shard {path} holds {table.num_rows:,} rows, the manifest says {shard.rows:,}. Prepare again.")
    return table


def _read_ahead(mapped: mmap.mmap, address: int, table: pa.Table) -> None:
    """Ask for what opening looks at, all at once: the ends of rows and the candidates."""
    for name in {"input_ids", "candidates"} & set(table.column_names):
        for chunk in table.column(name).chunks:
            buffer = chunk.buffers()[1]
            if buffer is not None and buffer.size:
                start = buffer.address - address
                start -= start % mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, start, buffer.address + buffer.size - address - start)


def _check_columns(path: Path, table: pa.Table) -> None:
    for name in _NEEDED:
        kind = table.schema.field(name).type if name in table.column_names else pa.null()
        inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else pa.null()
        if not (pa.types.is_integer(inner) or (name == "loss_mask" and pa.types.is_boolean(inner))):
            raise UserError(
                f"{path} must have the columns input_ids (lists of whole numbers) and loss_mask (lists of truth values "
                f"or 0 and 1), got {_one_line(table.schema)}. Make a dataset with `paceline prepare`."
            )


def _aligned_chunks(table: pa.Table) -> Iterator[tuple[pa.ListArray, pa.ListArray]]:
    """Yield chunks of ids and masks that hold the same rows, whatever batches the file was written in."""
    for batch in table.select(_NEEDED).to_batches():
        ids, mask = batch.columns
        if ids.null_count or mask.null_count or ids.values.null_count or mask.values.null_count:
            raise UserError("A dataset's input_ids and loss_mask must hold no null. Make it again with `prepare`.")
        if len(ids):
            yield ids, mask


def _no_manifest() -> Manifest:
    origin = Origin("", "", "", None, "as given", None, [], {}, 0)
    return Manifest(0, 0, 0, 0, 0, 0, "", (), origin)


def _counted(dataset: CompletionDataset, files: Sequence[Path]) -> Manifest:
    supervised = sum(int(dataset.row(i)[1].sum()) for i in range(len(dataset)))
    largest = max((int(ids.max(initial=0)) for _, ids, _ in dataset.chunks()), default=0)
    shards = tuple(Shard(path.name, 0, 0, path.stat().st_size, "") for path in files)
    lengths = dataset.lengths
    return Manifest(
        0,
        rows=len(dataset),
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised_tokens=supervised,
        longest=int(lengths.max(initial=0)),
        largest_id=largest,
        fingerprint="",
        shards=shards,
        origin=dataset.manifest.origin,
    )


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
