"""The schedule as a function of the step."""

from itertools import pairwise

import pytest

from paceline.config import TrainSettings
from paceline.train.optim import learning_rate


def test_warm_up_then_cosine() -> None:
    settings = TrainSettings(lr=1.0, warmup_share=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[55] == pytest.approx(0.6)  # half way of the cosine
    assert 0.2 < rates[99] < 0.21
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_one_step_is_a_step() -> None:
    assert learning_rate(0, 1, TrainSettings(lr=0.5)) == 0.5
