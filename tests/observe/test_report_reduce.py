"""Curves that are cut down look the same: compared with plain loops over every column."""

import math
import random

import numpy as np
import pytest

from paceline.observe.report.reduce import plain, pooled, reduced


def column(x: float, low: float, high: float, columns: int) -> int:
    return min(int((x - low) / (high - low) * columns), columns - 1)


def noisy(count: int, seed: int) -> tuple[list[float], list[float]]:
    draw = random.Random(seed)
    x = sorted(draw.uniform(0, 1000) for _ in range(count))
    return x, [draw.choice([draw.gauss(0, 1), 3.0, 100.0, -50.0]) for _ in x]


@pytest.mark.parametrize(("count", "columns"), [(5000, 100), (401, 100), (2000, 7), (20_000, 500)])
def test_first_last_lowest_and_highest_of_each_column_stay(count: int, columns: int) -> None:
    x, y = noisy(count, seed=count)
    kept = list(zip(*reduced(np.array(x), np.array(y), columns), strict=True))
    assert set(kept) <= set(zip(x, y, strict=True))
    assert kept == sorted(kept, key=lambda point: point[0])
    assert len(kept) <= 4 * columns
    here: dict[int, list[tuple[float, float]]] = {}
    there: dict[int, list[tuple[float, float]]] = {}
    for points, places in ((zip(x, y, strict=True), here), (kept, there)):
        for point in points:
            places.setdefault(column(point[0], x[0], x[-1], columns), []).append(point)
    for place, points in here.items():
        shown = there[place]
        assert (shown[0], shown[-1]) == (points[0], points[-1])
        for extreme in (min, max):
            assert extreme(of for _, of in shown) == extreme(of for _, of in points)


def test_what_is_few_stays_whole() -> None:
    x, y = noisy(400, seed=1)
    assert reduced(np.array(x), np.array(y), 100) == (x, y)
    assert reduced(np.empty(0), np.empty(0)) == ([], [])
    assert reduced(np.array([3.0]), np.array([math.nan])) == ([3.0], [None])


def test_numbers_that_are_not_finite_leave_a_gap_and_hide_no_extreme() -> None:
    x, y = [float(place) for place in range(4000)], [1.0] * 4000
    y[2000:2010] = [math.inf] * 10
    y[2011] = 9.0
    y[100:200] = [math.nan] * 100  # whole columns
    kept = dict(zip(*reduced(np.array(x), np.array(y), 100), strict=True))
    assert kept[2000.0] is None
    assert kept[2011.0] == 9.0
    assert all(kept[place] is None for place in kept if 100 <= place < 200)
    assert any(100 <= place < 200 for place in kept)


def test_a_time_that_goes_back_is_no_error() -> None:
    x = np.concatenate([np.arange(3000.0), np.arange(2000.0, 4000.0)])
    kept_x, kept_y = reduced(x, np.arange(5000.0), 100)
    assert (kept_x[0], kept_x[-1], kept_y[-1]) == (0.0, 3999.0, 4999.0)


def test_pooling_divides_sums() -> None:
    x, above = noisy(997, seed=4)
    draw = random.Random(5)
    below = [draw.choice([0.0, 1.0, 512.0]) for _ in x]
    found_x, found = pooled(np.array(x), above, below, bins=20)
    sums: dict[int, list[float]] = {}
    for one, up, down in zip(x, above, below, strict=True):
        part = sums.setdefault(column(one, x[0], x[-1], 20), [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((one, 1.0, up, down)):
            part[place] += value
    assert found_x == pytest.approx([part[0] / part[1] for part in sums.values()])
    assert found.tolist() == pytest.approx([part[2] / part[3] for part in sums.values()])


def test_a_part_with_nothing_below_is_a_gap() -> None:
    x, shares = pooled(np.array([1.0, 2.0]), [[1, 0], [2, 0]], [[2, 0], [4, 0]], bins=2)
    assert (x, plain(shares)) == ([1.0, 2.0], [[0.5, None], [0.5, None]])
