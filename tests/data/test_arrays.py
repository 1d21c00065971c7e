"""Arrays as long as an epoch: what they hold, whose memory it is, and that no piece of them is lost at a seam."""

import itertools
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.memory import memory_of
from paceline.bench.sparse import write_sparse_dataset
from paceline.config import DataSettings, TrainSettings
from paceline.data import arrays, loader, mixture, packing, plan_order
from paceline.data import plan as planning
from paceline.data.arrays import Marks, histogram, joined, long_array, pick, put
from paceline.data.loader import cut_epoch
from paceline.data.mixture import batches_of_epochs, open_mixture
from paceline.data.plan import plan
from paceline.data.plan_order import shuffled

LAYOUTS = ["bucketed", "trimmed", "packed"]
MODULES = [arrays, loader, mixture, packing, plan_order, planning]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 13])
def test_pieces_make_what_the_whole_makes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(arrays, "PIECE", 4)
    rng = np.random.default_rng(0)
    values, places = rng.integers(0, 9, 20).astype(np.int8), rng.integers(0, 20, size).astype(np.int32)
    picked = pick(values, places)
    assert picked.dtype == np.int8
    assert picked.tolist() == values[places].tolist()
    order = rng.permutation(size).astype(np.int32)
    assert put(picked, order)[order].tolist() == picked.tolist()
    assert histogram(picked).tolist() == (np.bincount(picked).tolist() or [0])


@pytest.mark.parametrize(("largest", "dtype"), [(0, "i1"), (127, "i1"), (128, "i2"), (32767, "i2"), (32768, "i4")])
def test_joined_numbers_take_as_few_bytes_as_the_largest_needs(largest: int, dtype: str) -> None:
    parts = [np.array([3, 1], dtype=np.int32), np.array([], dtype=np.int32), np.array([largest, 0], dtype=np.int64)]
    made = joined(lambda: parts)
    assert (made.tolist(), made.dtype) == ([3, 1, largest, 0], np.dtype(dtype))
    assert joined(lambda: parts, np.int32).dtype == np.int32
    assert joined(list).tolist() == []


