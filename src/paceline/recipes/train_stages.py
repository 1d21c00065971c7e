"""How long the start-up of `paceline train` takes, stage by stage; what is before there are events is written later."""

import time
from collections.abc import Callable

from paceline.observe.console import Console
from paceline.observe.events import EventLog


class Stages:
    """The stages of one start-up, in their order: dataset opened, planned, models loaded, compiled, ready."""

    def __init__(self, console: Console, *, roles: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now; so many roles will load."""
        self._console, self._clock, self._roles = console, clock, roles
        self._began = self._last = clock()
        self._early: list[tuple[str, float]] = []
        self._events: EventLog | None = None
        self._loaded: set[str] = set()  # roles

    def took(self, name: str) -> None:
        """Say that a stage has ended: it took as long as it is since the last one did."""
        now = self._clock()
        self._tell(name, round(now - self._last, 3))
        self._last = now

    def written_to(self, events: EventLog) -> None:
        """Write what was told already, and from now on to `events`, whose console lines follow from them."""
        self._events = events
        for name, s in self._early:
            events.write("stage", name=name, s=s)

    def on_state(self, role: str, state: str) -> None:
        """A role changed its state; the models are loaded once every role has left that, and not again at a restart."""
        if state == "compiling" and role not in self._loaded:
            self._loaded.add(role)
            if len(self._loaded) == self._roles:
                self.took("models loaded")

    def ready(self) -> None:
        """All roles are ready. The last stage is as long as all together."""
        self.took("compiled")
        self._tell("ready", round(self._last - self._began, 3))

    def _tell(self, name: str, s: float) -> None:
        if self._events is not None:
            self._events.write("stage", name=name, s=s)
            return
        self._early.append((name, s))
        self._console.line(f"  {name} ({s:.1f} s)")
