"""What a page tells of a run, folded from its events.

Steps that are told again after a resume take the place of those told before, and what lies behind the checkpoint that a
run goes on from is dropped: the weights that are there now never saw it.

Shapes: N logged steps, K drafted slots of a block.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from paceline.observe.reading import understood
from paceline.observe.state import FAULTS, RunState

# What a page lists with its time: faults and guards, what went on behind an end, and what was left out.
LISTED = FAULTS | {"unreadable", "resumed", "interrupted", "checkpoint_skipped", "evaluation_skipped"}


@dataclass(frozen=True, slots=True)
class Steps:
    """The logged steps in ascending order. Steps count from 1: how many were done when it was told."""

    done_N: Float[np.ndarray, " N"]
    loss_N: Float[np.ndarray, " N"]
    acceptance_N: Float[np.ndarray, " N"]
    loss_sum_N: Float[np.ndarray, " N"]
    weight_sum_N: Float[np.ndarray, " N"]
    applied_N: Bool[np.ndarray, " N"]
    accepted_NK: Float[np.ndarray, "N K"]
    available_NK: Float[np.ndarray, "N K"]
    tokens_N: Float[np.ndarray, " N"]
    padded_N: Float[np.ndarray, " N"]


@dataclass(slots=True)
class Role:
    """One role: when it was in which state, and how it spent each interval."""

    device: str
    states: list[tuple[float, str]] = field(default_factory=list)  # seconds since the start, state from then on
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)  # end, length, busy, wait
    waits_for: dict[str, float] = field(default_factory=dict)  # seconds by what it waited for


@dataclass(slots=True)
class History:
    """Everything a page shows of a run's events. What is true at the end is in `state`."""

    state: RunState = field(default_factory=RunState)
    warm_start: dict[str, Any] = field(default_factory=dict)
    held_out: dict[int, dict[str, Any]] = field(default_factory=dict)  # by steps done
    evaluated: dict[int, dict[str, Any]] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    gpus: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)  # end, length, bytes, of, utilisation
    gpu_names: dict[str, str] = field(default_factory=dict)  # by device
    host: list[tuple[float, float]] = field(default_factory=list)  # s, bytes
    faults: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)  # after how many steps
    rolled_back: list[tuple[int, int]] = field(default_factory=list)  # after how many steps, to how many
    trained: dict[str, Any] = field(default_factory=dict)  # the event, once it is there
    began: float | None = None  # seconds since 1970
    last: float = 0.0
    away_s: float = 0.0  # how long nothing ran, between an end and a resume
    _steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long the run was up."""
        return self.at(self.last)

    def at(self, t: float) -> float:
        """Return how long the run had been up at a time. Time in which nothing ran does not count."""
        return max(0.0, t - (self.began or t) - self.away_s)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        kind, t = event.get("event"), number(event.get("t"))
        if not math.isfinite(t):
            return
        self.state.apply(event)
        self.began = t if self.began is None else self.began
        if kind == "resumed":
            self._resume(whole(event.get("steps")), t)
        self.last = max(self.last, t)
        if kind in LISTED or (kind == "on_end" and event.get("message")):
            self.faults.append(dict(event))
        if isinstance(kind, str) and (take := _TAKES.get(kind)):
            take(self, event, self.at(t))

    def _resume(self, steps: int, t: float) -> None:
        for told in (self.held_out, self.evaluated):
            for behind in [done for done in told if done > steps]:
                del told[behind]
        for behind in [step for step in self._steps if step >= steps]:
            del self._steps[behind]
        for role in self.roles.values():
            role.states.append((self.at(self.last), "stopped"))
        self.away_s += max(0.0, t - self.last)
        self.resumed.append(steps)
        self.trained = {}

    def _step(self, event: Mapping[str, Any], s: float) -> None:
        self._steps[whole(event.get("step"))] = {key: event.get(key) for key in _KEPT}

    def _role(self, event: Mapping[str, Any], s: float) -> None:
        self._named(event).states.append((s, str(event.get("state"))))

    def _sample(self, event: Mapping[str, Any], s: float) -> None:
        length = number(event.get("s"))
        for told in event.get("roles") or []:
            role, wait = self._named(told), number(told.get("wait_share"))
            role.samples.append((s, length, number(told.get("busy_share")), wait))
            for what, part in (told.get("waits") or {told.get("waits_for"): wait}).items():
                if what and number(part) * length > 0:
                    role.waits_for[str(what)] = role.waits_for.get(str(what), 0.0) + number(part) * length
        for gpu in event.get("gpus") or []:
            device = str(gpu.get("device"))
            values = (gpu.get(key) for key in ("memory_used_bytes", "memory_total_bytes", "utilisation"))
            self.gpus.setdefault(device, []).append((s, length, *map(number, values)))
            self.gpu_names[device] = str(gpu.get("name"))
        if event.get("host_bytes") is not None:
            self.host.append((s, number(event["host_bytes"])))

    def _rolled_back(self, event: Mapping[str, Any], s: float) -> None:
        self.rolled_back.append((whole(event.get("steps")), whole(event.get("to"))))

    def _named(self, told: Mapping[str, Any]) -> Role:
        name = str(told.get("role"))
        role = self.roles.setdefault(name, Role(""))
        role.device = str(told.get("device") or role.device)
        return role

    def steps(self) -> Steps:
        """Return the logged steps."""
        ordered = sorted(self._steps)
        rows = [self._steps[step] for step in ordered]
        width = max((len(row["accepted_K"] or ()) for row in rows), default=0)

        def column(key: str) -> Float[np.ndarray, " N"]:
            return np.array([number(row[key]) for row in rows], dtype=np.float64)

        def counts(key: str) -> Float[np.ndarray, "N K"]:
            lists = ([*map(number, row[key] or ())] for row in rows)
            padded = [values + [0.0] * (width - len(values)) for values in lists]
            return np.array(padded, dtype=np.float64).reshape(len(rows), width)

        return Steps(
            done_N=np.array(ordered, dtype=np.float64) + 1,
            loss_N=column("loss"),
            acceptance_N=column("acceptance"),
            loss_sum_N=column("loss_sum"),
            weight_sum_N=column("weight_sum"),
            applied_N=np.array([row["applied"] is not False for row in rows], dtype=bool),
            accepted_NK=counts("accepted_K"),
            available_NK=counts("available_K"),
            tokens_N=column("tokens"),
            padded_N=column("padded_tokens"),
        )


_KEPT = (
    "loss",
    "acceptance",
    "loss_sum",
    "weight_sum",
    "applied",
    "accepted_K",
    "available_K",
    "tokens",
    "padded_tokens",
)
_TAKES: dict[str, Any] = {
    "step": History._step,
    "role": History._role,
    "sample": History._sample,
    "rolled_back": History._rolled_back,
    "trained": lambda run, event, s: setattr(run, "trained", dict(event)),
    "warm_start": lambda run, event, s: setattr(run, "warm_start", dict(event)),
    "held_out": lambda run, event, s: run.held_out.__setitem__(whole(event.get("steps")), dict(event)),
    "evaluated": lambda run, event, s: run.evaluated.__setitem__(whole(event.get("steps")), dict(event)),
}


def history(events: Iterable[Mapping[str, Any]], name: str = "a run") -> History:
    """Return what a page tells of these events of the run `name`, oldest first.

    Raises:
        UserError: an event's values are of other kinds than docs/events.md has them.
    """
    run = History()
    for event in events:
        kind = str(event.get("event"))
        if kind == "started":  # anew in the same folder
            run = History()
        with understood(name, kind):
            run.apply(event)
    return run


def number(value: Any) -> float:
    """Return a number as an event holds it; what is none is nan."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def whole(value: Any) -> int:
    """Return a count as an event holds it; what is none is 0."""
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0
