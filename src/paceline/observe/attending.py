"""Who attends a run besides the console: its trackers, and the command that is run when it ends."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.config import ObserveSettings
from paceline.observe.events import EventLog
from paceline.observe.on_end import WAIT_S, OnEnd, check_command
from paceline.observe.trackers import END_S, TITLES, Trackers, check_trackers

SAID_S = 2.0  # after that a wait is explained
_LEAST_S = 2.0  # the trackers' even where a stop has used up its time


def check_attending(settings: ObserveSettings) -> None:
    """Refuse trackers and a command that are not there.

    Raises:
        UserError: one is not.
    """
    check_trackers(settings.trackers)
    check_command(settings.end_command)


@contextmanager
def attended(
    settings: ObserveSettings, run: Path, events: EventLog, *, grace_s: float, tell: Callable[[str], None]
) -> Iterator[None]:
    """Let trackers and command follow a run's events; wait for them when the block ends.

    After a stop was asked for they get what is left of `grace_s`, counted from then on.
    """
    trackers = Trackers(run, settings.trackers, events=events, tell=tell)
    on_end = OnEnd(run, settings.end_command, events=events, tell=tell)
    stop = _Stop(grace_s)
    for follower in (trackers.follow, on_end.follow, stop.follow):
        events.follow(follower)
    try:
        yield
    finally:
        now = time.monotonic()
        waits = [
            (
                trackers.end,
                min(now + END_S, max(stop.until, now + _LEAST_S)),
                [TITLES[one] for one in settings.trackers],
            ),
            (on_end.end, min(now + WAIT_S, stop.until), ["observe.on_end"] if settings.end_command else []),
        ]
        for end, until, names in waits:
            with _said(names, until - now, tell):
                try:
                    end(until)
                except KeyboardInterrupt:  # the run is over: only the wait ends
                    end(now)


@contextmanager
def _said(names: Sequence[str], most_s: float, tell: Callable[[str], None]) -> Iterator[None]:
    """Say what is waited for, where the block takes so long that a person asks."""
    text = f"  waiting for {', '.join(names)} to end, {most_s:.0f} s at most; Ctrl-C ends the wait"
    timer = threading.Timer(SAID_S, tell, [text])
    timer.daemon = True
    if names and most_s > 2 * SAID_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Stop:
    """Until when a run that was asked to stop has to have ended."""

    def __init__(self, grace_s: float) -> None:
        self.until, self._grace_s = float("inf"), grace_s

    def follow(self, event: dict[str, Any]) -> None:
        if event["event"] in ("stopping", "interrupted"):
            self.until = min(self.until, time.monotonic() + self._grace_s)
