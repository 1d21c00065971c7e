"""The dataset of tokenized completions: an Arrow folder that `datasets` opens too, with a manifest of its origin.

Rows are written in bounded pieces and the folder appears in one rename. A reader maps the file into memory: lengths
come from Arrow's list offsets, and a row is touched only when it is asked for.

Shapes: N rows, S tokens of a row.
"""

import errno
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int

from paceline.records import RunError, UserError

VERSION = 1
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())), ("candidates", pa.int32())]
)
_DATA_FILE = "data-00000-of-00001.arrow"
_FILES = {_DATA_FILE, "manifest.json", "state.json", "dataset_info.json"}
_FLUSH_TOKENS = 1 << 20  # tokens held in memory while writing; a record batch, so also a chunk when reading


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dataset comes from."""

    target: str
    target_revision: str
    tokenizer: str  # tokenizer_fingerprint
    chat_template: str | None  # sha256
    mask_rule: str  # where the loss mask of conversations comes from
    mask_token_id: int | None  # an id known not to occur
    sources: list[dict[str, Any]]  # path, sha256 and rows of each input file
    quarantined: dict[str, int]  # refused rows per reason
    truncated: int  # rows cut to the longest length


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a dataset holds. `fingerprint` hashes the rows: equal rows, equal fingerprint."""

    version: int
    rows: int
    tokens: int
    supervised_tokens: int
    longest: int  # tokens
    fingerprint: str
    origin: Origin


class DatasetWriter:
    """Takes rows one by one and writes a record batch whenever enough tokens have come together."""

    def __init__(self, folder: Path) -> None:
        """Open the data file in a folder that exists."""
        self.rows = self.tokens = self.supervised = self.longest = 0
        self._folder = folder
        self._digest = hashlib.sha256()
        self._waiting: list[tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"], int]] = []
        self._waiting_tokens = 0
        self._stream = pa.ipc.new_stream(str(folder / _DATA_FILE), SCHEMA)

    def add(self, input_ids: Int[np.ndarray, " S"], loss_mask: Bool[np.ndarray, " S"], candidates: int) -> None:
        """Append a row."""
        ids_S = input_ids.astype(np.int32)
        self._digest.update(len(ids_S).to_bytes(8, "little") + ids_S.tobytes() + np.packbits(loss_mask).tobytes())
        self._waiting.append((ids_S, loss_mask, candidates))
        self._waiting_tokens += len(ids_S)
        self.rows += 1
        self.tokens += len(ids_S)
        self.supervised += int(loss_mask.sum())
        self.longest = max(self.longest, len(ids_S))
        if self._waiting_tokens >= _FLUSH_TOKENS:
            self._flush()

    def finish(self, origin: Origin) -> Manifest:
        """Write what is left and the manifest."""
        if self._waiting:
            self._flush()
        self.close()
        fingerprint = self._digest.hexdigest()
        manifest = Manifest(
            VERSION, self.rows, self.tokens, self.supervised, self.longest, fingerprint=fingerprint, origin=origin
        )
        state: dict[str, Any] = {
            "_data_files": [{"filename": _DATA_FILE}],
            "_fingerprint": fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        files = {"manifest.json": asdict(manifest), "state.json": state, "dataset_info.json": {}}
        for name, tree in files.items():
            (self._folder / name).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        return manifest

    def close(self) -> None:
        """Close the data file; a second time does nothing."""
        self._stream.close()

    def _flush(self) -> None:
        ids, masks, candidates = zip(*self._waiting, strict=True)
        offsets = pa.array(np.cumsum([0, *map(len, ids)]), pa.int32())
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(ids))),
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks))),
            pa.array(candidates, pa.int32()),
        ]
        self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._waiting, self._waiting_tokens = [], 0


def check_place(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is at the place.

    Raises:
        UserError: something is there and `overwrite` is off, or it is no dataset.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder} exists and is not a dataset, so it is never replaced. Choose another place.")
    others = sorted({path.name for path in folder.iterdir()} - _FILES)
    if others:
        raise UserError(
            f"{folder} holds more than a dataset ({others[0]}), so it is never replaced. Choose another place."
        )
    if not overwrite:
        raise UserError(f"There is a dataset at {folder} already. Choose another place or ask to overwrite it.")


@contextmanager
def writing(folder: Path, *, overwrite: bool = False) -> Iterator[DatasetWriter]:
    """Yield a writer whose rows become the dataset `folder` when the block ends after `finish`; else nothing is left.

    Raises:
        UserError: see check_place, or the place cannot be written to.
        RunError: the disk is full or broken.
    """
    from paceline.checkpoint import whole_folder  # imports torch, which reading a dataset does without

    check_place(folder, overwrite=overwrite)
    try:
        with whole_folder(folder) as aside:
            writer = DatasetWriter(aside)
            try:
                yield writer
            finally:
                writer.close()
            assert (aside / "manifest.json").is_file(), "writing() ended without finish()"
    except OSError as error:
        kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
        raise kind(f"Dataset {folder} cannot be written: {error}. Check the place and its free space.") from None


