"""What a thread does now: it starts, works, or waits and for what; and how long it has waited for what so far.

Written by the thread, read by who watches over it. A change is one assignment of a new object that holds everything, so
there is no lock and no reader sees half of a change. A wait reads the clock when it begins and when it ends; work reads
none: who watches sees that the moment is another one than at the last look. What is not said to be a wait is work. A
thread that only waits for others of its own lets their pulses stand in for its own.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

_clock = time.monotonic


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What a thread does, from when this was made until another takes its place."""

    kind: Literal["starts", "works", "waits", "patient"]
    what: str = ""  # is waited for
    sort: str = ""  # the same without what changes from one time to the next
    since: float = 0.0  # by the monotonic clock: when the outermost wait began
    waited: Mapping[str, float] = field(default_factory=dict)  # seconds before this wait, by sort


class Pulse:
    """The moment of one thread. `began` is when it first worked, `others` are the pulses that stand in for this one."""

    def __init__(self) -> None:
        self.now = Moment("starts")
        self.began: float | None = None
        self.others: tuple[Pulse, ...] = ()

    def work(self) -> None:
        """From now on the thread works on something new."""
        self.began = _clock() if self.began is None else self.began
        self.now = Moment("works", waited=self.now.waited)

    def rest(self) -> None:
        """Say that the thread has ended before those beside which it stands in for another."""
        what = "the others of its role"
        self.now = Moment("waits", what, what, _clock(), self.now.waited)

    def moments(self) -> tuple[Moment, ...]:
        """Return what the thread does, or each of those that stand in for it."""
        return tuple(other.now for other in self.others) or (self.now,)

    def waited(self, until: float) -> dict[str, float]:
        """Return for how many seconds the thread has waited for each thing so far, a wait under way included; of those
        that stand in for it the mean."""
        if others := [other.waited(until) for other in self.others]:
            sorts = sorted({sort for found in others for sort in found})
            return {sort: sum(found.get(sort, 0.0) for found in others) / len(others) for sort in sorts}
        moment = self.now
        found = dict(moment.waited)
        if moment.kind in ("waits", "patient"):
            found[moment.sort] = found.get(moment.sort, 0.0) + max(0.0, until - moment.since)
        return found


_own = threading.local()


def adopt(pulse: Pulse) -> None:
    """Make `pulse` this thread's."""
    _own.pulse = pulse


@contextmanager
def standing_in(others: Sequence[Pulse]) -> Iterator[None]:
    """Let these stand in for this thread's pulse until the block ends."""
    pulse: Pulse | None = getattr(_own, "pulse", None)
    if pulse is None:
        yield
        return
    pulse.others = tuple(others)
    try:
        yield
    finally:
        pulse.others = ()


def goes_on() -> None:
    """Say that this thread has done a part of its work, so that the time it may take begins anew."""
    pulse: Pulse | None = getattr(_own, "pulse", None)
    if pulse is not None and pulse.now.kind == "works":
        pulse.work()


def waiting(what: str, sort: str | None = None) -> AbstractContextManager[None]:
    """Say that this thread waits for something that others have to do, until the block ends.

    `sort` names it where `what` says which one: waits for things of a sort are added up.
    """
    return _during("waits", what, sort or what)


def patient(what: str) -> AbstractContextManager[None]:
    """Say that this thread waits for something that may take as long as it likes, as room on a disk."""
    return _during("patient", what, what)


@contextmanager
def _during(kind: Literal["waits", "patient"], what: str, sort: str) -> Iterator[None]:
    pulse: Pulse | None = getattr(_own, "pulse", None)
    if pulse is None or pulse.now.kind == "starts":  # whose limit is another, and counts on
        yield
        return
    before = pulse.now
    if before.kind == "works":
        pulse.now = moment = Moment(kind, what, sort, _clock(), before.waited)
        try:
            yield
        finally:
            seconds = moment.waited.get(sort, 0.0) + _clock() - moment.since
            pulse.now = Moment("works", waited={**moment.waited, sort: seconds})
    else:  # a wait within a wait is a part of the outer one
        pulse.now = Moment(kind, what, before.sort, before.since, before.waited)
        try:
            yield
        finally:
            pulse.now = Moment(before.kind, before.what, before.sort, before.since, before.waited)