@given(places=st.sets(st.integers(0, 59)), cuts=st.sets(st.integers(0, 59), min_size=2))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_marks_are_where_they_were_set(places: set[int], cuts: set[int]) -> None:
    marks, ends = Marks(60), sorted(cuts)
    for first, behind in zip([0, *ends], [*ends, 60], strict=True):
        mine = [place for place in sorted(places) if first <= place < behind]
        if mine:
            marks.set(np.array(mine))
    for first, behind in itertools.combinations([0, *ends, 60], 2):
        assert marks.between(first, behind).tolist() == [place in places for place in range(first, behind)]
    assert marks.bits.nbytes == 8


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
    for module in (arrays, plan_order):
        monkeypatch.setattr(module, "PIECE", 7)
    made = plan(lengths, data, seed=1, epoch=2)
    for name in ("rows_N", "offsets", "bucket_M"):
        assert getattr(made, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("count", [0, 1, 5, 3000])
def test_rows_are_shuffled_as_all_words_would_be_in_one_stable_sort(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(plan_order, "PIECE", 1 << 9)
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

    def ends() -> list[int]:
        told = lambda first, behind: (lengths[first:behind], anchors[first:behind])  # noqa: E731
        return np.concatenate(list(loader.cut_batches(told, offsets, limits))).tolist()

    whole = ends()
    for piece in (1, 40):
        monkeypatch.setattr(loader, "PIECE", piece)
        assert ends() == whole


def whole_and_half(tmp_path: Path, rows: int, layout: str, datasets: int) -> DataSettings:
    """Short rows, whose index is most of what planning holds; in a second dataset twice as many, half of them taken."""
    rng = np.random.default_rng(0)
    sizes = [rows] if datasets == 1 else [rows // 2, rows]
    for index, size in enumerate(sizes):
        write_sparse_dataset(tmp_path / str(index), rng.integers(30, 52, size).astype(np.int32))
    folders = tuple(str(tmp_path / str(index)) for index in range(datasets))
    return DataSettings(dataset=folders, weights=(1.0, 0.5)[:datasets], layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("piece", [1, 50])
def test_an_epoch_of_several_datasets_is_the_same_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, piece: int
) -> None:
    data, train = whole_and_half(tmp_path, 300, layout, 2), TrainSettings()
    opened = open_mixture(data)

    def cuts() -> list[Any]:
        made = cut_epoch(opened, data, train, epoch=1, edges=opened.edges(data))
        parts = (made.rows_N, made.passes_N, made.cut_ends.bits, made.batch_ends.bits)
        told = [(part.tolist(), part.dtype) for part in parts]
        return [*told, list(made.runs(0)), list(made.runs(3)), made.largest(opened.lengths)]

    whole = cuts()
    for module in (arrays, loader, mixture, plan_order):
        monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(loader, "_SPREAD", piece)
    assert cuts() == whole


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("datasets", [1, 2])
def test_planning_asks_malloc_for_no_array_of_all_rows(tmp_path: Path, layout: str, datasets: int) -> None:
    """What malloc has handed out in megabytes it keeps: a pass over many rows would hold it to its end."""
    rows = 800_000  # beside which tables of lengths and of bins are small
    data, train = whole_and_half(tmp_path, rows, layout, datasets), TrainSettings()
    opened = open_mixture(data)
    edges = opened.edges(data)

    def peak(work: Callable[[], object]) -> float:
        tracemalloc.start()
        held = work()
        found = tracemalloc.get_traced_memory()[1] / rows
        tracemalloc.stop()
        del held
        return found

    assert peak(lambda: opened.edges(data)) < 1
    assert peak(lambda: batches_of_epochs(opened, data, seed=0, epochs=1)) < 2
    assert peak(lambda: cut_epoch(opened, data, train, epoch=1, edges=edges)) < 3.9, "an array of all rows has 4"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("datasets", "slots", "most", "left_out"),
    [(1, 8192, 6.8, 0), (2, 8192, 8.4, 0), (1, 64, 6.8, 0), (1, 8192, 6.8, 20), (2, 8192, 8.4, 20)],
)
def test_planning_holds_little_more_of_a_row_than_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, datasets: int, slots: int, most: float, left_out: int
) -> None:
    """Memory of a pass is to be flat, and so is its peak, which planning may be: 5 % of 160 MiB are 8.4 bytes a row.

    With 64 slots nearly every row is a micro-batch of its own, as long rows are. Looked at whenever an array of rows
    comes or goes, at which time the others are filled.
    """
    rows = 1_000_000
    data, train = whole_and_half(tmp_path, rows, layout, datasets), TrainSettings(context_slots=slots)
    opened = open_mixture(data)
    opened.left_out = tuple(np.linspace(5, len(dataset) - 5, left_out, dtype=np.int64) for dataset in opened.datasets)
    edges = opened.edges(data)
    looks: list[float] = []

    def look() -> None:
        looks.append(memory_of()["RssAnon"] * 2**20)

    def watched(*arguments: Any) -> np.ndarray:
        made = long_array(*arguments)
        look()
        weakref.finalize(made if made.base is None else made.base, look)
        return made

    for module in MODULES:
        if hasattr(module, "long_array"):
            monkeypatch.setattr(module, "long_array", watched)
    before = memory_of()["RssAnon"] * 2**20
    made = cut_epoch(opened, data, train, epoch=1, edges=edges)
    look()
    assert rows - left_out * datasets <= len(made.rows_N) <= rows - left_out
    assert (looks[-1] - before) / rows >= 4, "the rows themselves are seen"
    assert (max(looks) - before) / rows <= most


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_of_one_row_costs_two_bits(tmp_path: Path, layout: str) -> None:
    """Long rows make nearly as many micro-batches as there are rows: no number of each may stay for the whole epoch."""
    rows = 20_000
    data, train = whole_and_half(tmp_path, rows, layout, 1), TrainSettings(context_slots=64)
    opened = open_mixture(data)
    made = cut_epoch(opened, data, train, epoch=1, edges=opened.edges(data))
    assert sum(1 for _ in made.runs(0)) > 0.9 * rows
    parts = [getattr(made, field.name) for field in fields(made)]
    arrays = [part.bits if isinstance(part, Marks) else part for part in parts]
    held = sum(part.nbytes for part in arrays if isinstance(part, np.ndarray) and any(part.strides))
    assert 4 * rows <= held <= 4.5 * rows
