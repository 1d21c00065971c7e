"""What a person sees while a verb works: stages, a progress bar, tables. Plain lines when not a terminal."""

import codecs
import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol, runtime_checkable

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.records import RunError

PLAIN_EVERY_S = 5.0  # a line at most this often where there is no terminal
_SPELLED = "paceline.spelled"
_LETTERS = {"━": "=", "─": "-", "…": "~", "✓": "+", "τ": "tau", "×": "x", "–": "-", "→": ">"}  # as ASCII has them


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream's encoding lacks: our own letters by such as keep a panel's width, others by numbers."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    spelled = (_LETTERS.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in letters)
    return "".join(spelled), error.end


codecs.register_error(_SPELLED, _spell)


@runtime_checkable
class Tick(Protocol):
    """Called as work goes on: how much is done, of how much, and what to add to the line."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


class _Bars(Progress):
    """A bar with its note in a line of its own: 80 columns do not hold both."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(f"    {task.fields['note']}") for task in self.tasks if task.fields["note"])


class Console:
    """Writes to standard output, or to standard error when standard output carries JSON."""

    def __init__(self, *, json: bool = False) -> None:
        self.rich = RichConsole(stderr=json, highlight=False, soft_wrap=False)
        self._began = time.monotonic()
        self._terminal = self.rich.is_terminal  # a terminal that was closed is none any more
        self._name = "error" if json else "output"
        self._on_lost: Callable[[str], None] | None = None
        stream = self.rich.file
        if isinstance(stream, io.TextIOWrapper):  # one that has no such letter shows another one, and goes on
            stream.reconfigure(errors=_SPELLED)

    def line(self, text: str) -> None:
        """Print one line."""
        self._print(text, markup=False, soft_wrap=not self.rich.is_terminal)  # a log's paths stay whole

    def stage(self, title: str) -> None:
        """Print a heading with the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._print(f"[bold]{minutes:02d}:{seconds:02d} {title}[/bold]")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table of right-aligned columns; where these are wider than the console, each row below the other."""
        if len(columns) > 2 and _width(columns, rows) > self.rich.width:
            for at, row in enumerate(rows):
                self.table(title if at == 0 else "", ("", ""), list(zip(columns, row, strict=True)))
            return
        table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right", overflow="fold")  # a figure goes on in a line below, never cut
        for row in rows:
            table.add_row(*row)
        self._print(table)

    @contextmanager
    def outlived(self, on_lost: Callable[[str], None]) -> Iterator[None]:
        """Until the block ends, let no work end because the stream cannot be written any more.

        Nothing is shown from then on; `on_lost` gets the cause.
        """
        self._on_lost = on_lost
        try:
            yield
        finally:
            self._on_lost = None

    @property
    def shows_time_left(self) -> bool:
        """Whether a progress bar says by itself how long the rest takes."""
        return self.rich.is_terminal

    @property
    def draws(self) -> bool:
        """Whether something can stay in its place while lines go by above it."""
        return self.rich.is_terminal and not self.rich.is_dumb_terminal

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Tick]:
        """Yield a function to call as work goes on."""
        if self.rich.is_terminal:
            yield from self._bar(what, total)
        else:
            yield from self._lines(what, total)

    @contextmanager
    def live(self) -> Iterator[Callable[[RenderableType], None]]:
        """Yield a function that shows something below all lines, in the place of what it has shown before.

        Where nothing can be drawn it shows nothing. The last stays when the block ends.
        """
        if not self.draws:
            yield lambda what: None
            return
        live = Live(console=self.rich, auto_refresh=False, vertical_overflow="crop")

        def show(what: RenderableType) -> None:
            self._written(lambda: live.update(what, refresh=True))

        self._written(live.start)
        try:
            yield show
        finally:
            self._written(live.stop)

    def result(self, text: str) -> None:
        """Print a verb's result to standard output, whatever else goes there.

        Raises:
            RunError: it cannot be written.
        """
        try:
            print(text, flush=True)
        except BrokenPipeError:
            _give_up(sys.stdout)
            raise
        except OSError as error:
            _give_up(sys.stdout)
            raise _cannot_write("output", error) from None

    def _print(self, what: RenderableType, **how: Any) -> None:
        self._written(lambda: self.rich.print(what, **how))

    def _written(self, write: Callable[[], None]) -> None:
        """Write. To a terminal that was closed nothing is written any more; SIGHUP says what becomes of the run.

        Raises:
            RunError: the stream cannot be written, a full disk's perhaps; not while it is outlived.
        """
        try:
            write()
        except (OSError, SystemExit) as error:
            # Who read has read enough; rich then wants to end the process.
            unread = isinstance(error, BrokenPipeError | SystemExit)
            if unread and self._on_lost is None:
                raise
            _give_up(self.rich.file)
            if getattr(error, "errno", None) == errno.EIO and self._terminal:
                return
            if self._on_lost is not None:
                cause = "nobody reads it any more" if unread else getattr(error, "strerror", None)
                self._on_lost(f"Standard {self._name} cannot be written: {cause}.")
            elif isinstance(error, OSError):
                raise _cannot_write(self._name, error) from None

    def _bar(self, what: str, total: int | None) -> Iterator[Tick]:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with _Bars(*columns, console=self.rich) as bars:
            task = bars.add_task(what, total=total, note="")

            def tick(done: int, total: int | None = total, note: str = "") -> None:
                bars.update(task, completed=done, total=total, note=note)

            yield tick

    def _lines(self, what: str, total: int | None) -> Iterator[Tick]:
        began = shown = time.monotonic()
        last: tuple[int, int | None, str] | None = None

        def show(done: int, of: int | None, note: str) -> None:
            share = "" if not of else f"/{of} {100 * done / of:.0f}%"
            if of and 0 < done < of and not note:  # a note says itself how long the rest takes, where that is known
                minutes, seconds = divmod(round((time.monotonic() - began) / done * (of - done)), 60)
                note = f"eta {minutes}:{seconds:02d}"
            self._print(f"  {what} {done}{share} {note}".rstrip(), markup=False, soft_wrap=True)

        def tick(done: int, total: int | None = total, note: str = "") -> None:
            nonlocal shown, last
            last = (done, total, note)
            if time.monotonic() - shown >= PLAIN_EVERY_S:
                shown = time.monotonic()
                show(*last)

        yield tick
        if last is not None:
            show(*last)


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a table of whole lines is, with two spaces between columns."""
    by_column = zip(columns, *rows, strict=True)
    widest = [max(len(line) for text in column for line in text.split("\n")) for column in by_column]
    return sum(widest) + 2 * (len(widest) - 1)


def _cannot_write(name: str, error: OSError) -> RunError:
    return RunError(f"Standard {name} cannot be written: {error.strerror}. Send it somewhere else.")


def _give_up(stream: IO[str]) -> None:
    """Send what a stream still holds nowhere, or Python's end would fail on it once more."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
