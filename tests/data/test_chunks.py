"""Views of arrays against the arrays themselves, and what is left of a record batch once it was opened."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from paceline.bench import sparse
from paceline.bench.memory import memory_of
from paceline.bench.sparse import write_sparse_dataset
from paceline.data.chunks import Views
from paceline.data.store import open_dataset


def test_views_are_the_arrays_that_they_were_made_of() -> None:
    whole = pa.py_buffer(np.arange(400, dtype=np.int32).tobytes())
    crooked = pa.Array.from_buffers(pa.int32(), 5, [None, whole.slice(3, 20)])
    given = [
        pa.array([3, 1, 2], pa.int64()),
        pa.Array.from_buffers(pa.int32(), 100, [None, whole]),
        pa.Array.from_buffers(pa.int32(), 60, [None, whole.slice(40)]).slice(7, 20),
        pa.Array.from_buffers(pa.int16(), 10, [None, whole.slice(8, 20)]),
        crooked,
        pa.array([], pa.int32()),
    ]
    views = Views()
    for values in given:
        views.append(values)
    want = [values.to_pylist() for values in given]
    assert [view.tolist() for view in views] == want
    assert [str(view.dtype) for view in views] == ["int64", "int32", "int32", "int16", "int32", "int32"]
    assert not any(view.flags.writeable for view in views)
    assert views.part(2, 3, 9).tolist() == want[2][3:9]
    pairs = [(2, 19), (0, 0), (1, 99), (4, 4), (2, 0), (3, 9)]
    numbers, places = np.array(pairs).T
    assert views.take(numbers, places).tolist() == [want[number][place] for number, place in pairs]


def test_a_record_batch_leaves_little_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million long rows there are a thousand: pyarrow's objects for each would be 4.5 KB, five bytes a row."""
    monkeypatch.setattr(sparse, "_BATCH_TOKENS", 10)
    monkeypatch.setattr(sparse, "_SHARD_ROWS", 500)
    write_sparse_dataset(tmp_path / "few", np.full(500, 10, dtype=np.int32))
    write_sparse_dataset(tmp_path / "many", np.full(8000, 10, dtype=np.int32))
    open_dataset(tmp_path / "few")
    before = memory_of()["RssAnon"]
    dataset = open_dataset(tmp_path / "many")
    batches = len(list(dataset.chunks()))
    assert batches >= 8000
    assert (memory_of()["RssAnon"] - before) * 2**20 / batches < 1500
