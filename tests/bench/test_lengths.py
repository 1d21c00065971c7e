"""The lengths against the distribution that is documented, and against figures made known with it."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.bench.lengths import DECAY, EDGES, SAMPLES, THOUSANDS, run_lengths


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return run_lengths()


def test_each_bucket_holds_its_reported_thousands(lengths: np.ndarray) -> None:
    assert len(lengths) == SAMPLES == 1_095_082
    assert lengths.dtype == np.int32
    held, _ = np.histogram(lengths[:1_095_000], bins=[*EDGES[:-1], EDGES[-1] - 1])
    assert held.tolist() == [1000 * thousands for thousands in THOUSANDS]
    assert (lengths.min(), lengths.max()) == (EDGES[0], EDGES[-1] - 1)


def test_the_mean_and_the_shape_inside_buckets(lengths: np.ndarray) -> None:
    assert lengths.mean() == pytest.approx(2296.4, abs=0.1)
    for low, high in pairwise(EDGES[:-1]):
        inside = lengths[(lengths >= low) & (lengths < high)]
        assert inside.mean() == pytest.approx((low + high - 1) / 2, abs=3)
        assert inside.std() == pytest.approx((high - low) / np.sqrt(12), rel=0.01)
    tail = lengths[lengths >= EDGES[-2]] - EDGES[-2]
    half = DECAY * np.log(2)
    assert (tail < half).mean() == pytest.approx((1 - 0.5) / (1 - np.exp(-(EDGES[-1] - EDGES[-2]) / DECAY)), abs=0.005)


def test_lengths_are_in_no_order(lengths: np.ndarray) -> None:
    first, last = lengths[:100_000], lengths[-100_000:]
    assert first.mean() == pytest.approx(last.mean(), rel=0.01)


def test_seed_and_count(lengths: np.ndarray) -> None:
    assert np.array_equal(run_lengths(1000), lengths[:1000])
    assert np.array_equal(run_lengths(), lengths)
    assert not np.array_equal(run_lengths(1000, seed=1), lengths[:1000])
    assert len(run_lengths(1_200_000)) == 1_200_000
