"""The process of one tracker: `python -m paceline.observe.tracker_process RUN NAME HANG_S`.

It reads the run's events as they come and tells the library of them, until its standard input ends: the run is over,
or was killed. What is told is noted in RUN/trackers/NAME.json before, so that a run that goes on goes on in the tracker
too, and steps that are made again are not told again.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.observe.reading import EventTail
from paceline.observe.tracker_libraries import OPEN, Begin
from paceline.observe.tracker_numbers import BEGIN, OUTCOMES, Numbers, Point, flat

_LOOK_S = 1.0  # between two looks at the events


class Note:
    """What is known of a run in a tracker, in RUN/trackers/NAME.json."""

    def __init__(self, path: Path) -> None:
        self._path = path
        told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.identity: str | None = told.get("identity")
        self._steps: dict[str, int] = told.get("steps", {})

    def name(self, identity: str) -> None:
        """Note what the run is called there."""
        self.identity = identity
        self._write()

    def is_new(self, point: Point) -> bool:
        """Return whether a point was never told, and note that it is."""
        if point.steps <= self._steps.get(point.kind, 0):
            return False
        self._steps[point.kind] = point.steps
        self._write()
        return True

    def _write(self) -> None:
        aside = self._path.with_name(f".{self._path.name}.new")
        aside.write_text(json.dumps({"identity": self.identity, "steps": self._steps}))
        aside.replace(self._path)


def follow(run: Path, name: str, hang_s: float, over: int = 0) -> None:
    """Tell a tracker of a run until the file `over` ends. What a library raises goes through."""
    tail, numbers, note = EventTail(run), Numbers(), Note(run / "trackers" / f"{name}.json")
    events = tail.poll()
    while not any(event["event"] in BEGIN for event in events):  # a full disk has no room for it yet
        if select.select([over], [], [], _LOOK_S)[0]:
            return
        events += tail.poll()
    last = max(place for place, event in enumerate(events) if event["event"] in BEGIN)
    begin = Begin(run, flat(events[last]["settings"]), note.identity, events[last]["event"] == "resumed")
    with _in_time(hang_s, name):
        tracker = OPEN[name](begin)
    note.name(tracker.identity)
    outcome = ("failed", "the run's process ended without a word")
    ended = False
    while True:
        for place, event in enumerate(events):
            point = numbers.of(event)
            if point is not None and note.is_new(point):
                with _in_time(hang_s, name):
                    tracker.tell(point)
            if event["event"] in OUTCOMES and place > last:
                outcome = (OUTCOMES[event["event"]], event.get("message", ""))
        if ended:
            break
        last = -1  # what comes from now on belongs to this part of the run
        ended = bool(select.select([over], [], [], _LOOK_S)[0])
        events = tail.poll()
    with _in_time(hang_s, name):
        tracker.end(*outcome)


@contextmanager
def _in_time(hang_s: float, name: str) -> Iterator[None]:
    """End the process if the block takes too long."""

    def give_up() -> None:
        faulthandler.dump_traceback()
        print(f"{name} took longer than {hang_s:g} s for one call", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(hang_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run decides when it is over
        signal.signal(number, signal.SIG_IGN)
    follow(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
