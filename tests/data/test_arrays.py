"""Arrays as long as an epoch: what they hold, whose memory it is, and that no piece of them is lost at a seam."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.bench.memory import memory_of
from paceline.bench.sparse import write_sparse_dataset
from paceline.config import DataSettings, TrainSettings
from paceline.data import arrays, loader
from paceline.data import plan as planning
from paceline.data.arrays import histogram, long_array, pick
from paceline.data.loader import cut_epoch
from paceline.data.mixture import batches_of_epochs, open_mixture
from paceline.data.plan import plan, shuffled

LAYOUTS = ["bucketed", "trimmed", "packed"]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 13])
def test_pieces_make_what_the_whole_makes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(arrays, "PIECE", 4)
    rng = np.random.default_rng(0)
    values, places = rng.integers(0, 9, 20).astype(np.int8), rng.integers(0, 20, size).astype(np.int32)
    picked = pick(values, places)
    assert picked.dtype == np.int8
    assert picked.tolist() == values[places].tolist()
    assert histogram(picked).tolist() == (np.bincount(picked).tolist() or [0])


def test_large_arrays_are_no_memory_of_malloc() -> None:
    count = (32 << 20) // 4
    before = memory_of()["RssAnon"]
    tracemalloc.start()
    held = long_array(count)
    held[:] = 7
    assert int(held[-1]) == 7
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert memory_of()["RssAnon"] > before + 30
    del held
    assert memory_of()["RssAnon"] < before + 4, "goes back at once"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_pieces_make_the_same_plan(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    lengths = np.random.default_rng(1).integers(2, 200, 3000).astype(np.int32)
    data = DataSettings(dataset="d", layout=layout, token_budget=256, max_batch=8, align=8, buckets=4)
    whole = plan(lengths, data, seed=1, epoch=2)
    for module in (arrays, planning):
        monkeypatch.setattr(module, "PIECE", 7)
    made = plan(lengths, data, seed=1, epoch=2)
    for name in ("rows_N", "offsets", "bucket_M"):
        assert getattr(made, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("count", [0, 1, 5, 3000])
def test_rows_are_shuffled_as_all_words_would_be_in_one_stable_sort(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(planning, "PIECE", 1 << 9)
    key = np.array([3, 5], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=[0, 0, 4, 9]).random_raw(count)
    assert shuffled(count, 3, 5, 9, 4).tolist() == np.argsort(words, kind="stable").tolist()


def test_equal_words_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class FewWords:
        def __init__(self, **_: object) -> None:
            self._rng = np.random.default_rng(0)

        def random_raw(self, count: int) -> np.ndarray:
            return self._rng.integers(0, 40, count).astype(np.uint64) << np.uint64(58)

    monkeypatch.setattr(np.random, "Philox", FewWords)
    words = FewWords().random_raw(2000)
    assert shuffled(2000, 0, 0, 0).tolist() == np.argsort(words, kind="stable").tolist()


def test_batches_are_cut_alike_however_many_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    offsets = np.cumsum([0, *rng.integers(1, 30, 200)])
    lengths, anchors = rng.integers(1, 64, offsets[-1]), rng.integers(0, 8, offsets[-1])
    limits = TrainSettings(context_slots=100, anchor_slots=20, anchors_per_sample=8)
    whole = loader.cut_batches(lengths, anchors, offsets, limits)
    for piece in (1, 40):
        monkeypatch.setattr(loader, "PIECE", piece)
        cut = loader.cut_batches(lengths, anchors, offsets, limits)
        assert [part.tolist() for part in cut] == [part.tolist() for part in whole]
        assert [part.dtype for part in cut] == [part.dtype for part in whole]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planning_asks_malloc_for_no_array_of_all_rows(tmp_path: Path, layout: str) -> None:
    """What malloc has handed out in megabytes it keeps: a pass over many rows would hold it to its end."""
    rows = 800_000  # beside which tables of lengths and of bins are small
    write_sparse_dataset(tmp_path / "data", np.random.default_rng(0).integers(30, 52, rows).astype(np.int32))
    data, train = DataSettings(dataset=str(tmp_path / "data"), layout=layout), TrainSettings()
    mixture = open_mixture(data)
    edges = mixture.edges(data)

    def peak(work: Callable[[], object]) -> float:
        tracemalloc.start()
        held = work()
        found = tracemalloc.get_traced_memory()[1] / rows
        tracemalloc.stop()
        del held
        return found

    assert peak(lambda: mixture.edges(data)) < 1
    assert peak(lambda: batches_of_epochs(mixture, data, seed=0, epochs=1)) < 2
    assert peak(lambda: cut_epoch(mixture, data, train, epoch=0, edges=edges)) < 3.9, "an array of all rows has 4"
