"""Which updates are applied, and when too many were not: a pure function of what the steps before told.

The limits are known before a step runs, so the device decides with them and nothing waits (see DrafterStep.update).
Every rank keeps a guard of its own: sums are equal on all, so all decide the same. The state is plain data and goes
into the checkpoint; a resumed run makes the same decisions, because a float's decimal form gives the same float back.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.config import GuardSettings
from paceline.records import StepReport

_LOSS = 1.0  # nats; a loss below is no spike
_ROWS = 8  # of a rejected step that are kept for the report; the quarantine file has them all


class Limits(NamedTuple):
    """The largest loss and gradient norm that are applied."""

    loss: float
    grad_norm: float


class Broken(NamedTuple):
    """The rule that a step broke which was not applied."""

    rule: str  # loss or grad_norm
    value: float
    limit: float

    def __str__(self) -> str:
        name = {"loss": "loss", "grad_norm": "gradient norm"}[self.rule]
        if not math.isfinite(self.value):
            return f"{name} {self.value} is not finite"
        return f"{name} {self.value:.4g} is over {self.limit:.4g} (see guard.spike)"


class Rejected(NamedTuple):
    """A step that was not applied, and some of the rows that this rank gave to it."""

    step: int
    told: str
    rows: Sequence[int]


class Guard:
    """The history of a run's updates."""

    def __init__(self, settings: GuardSettings, clip: float, state: Mapping[str, Any] | None = None) -> None:
        """Go on from what `state` returned, or begin. `clip` is train.clip, which no median counts below."""
        self.settings, self._clip = settings, clip
        given = state or {"applied": 0, "losses": [], "norms": [], "rejected": [], "rolled_back": 0}
        self.applied: int = given["applied"]  # updates that are in the weights: the schedule's position
        self.rolled_back: int = given["rolled_back"]  # times
        self.rejected = [Rejected(*one) for one in given["rejected"]]  # in the last `window` steps
        self._losses: list[float] = given["losses"]  # of the last `window` steps that were applied
        self._norms: list[float] = given["norms"]

    def limits(self) -> Limits:
        """Return what the next step may have: no limit until half a window of steps was applied.

        Where all but everything is known by heart, losses and norms near 0 differ by large factors and harm nothing:
        an update is never longer than a clipped one.
        """
        spike = self.settings.spike
        if spike is None or len(self._losses) < self.settings.window / 2:
            return Limits(math.inf, math.inf)
        return Limits(max(spike * median(self._losses), _LOSS), spike * max(median(self._norms), self._clip))

    def add(self, report: StepReport, rows: Sequence[int] = ()) -> Broken | None:
        """Take in the step that follows, and return which rule it broke if it was not applied; `rows` were in it."""
        window, broken = self.settings.window, None
        if report.applied:
            self.applied += 1
            self._losses = [*self._losses, report.loss][-window:]
            self._norms = [*self._norms, report.grad_norm][-window:]
        else:
            broken = broken_rule(report, self.limits())
            told = f"loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}"
            self.rejected.append(Rejected(report.step, told, list(rows[:_ROWS])))
        self.rejected = [rejected for rejected in self.rejected if rejected.step > report.step - window]
        return broken

    @property
    def exceeded(self) -> bool:
        """Whether more steps of the window were rejected than may be."""
        return len(self.rejected) > self.settings.rejected

    @property
    def first_rejected(self) -> int | None:
        """The window's first step that was rejected."""
        return self.rejected[0].step if self.rejected else None

    def roll_back(self, applied: int) -> None:
        """Begin anew from weights that hold `applied` updates."""
        self.applied, self._losses, self._norms, self.rejected = applied, [], [], []
        self.rolled_back += 1

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "applied": self.applied,
            "losses": list(self._losses),
            "norms": list(self._norms),
            "rejected": [list(rejected) for rejected in self.rejected],
            "rolled_back": self.rolled_back,
        }


def broken_rule(report: StepReport, limits: Limits) -> Broken:
    """Return the rule that a step broke which was not applied."""
    loss = Broken("loss", report.loss, limits.loss)
    norm = Broken("grad_norm", report.grad_norm, limits.grad_norm)
    return next((one for one in (loss, norm) if not math.isfinite(one.value) or one.value > one.limit), norm)
