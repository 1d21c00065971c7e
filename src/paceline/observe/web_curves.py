"""The curves of a run that its live page draws: few points, however long the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POINTS = 400  # of a curve at most
_STEPS, _VALUE = 2**53, 1e300  # that a run never reaches; means of more are no numbers any more


@dataclass(slots=True)
class _Point:
    """Neighbouring values as one: their mean, at the middle of their steps."""

    first: int
    last: int
    count: int
    total: float


class Curve:
    """A value over the steps that were done. Once it has too many points, neighbours become one, pair by pair."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._full = 1  # values that make a point

    def add(self, steps: Any, value: Any) -> None:
        """Add a value. What was there from that step on goes: it is made again.

        A value that is no finite number, or beyond all that a run has, has no point.
        """
        if not isinstance(steps, int) or abs(steps) > _STEPS or not isinstance(value, int | float):
            return
        while self._points and self._points[-1].last >= steps:
            self._points.pop()
        if not abs(value) < _VALUE:  # also nan
            return
        if self._points and self._points[-1].count < self._full:
            last = self._points[-1]
            last.last, last.count, last.total = steps, last.count + 1, last.total + value
        else:
            self._points.append(_Point(steps, steps, 1, value))
        if len(self._points) > POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [_Point(a.first, b.last, a.count + b.count, a.total + b.total) for a, b in pairs] + odd
            self._full *= 2

    def points(self) -> list[tuple[float, float]]:
        """Return steps and values, in order."""
        return [((point.first + point.last) / 2, point.total / point.count) for point in self._points]


class Curves:
    """The losses and acceptance lengths of a run, as its events tell them."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._begin()

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take an event into account."""
        kind = event.get("event")
        if kind == "started":
            self._begin()
        elif kind == "step" and isinstance(event.get("step"), int):
            done = event["step"] + 1
            self._curves["loss"].add(done, event.get("loss"))
            self._curves["acceptance"].add(done, event.get("acceptance"))
        elif kind == "held_out":
            self._curves["held_out"].add(event.get("steps"), event.get("loss"))
        elif kind == "evaluated":
            self._curves["tau"].add(event.get("steps"), event.get("tau"))

    def as_dict(self) -> dict[str, list[tuple[float, float]]]:
        """Return the points of each curve by its name."""
        return {name: curve.points() for name, curve in self._curves.items()}

    def _begin(self) -> None:
        self._curves = {name: Curve() for name in ("loss", "held_out", "acceptance", "tau")}
