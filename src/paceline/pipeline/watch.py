"""Looks at what roles do and finds what hangs, or that nobody works any more.

Time is counted between looks and bounded there: a process that was stopped and goes on has not worked meanwhile.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from paceline.runtime.pulse import Moment, Pulse

Who = TypeVar("Who")

LOOK_S = 0.5  # between two looks
_LONGEST_S = 4 * LOOK_S  # that counts between two


class Watch(Generic[Who]):
    """Knows since when everyone does what it does.

    Work may take `work_timeout_s` and starting `ready_timeout_s`. All may wait for one another for as long as work may
    take, unless what `moving` returns changes meanwhile, as when data is being read.
    """

    def __init__(
        self,
        work_timeout_s: float,
        ready_timeout_s: float,
        *,
        moving: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.work_timeout_s, self.ready_timeout_s = work_timeout_s, ready_timeout_s
        self._moving, self._clock = moving, clock
        self._last = clock()
        self._time = 0.0  # that counts
        self._since: dict[tuple[Who, int], tuple[Moment, float]] = {}  # of each thread that counts
        self._moved: tuple[object, float] = (None, 0.0)

    def look(self, pulses: Mapping[Who, Pulse]) -> None:
        """Take note of what everyone does now."""
        now = self._clock()
        self._time += min(now - self._last, _LONGEST_S)
        self._last = now
        seen = self._since
        self._since = {}
        for who, pulse in pulses.items():
            for at, moment in enumerate(pulse.moments()):
                before = seen.get((who, at))
                same = before is not None and before[0] is moment
                self._since[who, at] = before if before is not None and same else (moment, self._time)
        # Who has just left may have woken others, which did not come to it yet.
        if (moved := self._moving()) != self._moved[0] or self._since.keys() != seen.keys():
            self._moved = moved, self._time

    def hung(self) -> dict[Who, float]:
        """Return who works or starts for too long, and for how many seconds."""
        limits = {"works": self.work_timeout_s, "starts": self.ready_timeout_s}
        found: dict[Who, float] = {}
        for (who, _), (moment, since) in self._since.items():
            age = self._time - since
            if moment.kind in limits and age > limits[moment.kind]:
                found[who] = max(age, found.get(who, 0.0))
        return found

    def stalled(self) -> dict[Who, str]:
        """Return what everyone waits for if all have for too long, else nothing."""
        began = max([self._moved[1], *(since for _, since in self._since.values())])
        if self._time - began <= self.work_timeout_s or any(m.kind != "waits" for m, _ in self._since.values()):
            return {}
        return {who: moment.what for (who, _), (moment, _) in self._since.items()}


def write_stacks(path: Path, *, also_stderr: bool = False) -> None:
    """Append the stacks of all threads to a file, with the threads' names; if it cannot be written, to stderr."""
    names = "".join(f"  0x{thread.ident or 0:016x} {thread.name}\n" for thread in threading.enumerate())
    try:
        if path.is_symlink():  # a run writes only into its own folder
            path.unlink()
        with path.open("a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\n{names}")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
    except OSError as error:  # a full disk must hide neither the hang nor what it does to the run
        also_stderr = True
        print(f"{path} cannot be written: {error.strerror}.", file=sys.stderr)
    if also_stderr:
        sys.stderr.flush()
        print(names, end="", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(2, all_threads=True)  # whatever stands in for sys.stderr
