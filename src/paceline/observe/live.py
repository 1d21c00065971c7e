"""What a person sees of a run that works in this process: lines as things happen and, on a terminal, one panel.

A thread of its own makes all of it out of the run's events, so whoever writes an event never waits for a terminal.
"""

import queue
import re
import threading
import time
from typing import Any

from rich.console import RenderableType

from paceline.observe.console import Console
from paceline.observe.lines import Lines
from paceline.observe.panel import panel
from paceline.observe.state import RunState

REFRESH_S = 0.5  # between two pictures of the panel
_NUMBERS = {"step", "sample", "loading"}  # which the panel shows
_SAID_ALREADY = {
    "trained",
    "failed",
    "interrupted",
    "tracker_failed",
    "on_end",
    "console_lost",
}  # by others, or to nobody
_BEGIN: dict[str, Any] = {"event": ""}


class RunView:
    """Follows a run's events and shows them. Lines are those of events behind `begin`; what was before was shown."""

    def __init__(self, console: Console, *, refresh_s: float = REFRESH_S) -> None:
        self._console, self._refresh_s = console, refresh_s
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._state, self._lines = RunState(), Lines()
        self._begun = False
        self._advice = ""  # that was given last, without its numbers
        self._thread = threading.Thread(target=self._work, name="console", daemon=True)

    def follow(self, event: dict[str, Any]) -> None:
        """Take an event; returns at once."""
        self._events.put(event)

    def begin(self) -> None:
        """From the next event on lines are shown."""
        self._events.put(_BEGIN)

    def __enter__(self) -> "RunView":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(None)
        self._thread.join()

    def _work(self) -> None:
        with self._console.live() as show:
            due = 0.0
            while True:
                if (left := due - time.monotonic()) <= 0:
                    show(self._panel())
                    due, left = time.monotonic() + self._refresh_s, self._refresh_s
                try:
                    event = self._events.get(timeout=left)
                except queue.Empty:
                    continue
                if event is None:
                    break
                self._take(event)
            show(self._panel())

    def _take(self, event: dict[str, Any]) -> None:
        if event is _BEGIN:
            self._begun = True
            return
        self._state.apply(event)
        kind = event["event"]
        if not self._begun or kind in _SAID_ALREADY or (kind in _NUMBERS and self._console.draws):
            return
        if line := self._lines.of(event):
            self._console.line(f"  {line}")
            if kind == "sample":
                self._advise()

    def _advise(self) -> None:
        """Say what to change, once as long as it is the same."""
        sentence = self._state.bottleneck or ""
        advice = re.sub(r"\d+ %", "", sentence)
        if sentence and advice != self._advice:
            self._console.line(f"  {sentence}")
        self._advice = advice

    def _panel(self) -> RenderableType:
        size = self._console.rich.size
        return panel(self._state, now=time.time(), width=size.width, height=max(1, size.height - 1))
