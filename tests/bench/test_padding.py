"""The least padding against every choice of edges, and the figures known for the run's lengths."""

from itertools import combinations

import numpy as np
import pytest

from paceline.bench import padding
from paceline.bench.lengths import run_lengths


def padded(lengths: np.ndarray, edges: tuple[int, ...]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths.tolist())


@pytest.mark.parametrize("seed", range(4))
def test_least_padding_is_that_of_the_best_edges(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 14, 60) ** 2
    distinct = sorted(set(lengths.tolist()))
    found = padding.least_padding(lengths, (1, 2, 3, 4, 20))
    for buckets in (1, 2, 3, 4):
        choices = ((*inner, distinct[-1]) for inner in combinations(distinct[:-1], buckets - 1))
        least = min(padded(lengths, edges) for edges in choices)
        assert found[buckets] == 1 - lengths.sum() / least
    assert found[20] == 0, "a bucket for each length"


def test_equal_count_padding_by_hand() -> None:
    lengths = np.array([1, 2, 3, 4, 10, 20])
    assert padding.equal_count_padding(lengths, 2) == 1 - 40 / (3 + 3 + 3 + 20 + 20 + 20)


def test_figures_of_the_run() -> None:
    """Known from the distribution's other uses; planning finds edges that are nearly as good as any."""
    lengths = run_lengths()
    least = padding.least_padding(lengths, (6, 12, 24))
    assert [round(least[buckets], 2) for buckets in (6, 12, 24)] == [0.20, 0.11, 0.06]
    assert padding.equal_count_padding(lengths, 6) == pytest.approx(0.26, abs=0.005)
    some = lengths[:50_000]
    static = padding.static_padding(some, 6)
    assert 0 <= static - padding.least_padding(some, (6,))[6] <= 0.005


def test_layouts_in_their_order() -> None:
    some = run_lengths(50_000)
    assert padding.packed_padding(some, 8192) <= 0.01
    assert padding.packed_padding(some, 8192) < padding.trim_padding(some) < padding.static_padding(some, 24)
