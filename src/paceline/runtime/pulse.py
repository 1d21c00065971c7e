"""What a thread does now: it starts, works, or waits and for what. Written by the thread, read by who watches over it.

A change is one assignment of a new object, so there is no lock, and no clock is read: who watches sees that the moment
is another one than at the last look and counts from there. What is not said to be a wait is work.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What a thread does, from when this was made until another takes its place."""

    kind: Literal["starts", "works", "waits", "patient"]
    what: str = ""  # is waited for


class Pulse:
    """The moment of one thread."""

    def __init__(self) -> None:
        self.now = Moment("starts")

    def work(self) -> None:
        """From now on the thread works on something new."""
        self.now = Moment("works")


_own = threading.local()


def adopt(pulse: Pulse) -> None:
    """Make `pulse` this thread's."""
    _own.pulse = pulse


def waiting(what: str) -> AbstractContextManager[None]:
    """Say that this thread waits for something that others have to do, until the block ends."""
    return _during(Moment("waits", what))


def patient(what: str) -> AbstractContextManager[None]:
    """Say that this thread waits for something that may take as long as it likes, as room on a disk."""
    return _during(Moment("patient", what))


@contextmanager
def _during(moment: Moment) -> Iterator[None]:
    pulse: Pulse | None = getattr(_own, "pulse", None)
    if pulse is None or pulse.now.kind == "starts":  # whose limit is another, and counts on
        yield
        return
    before, pulse.now = pulse.now, moment
    try:
        yield
    finally:
        pulse.now = Moment(before.kind, before.what)
