"""The guard's decisions against a plain statement of them, the same after its state went through JSON."""

import json
import math
import random
from typing import Any

import pytest

from paceline.config import GuardSettings
from paceline.records import StepReport
from paceline.train.guard import Guard


def report(step: int, loss: float, norm: float, *, applied: bool) -> StepReport:
    weight = 2.0
    return StepReport(
        step, 0, loss * weight, weight, (0,), (1,), 1, 1, 1, 1, 1, lr=1e-3, grad_norm=norm, applied=applied
    )


def drawn(draw: random.Random, steps: int) -> list[tuple[float, float]]:
    """Losses and norms as in a run that learns, a spike or something that is not finite in every sixth step."""
    found = []
    for step in range(steps):
        loss, norm = 7 * 0.98**step * draw.uniform(0.5, 2), 3 * 0.99**step * draw.uniform(0.3, 3)
        if draw.random() < 1 / 6:
            loss, norm = draw.choice([(math.nan, norm), (loss, math.inf), (100 * loss, norm), (loss, 100 * norm)])
        found.append((loss, norm))
    return found


def middle(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@pytest.mark.parametrize("seed", range(10))
def test_decisions_equal_a_plain_statement_of_them(seed: int) -> None:
    draw = random.Random(seed)
    window, allowed, clip = draw.choice([4, 7, 20]), draw.choice([1, 2, 4]), draw.choice([0.1, 1.0])
    spike = draw.choice([None, 2.0, 8.0])
    guard = Guard(GuardSettings(spike=spike, window=window, rejected=allowed), clip)
    history: list[tuple[int, float, float, bool]] = []
    for step, (loss, norm) in enumerate(drawn(draw, 120)):
        good = [(one, other) for _, one, other, applied in history if applied][-window:]
        largest = [math.inf, math.inf]
        if spike is not None and 2 * len(good) >= window:
            largest = [max(spike * middle([g[0] for g in good]), 1.0), spike * max(middle([g[1] for g in good]), clip)]
        assert list(guard.limits()) == largest
        applied = math.isfinite(loss) and math.isfinite(norm) and loss <= largest[0] and norm <= largest[1]
        history.append((step, loss, norm, applied))
        broken = guard.add(report(step, loss, norm, applied=applied))
        assert (broken is None) == applied
        if broken is not None:
            wrong = not math.isfinite(loss) or loss > largest[0]
            assert broken.rule == ("loss" if wrong else "grad_norm")
            assert broken.limit == largest[0 if wrong else 1]
        refused = [at for at, _, _, fine in history[-window:] if not fine]
        assert guard.exceeded == (len(refused) > allowed)
        assert guard.first_rejected == (refused[0] if refused else None)
        assert guard.applied == sum(fine for *_, fine in history)
        guard = Guard(guard.settings, clip, json.loads(json.dumps(guard.state(), allow_nan=False)))
    assert any(not fine for *_, fine in history)


def test_going_back_begins_a_new_history() -> None:
    guard = Guard(GuardSettings(window=2, rejected=0), 1.0)
    for step in range(4):
        guard.add(report(step, 3.0, 1.0, applied=True))
    guard.add(report(4, math.nan, 1.0, applied=False), rows=range(100))
    assert guard.exceeded
    assert guard.rejected == [(4, "loss nan, gradient norm 1", list(range(8)))]
    guard.roll_back(applied=2)
    assert (guard.applied, guard.rolled_back, guard.exceeded) == (2, 1, False)
    assert list(guard.limits()) == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("loss", "norm", "sentence"),
    [
        (math.nan, 1.0, "loss nan is not finite"),
        (3.0, math.inf, "gradient norm inf is not finite"),
        (31.0, 1.0, r"loss 31 is over 30 \(see guard.spike\)"),
        (3.0, 11.0, r"gradient norm 11 is over 10 \(see guard.spike\)"),
    ],
)
def test_why_is_said(loss: float, norm: float, sentence: str) -> None:
    guard = Guard(GuardSettings(window=2), 1.0)
    guard.add(report(0, 3.0, 1.0, applied=True))
    broken: Any = guard.add(report(1, loss, norm, applied=False))
    assert str(broken) == sentence.replace("\\", "")