class CompletionDataset:
    """A dataset mapped into memory. Reading rows from several threads at once is safe: nothing in it changes."""

    def __init__(self, folder: Path, manifest: Manifest, table: pa.Table) -> None:
        """Keep views of the mapped table; no row is read."""
        self.folder = folder
        self.manifest = manifest
        ids, masks = table.column("input_ids").chunks, table.column("loss_mask").chunks
        # DLPack and buffers, because pyarrow's own to_numpy imports pandas (0.3 s).
        self._offsets = [np.from_dlpack(chunk.offsets) for chunk in ids]
        self._ids = [np.from_dlpack(chunk.values) for chunk in ids]
        self._mask_offsets = [np.from_dlpack(chunk.offsets) for chunk in masks]
        self._mask_bits = [np.frombuffer(chunk.values.buffers()[1], dtype=np.uint8) for chunk in masks]
        self._mask_bit0 = [chunk.values.offset for chunk in masks]
        self._first_row = np.cumsum([0, *(len(chunk) for chunk in ids)])
        self.lengths: Int[np.ndarray, " N"] = np.concatenate([np.diff(offsets) for offsets in self._offsets]).astype(
            np.int64
        )
        candidates = [np.from_dlpack(chunk) for chunk in table.column("candidates").chunks]
        self.candidates: Int[np.ndarray, " N"] = np.concatenate(candidates).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Hash of the rows, as written."""
        return self.manifest.fingerprint

    def row(self, index: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return copies of a row's ids (int64) and loss mask."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)}")
        chunk = int(np.searchsorted(self._first_row, index, side="right")) - 1
        place = index - int(self._first_row[chunk])
        start, end = self._offsets[chunk][place : place + 2]
        first, behind = (self._mask_offsets[chunk][place : place + 2] + self._mask_bit0[chunk]).tolist()
        bits = self._mask_bits[chunk][first // 8 : -(-behind // 8)]
        bits_S = np.unpackbits(bits, bitorder="little")[first % 8 :][: behind - first]
        return self._ids[chunk][start:end].astype(np.int64), bits_S.view(np.bool_)


def find_token(dataset: CompletionDataset, token_id: int) -> int | None:
    """Return the first row that holds the token, or None; reads every id once."""
    for chunk, ids in enumerate(dataset._ids):
        offsets = dataset._offsets[chunk]
        hits = np.flatnonzero(ids[offsets[0] : offsets[-1]] == token_id)
        if len(hits):
            place = np.searchsorted(offsets, offsets[0] + hits[0], side="right") - 1
            return int(dataset._first_row[chunk] + place)
    return None


def id_range(dataset: CompletionDataset) -> tuple[int, int]:
    """Return the smallest and the largest token id in the data; reads every id once."""
    parts = [
        ids[offsets[0] : offsets[-1]] for ids, offsets in zip(dataset._ids, dataset._offsets, strict=True) if len(ids)
    ]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def open_dataset(folder: Path) -> CompletionDataset:
    """Return the dataset in a folder.

    Raises:
        UserError: the folder holds no dataset, or a damaged one.
    """
    manifest = load_manifest(folder)
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tables = [_map_file(folder / item["filename"]) for item in state["_data_files"]]
        table = pa.concat_tables(tables).select(SCHEMA.names)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"Dataset {folder} cannot be opened: {reason}. Prepare it again.") from None
    if not table.schema.equals(SCHEMA):
        raise UserError(f"Dataset {folder} must have the columns {_one_line(SCHEMA)}, got {_one_line(table.schema)}.")
    if table.num_rows != manifest.rows:
        raise UserError(
            f"Dataset {folder} holds {table.num_rows:,} rows, its manifest says {manifest.rows:,}. Prepare it again."
        )
    return CompletionDataset(folder, manifest, table)


def load_manifest(folder: Path) -> Manifest:
    """Return a dataset's manifest.

    Raises:
        UserError: there is none, or it cannot be understood.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise UserError(f"{folder} is no dataset: it has no manifest.json. Write one with `paceline prepare`.")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["version"] != VERSION:
            raise UserError(f"{path} has version {tree['version']}, this program reads {VERSION}. Prepare it again.")
        manifest = Manifest(**{**tree, "origin": Origin(**tree["origin"])})
        numbers = (manifest.rows, manifest.tokens, manifest.supervised_tokens, manifest.longest)
        if not all(type(number) is int for number in numbers) or not isinstance(manifest.origin.tokenizer, str):
            raise TypeError("a count is no whole number or the tokenizer's fingerprint no text")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be understood ({type(error).__name__}: {error}). Prepare it again.") from None


def check_fits(manifest: Manifest, tokenizer: str, target: str) -> None:
    """Refuse a dataset whose ids were made by another tokenizer than the target's.

    Raises:
        UserError: the fingerprints differ.
    """
    made = manifest.origin
    if made.tokenizer != tokenizer:
        raise UserError(
            f"The dataset was prepared with the tokenizer of {made.target} ({made.tokenizer[:12]}), but target "
            f"{target} has another one ({tokenizer[:12]}). Prepare the data again with --target {target}."
        )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash everything that decides which ids a text gets: vocabulary, added tokens, normalizer, pre-tokenizer."""
    tree = cast(dict[str, Any], json.loads(tokenizer.backend_tokenizer.to_str()))
    for passing in ("truncation", "padding"):  # state of the last call, not of the tokenizer
        tree.pop(passing, None)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _map_file(path: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
