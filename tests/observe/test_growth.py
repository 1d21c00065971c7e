"""Memory that grows is told with its slope; noise, a jump and what fills up are not."""

import os
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.observe.growth import Growth, MemoryWatch, memory, slope


def watched(mib: Callable[[float], float], minutes: int, every_s: float = 7.0) -> list[tuple[float, Growth]]:
    """Return when, in minutes, a watch warned that is asked to look after every step."""
    now, told, draw = [0.0], [], random.Random(0)
    watch = MemoryWatch(
        (),
        warn=lambda growth: told.append((now[0] / 60, growth)),
        read=lambda devices: {"host": mib(now[0] / 60)},
        clock=lambda: now[0],
    )
    while now[0] < 60 * minutes:
        watch.look()
        now[0] += every_s * draw.uniform(0.9, 1.1)
    return told


def noise(seed: int, size: float) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.gauss(0, size)


@pytest.mark.parametrize("seed", range(5))
def test_flat_with_noise_is_silent(seed: int) -> None:
    rough = noise(seed, 10)
    assert watched(lambda minute: 5000 + rough(), 600) == []


@pytest.mark.parametrize("every_s", [7.0, 200.0])
@pytest.mark.parametrize("rate", [6.0, 40.0, 700.0])
def test_a_leak_is_told_with_its_slope_and_again_when_it_has_doubled(rate: float, every_s: float) -> None:
    rough = noise(1, rate / 20)
    told = watched(lambda minute: 1000 + rate * minute + rough(), 3000, every_s)
    assert told
    for minute, growth in told:
        assert growth.where == "host"
        assert growth.mib_per_min == pytest.approx(rate, rel=0.1)
        assert growth.mib == pytest.approx(1000 + rate * minute, rel=0.1)
    assert told[0][0] < max(60, 30 * every_s / 60)
    for (_, one), (_, other) in pairwise(told):
        assert 2 * one.mib <= other.mib < 2.7 * one.mib + 25 * rate * max(1, every_s / 60)


def test_a_cache_that_fills_up_is_told_early_or_not_at_all() -> None:
    for fill_min in (2, 10, 30):
        told = watched(lambda minute, full=fill_min: 1000 + 4096 * (1 - np.exp(-minute / full)), 600)
        assert all(minute < 10 * fill_min for minute, _ in told)
    assert watched(lambda minute: 1000 + 4096 * (1 - np.exp(-minute / 2)), 600) == []


def test_a_jump_and_an_epochs_sawtooth_are_silent() -> None:
    assert watched(lambda minute: 1000.0 + 5000 * (minute > 100), 300) == []
    for minutes in (3, 7, 10, 15):
        assert watched(lambda minute, minutes=minutes: 1000 + 40 * (minute % minutes), 300) == []


def test_the_slope_is_that_of_least_squares() -> None:
    draw = np.random.default_rng(0)
    s = np.sort(draw.uniform(0, 3000, 30))
    mib = draw.normal(0, 50, 30) + s
    expected = 60 * np.polyfit(s, mib, 1)[0]
    assert slope(list(zip(s.tolist(), mib.tolist(), strict=True))) == pytest.approx(expected)


def test_what_is_measured_is_what_was_allocated_and_not_what_is_mapped(tmp_path: Any) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(1 << 20) * 64)
    before = memory(("cpu",))
    assert before.keys() == {"host"}
    mapped = np.memmap(path, mode="r")
    assert int(mapped.max()) == 255  # read
    seen = memory(("cpu",))["host"] - before["host"]
    held = np.ones(64 << 20, dtype=np.uint8)
    grown = memory(("cpu",))["host"] - before["host"] - seen
    assert abs(seen) < 16
    assert 56 < grown < 80
    del held
