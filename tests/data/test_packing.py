"""Packing in groups against best-fit decreasing told item by item."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.packing import Packing, count_bins


def pack(counts: np.ndarray, budget: int) -> np.ndarray:
    """The bin of every item, longest first, whose places in its bin ascend."""
    packing = Packing(counts, budget)
    ends = np.cumsum(packing.sizes_M)
    places = packing.seat(ends - packing.sizes_M)(np.arange(counts.sum()))
    assert sorted(places.tolist()) == list(range(int(counts.sum()))), "every place once"
    bins = np.searchsorted(ends, places, side="right")
    assert np.argsort(places).tolist() == np.argsort(bins, kind="stable").tolist(), "in a bin the longest comes first"
    return bins


def slow_packing(lengths: list[int], budget: int) -> list[int]:
    """Loads of the bins when every item, longest first, goes where it leaves the least room."""
    loads: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, load in enumerate(loads) if load + length <= budget]
        if fitting:
            loads[max(fitting, key=lambda i: loads[i])] += length
        else:
            loads.append(length)
    return loads


def check(lengths: list[int], budget: int) -> None:
    counts = np.bincount(lengths)
    bins = pack(counts, budget)
    assert len(bins) == len(lengths)
    loads = np.bincount(bins, weights=np.sort(lengths)[::-1])
    assert loads.max() <= budget
    want = slow_packing(lengths, budget)
    assert len(loads) == len(want) == count_bins(counts, budget)
    assert sorted(loads.astype(int).tolist()) == sorted(want)
    assert len(np.unique(bins)) == len(want), "no bin is empty"


@given(
    lengths=st.lists(st.one_of(st.integers(1, 60), st.sampled_from([5, 12, 20])), min_size=1, max_size=120),
    more=st.integers(0, 150),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_lengths(lengths: list[int], more: int) -> None:
    check(lengths, max(lengths) + more)


@pytest.mark.parametrize("budget", [100, 101, 256, 4096])
def test_many_items(budget: int) -> None:
    rng = np.random.default_rng(budget)
    check(rng.integers(1, 101, 1500).tolist(), budget)
    check((1 + rng.geometric(0.05, 1500).clip(max=99)).tolist(), budget)


def test_cases_by_hand() -> None:
    assert pack(np.bincount([6, 4]), 10).tolist() == [0, 0]
    assert pack(np.bincount([6, 6, 4, 4, 4]), 10).tolist() == [0, 1, 0, 1, 2]
    assert pack(np.bincount([3] * 7), 10).tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert pack(np.bincount([10, 10]), 10).tolist() == [0, 1]


def test_bins_may_lie_in_any_order() -> None:
    packing = Packing(np.bincount([6, 6, 4, 4, 4, 1]), 10)
    assert packing.sizes_M.tolist() == [2, 2, 2]
    for starts in ([4, 0, 2], [0, 2, 4], [2, 4, 0]):  # again and again
        first = np.array(starts)
        want = [first[0], first[1], first[0] + 1, first[1] + 1, first[2], first[2] + 1]
        assert packing.seat(first)(np.arange(6)).tolist() == want


def test_items_of_no_length_take_no_room() -> None:
    assert pack(np.bincount([0, 0, 8]), 10).tolist() == [0, 0, 0]
    assert pack(np.bincount([0, 0, 0]), 2).tolist() == [0, 0, 1]
