"""The curves of the live page."""

import random

import pytest

from paceline.observe.web_curves import POINTS, Curve, Curves


def test_few_values_are_their_own_points() -> None:
    curve = Curve()
    for step in range(1, POINTS + 1):
        curve.add(step, step / 2)
    assert curve.points() == [(step, step / 2) for step in range(1, POINTS + 1)]


@pytest.mark.parametrize("count", [401, 1000, 12345])
def test_many_values_are_means_of_neighbours(count: int) -> None:
    """Each point is the mean of the values from behind the point before it, worked out from all of them."""
    values = [random.Random(count).random() for _ in range(count)]
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    assert POINTS / 2 <= len(points) <= POINTS
    first, sizes = 0, []
    for middle, mean in points:
        last = round(2 * middle) - first
        expected = values[first : last + 1]
        assert mean == pytest.approx(sum(expected) / len(expected))
        first = last + 1
        sizes.append(len(expected))
    assert first == count
    assert len(set(sizes[:-1])) == 1, "as fine in old steps as in new ones"


def test_what_is_made_again_replaces_what_was() -> None:
    curve = Curve()
    for step in range(10):
        curve.add(step, 1.0)
    for step in (5, 6):
        curve.add(step, 2.0)
    assert curve.points() == [*((step, 1.0) for step in range(5)), (5, 2.0), (6, 2.0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "nan", None, "<b>"])
def test_what_is_no_number_has_no_point(value: object) -> None:
    curve = Curve()
    curve.add(1, 3.0)
    curve.add(2, value)
    curve.add("3", 1.0)
    curve.add(10**400, 1.0)
    assert curve.points() == [(1, 3.0)]


def test_events() -> None:
    curves = Curves()
    curves.apply({"event": "step", "step": 7, "loss": 9.0, "acceptance": 1.0})
    curves.apply({"event": "started"})
    curves.apply({"event": "step", "step": 0, "loss": 4.0, "acceptance": 1.5})
    curves.apply({"event": "step", "step": 4, "loss": 3.0, "acceptance": 2.5})
    curves.apply({"event": "held_out", "steps": 5, "loss": 3.5})
    curves.apply({"event": "evaluated", "steps": 5, "tau": 2.25})
    curves.apply({"event": "checkpoint", "steps": 5})
    assert curves.as_dict() == {
        "loss": [(1, 4.0), (5, 3.0)],
        "acceptance": [(1, 1.5), (5, 2.5)],
        "held_out": [(5, 3.5)],
        "tau": [(5, 2.25)],
    }
