"""A run as somebody outside its process sees it: its state, whether it is still under way, and nothing that could harm.

Events may come from strangers. A letter that a terminal could take for an order is shown as its number, and an event
whose values are of other kinds than docs/events.md has them is an error in one sentence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from paceline.observe.lines import Lines
from paceline.observe.panel import panel
from paceline.observe.reading import EventTail, understood
from paceline.observe.state import RunState
from paceline.records import INTERRUPTED_STATUS, UserError

# Exit status of `paceline watch` by a run's outcome; a stopped run has that of `paceline train`.
STATUS = {"finished": 0, "failed": 1, "starting": 3, "running": 3, "interrupted": INTERRUPTED_STATUS}
_UNDER_WAY = ("starting", "running")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run. Events that were there by then can be read."""

    held: bool | None  # whether a process held the folder just before; None: that cannot be told from here
    now: float  # seconds since 1970 by the clock of the run's machine
    owner: str = ""  # process and host that the folder's lock names
    trouble: str | None = None  # why nothing new could be seen


class Watched:
    """The run in `folder`, which is called `name` wherever something is said of it."""

    def __init__(self, folder: Path, name: str, *, for_people: bool = True) -> None:
        """`for_people`: texts are made harmless for a terminal. JSON needs no more than its own escapes.

        Raises:
            UserError: the folder is not a run's.
        """
        self._folder, self._name, self._for_people = folder, name, for_people
        self.state = RunState()
        self._look = Look(None, 0.0)
        with self._named():
            self._tail = EventTail(folder)

    @property
    def status(self) -> int:
        """The exit status that tells the run's outcome."""
        return STATUS[self.state.outcome]

    @property
    def ended(self) -> bool:
        """Whether the run is over, as far as is known."""
        return self.state.outcome not in _UNDER_WAY

    def see(self, look: Look) -> list[dict[str, Any]]:
        """Take what came up to a look into account and return the new events, the oldest first.

        Where nobody held the folder any more and no event tells the run's end, one that does is among them.

        Raises:
            UserError: they cannot be read or understood.
        """
        if look.trouble:
            return []
        self._look = look
        with self._named():
            fresh = self._tail.poll()
        if self._for_people:
            with understood(self._name, "event"):
                fresh = [readable(event) for event in fresh]
        for event in fresh:
            self._apply(event)
        if look.held is False and not self.ended:
            fresh.append(self._gone(look))
            self._apply(fresh[-1])
        return fresh

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain data, with what only somebody outside knows."""
        with understood(self._name, "state"):
            state = self.state.as_dict()
        return {**state, "held": self._look.held, "now": self._look.now}

    def panel(self, *, width: int, height: int | None = None) -> RenderableType:
        """Return the panel as of the last look."""
        with understood(self._name, "state"):
            return panel(self.state, now=self._look.now, width=width, height=height)

    def line(self, lines: Lines, event: dict[str, Any]) -> str | None:
        """Return the line of an event, if it has one."""
        with understood(self._name, str(event["event"])):
            return lines.of(event)

    def _apply(self, event: dict[str, Any]) -> None:
        with understood(self._name, str(event["event"])):
            self.state.apply(event)

    def _gone(self, look: Look) -> dict[str, Any]:
        """Return the event that a run which was killed could not write."""
        owner = readable(f" ({look.owner})") if look.owner else ""
        message = (
            f"Nobody trains into this folder any more{owner}, and no event tells the end: the run was killed, or its "
            "machine went down. Go on with `paceline train RUN --resume`."
        )
        return {"t": self.state.last_t or look.now, "event": "failed", "message": message}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say the run's name where a copy's folder would be named."""
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace(str(self._folder), self._name)) from None


def readable(value: Any) -> Any:
    """Return a value whose texts, at any depth, hold only letters that a terminal shows, and of others the numbers."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in value)
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [readable(item) for item in value]
    return value
