"""The sparse file against a plain one, and the sparse dataset against what it was to hold."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from paceline.bench import sparse
from paceline.bench.lengths import run_lengths
from paceline.blocks import anchor_candidates
from paceline.data.store import open_dataset


def test_bytes_are_those_of_a_plain_file(tmp_path: Path) -> None:
    pieces = [b"head", bytes(100_000), b"middle", bytes(10), b"x" * 5000, bytes(4095), bytes(4096), bytes(1 << 20)]
    with sparse.SparseFile(tmp_path / "sparse") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        assert file.tell() == sum(map(len, pieces))
    assert (tmp_path / "sparse").read_bytes() == b"".join(pieces)
    used = (tmp_path / "sparse").stat().st_blocks * 512
    assert used < 50_000, "it ends with a hole and holds another one"


def test_arrow_streams_are_those_of_a_plain_file(tmp_path: Path) -> None:
    table = pa.table({"zeros": np.zeros(300_000, dtype=np.int32), "numbers": np.arange(300_000)})
    plain = io.BytesIO()
    with pa.ipc.new_stream(plain, table.schema) as stream:
        stream.write_table(table, max_chunksize=100_000)
    with (
        sparse.SparseFile(tmp_path / "sparse") as file,
        pa.ipc.new_stream(pa.PythonFile(file, "w"), table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=100_000)
    assert (tmp_path / "sparse").read_bytes() == plain.getvalue()


def test_a_sparse_dataset_opens_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_SHARD_ROWS", 700)
    monkeypatch.setattr(sparse, "_BATCH_TOKENS", 200_000)
    lengths = run_lengths(2000)
    manifest, size = sparse.write_sparse_dataset(tmp_path / "data", lengths)
    dataset = open_dataset(tmp_path / "data")
    assert np.array_equal(dataset.lengths, lengths)
    assert (manifest.rows, manifest.tokens, len(manifest.shards)) == (2000, lengths.sum(), 3)
    assert (dataset.candidates >= 1).all()
    for row in (0, 699, 700, 1999):
        ids, mask = dataset.row(row)
        assert len(ids) == len(mask) == lengths[row]
        assert not ids.any()
    assert size.apparent_bytes > 4 * lengths.sum()
    assert size.disk_bytes < size.apparent_bytes / 10


def test_masks_are_as_the_candidates_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_BATCH_TOKENS", 20_000)
    lengths = np.array([2, 3, 2, *run_lengths(40), 2], dtype=np.int32)
    _, size = sparse.write_sparse_dataset(tmp_path / "data", lengths, masks=True)
    dataset = open_dataset(tmp_path / "data")
    found = [len(anchor_candidates(dataset.row(row)[1])) for row in range(len(dataset))]
    assert found == dataset.candidates.tolist() == np.maximum(lengths // 2, 1).tolist()
    assert size.disk_bytes < size.apparent_bytes
