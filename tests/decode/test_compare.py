"""The paired bootstrap against brute force and against the normal approximation."""

import itertools

import numpy as np
import pytest

from paceline.decode.compare import paired_bootstrap, resampled_means


def test_intervals_of_three_prompts_against_all_27_resamples() -> None:
    own, other = np.array([2.0, 5.0, 3.0]), np.array([2.5, 4.0, 1.0])
    every = [np.mean([(own - other)[at] for at in drawn]) for drawn in itertools.product(range(3), repeat=3)]
    found = paired_bootstrap(own, other, resamples=200_000)
    assert found["difference"]["mean"] == pytest.approx(0.5 * 5 / 3)
    # The quantiles of 27 equally likely values; a mean is one of few, so the drawn ones agree to the digit.
    low, high = np.quantile(np.repeat(every, 10_000), [0.025, 0.975])
    assert (found["difference"]["low"], found["difference"]["high"]) == pytest.approx((low, high))
    drawn = resampled_means((own - other)[None], 200_000, 1)[0]
    for value in set(np.round(every, 6)):
        expected = np.mean(np.isclose(every, value))
        assert np.mean(np.isclose(drawn, value, atol=1e-6)) == pytest.approx(expected, abs=0.01)


def test_intervals_of_many_prompts_are_those_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.normal(4, 2, 1500)  # shared, so it cancels
    own, other = difficulty + 0.2 + rng.normal(0, 0.5, 1500), difficulty
    found = paired_bootstrap(own, other)
    for key, values in (("own", own), ("other", other), ("difference", own - other)):
        half = 1.96 * values.std() / np.sqrt(1500)
        assert found[key]["mean"] == pytest.approx(values.mean())
        assert found[key]["low"] == pytest.approx(values.mean() - half, abs=0.06 * half)
        assert found[key]["high"] == pytest.approx(values.mean() + half, abs=0.06 * half)
    assert found["difference"]["low"] > 0, "pairing sees what the two intervals hide"
    assert found["own"]["low"] < found["other"]["high"]
    assert (found["prompts"], found["resamples"], found["confidence"]) == (1500, 10_000, 0.95)


def test_equal_runs_have_no_difference() -> None:
    values = np.array([1.0, 4.0, 2.5])
    assert paired_bootstrap(values, values)["difference"] == {"mean": 0, "low": 0, "high": 0}


def test_draws_are_the_same_whatever_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = np.arange(7.0), np.arange(7.0)[::-1].copy()
    whole = paired_bootstrap(own, other, resamples=1000)
    monkeypatch.setattr("paceline.decode.compare._MOST_DRAWS", 70)
    assert paired_bootstrap(own, other, resamples=1000) == whole
