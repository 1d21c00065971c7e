"""What `paceline watch` shows: a panel on a terminal, lines where there is none, or JSON for a program."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from rich.live import Live

from paceline.observe.console import Console
from paceline.observe.lines import Lines
from paceline.observe.watched import Look, Watched, readable

_LINES_BEFORE = 10  # of what was told before anybody looked, where there is no terminal


@runtime_checkable
class Show(Protocol):
    """Shows a run, look by look."""

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Show what a look has found; `fresh` are the events that came with it."""

    def close(self) -> None:
        """Give the terminal back, whatever has happened."""

    def end(self, watched: Watched) -> None:
        """Show the last of it."""


class Once:
    """The panel, once."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Show nothing yet."""

    def close(self) -> None:
        """Nothing was taken."""

    def end(self, watched: Watched) -> None:
        """Print the panel."""
        self._console.rich.print(watched.panel(width=self._console.rich.width))


class Panel(Once):
    """The panel in place, on a terminal. It makes room for whoever asks for a password while a connection is made."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Bring the panel up to date, or say why there is nothing new."""
        if look.trouble:
            self._leave(last=True)  # ssh may ask for a password next
            self._console.line(readable(look.trouble))
            return
        rich = self._console.rich
        drawn = watched.panel(width=rich.width, height=rich.height - 1)
        if self._live is None:
            self._live = Live(drawn, console=rich, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start(refresh=True)
        else:
            self._live.update(drawn, refresh=True)

    def close(self) -> None:
        """Take the panel away; the last one is printed behind it."""
        self._leave(last=False)

    def _leave(self, *, last: bool) -> None:
        """Give the terminal back; with `last` the panel stays above what follows."""
        if self._live is not None:
            self._live.transient = not last
            self._live.stop()
            self._live = None


class PlainLines:
    """A line an event, as a run's own console has them where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._lines = console, Lines()
        self._first = True

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Print the lines of new events; of those before the first look the newest."""
        if look.trouble:
            self._console.line(readable(look.trouble))
            return
        told = [line for event in fresh if (line := watched.line(self._lines, event)) is not None]
        for line in deque(told, maxlen=_LINES_BEFORE) if self._first else told:
            self._console.line(line)
        self._first = False

    def close(self) -> None:
        """Nothing was taken."""

    def end(self, watched: Watched) -> None:
        """Everything was said."""


class Json:
    """The state as one JSON object: whenever it changes, or at the end alone."""

    def __init__(self, write: Callable[[dict[str, Any]], None], console: Console, *, once: bool) -> None:
        """`console` gets what is no JSON."""
        self._write, self._console, self._once = write, console, once
        self._held: object = self  # equals no answer

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Write the state if it is another one."""
        if look.trouble:
            self._console.line(readable(look.trouble))
        elif not self._once and (fresh or look.held is not self._held):
            self._held = look.held
            self._write(watched.as_dict())

    def close(self) -> None:
        """Nothing was taken."""

    def end(self, watched: Watched) -> None:
        """Write the state, unless each change was."""
        if self._once:
            self._write(watched.as_dict())
