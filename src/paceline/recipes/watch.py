"""`paceline watch`: looks at a run from outside its process, here or elsewhere, while it works or afterwards."""

import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.checkpoint.folder import claim
from paceline.observe.place import Place
from paceline.observe.remote import RemoteRun
from paceline.observe.showing import Show
from paceline.observe.watched import Look, Watched


def watch(
    place: Place, show: Show, *, interval_s: float, once: bool, ask: bool, for_people: bool, stay: bool = False
) -> int:
    """Show a run until it ends or Ctrl-C; return the exit status that tells its outcome.

    `ask`: ssh may ask at the terminal. `for_people`: texts are shown by a terminal. `stay`: until Ctrl-C alone.
    """
    how: dict[str, Any] = {"interval_s": interval_s, "once": once, "ask": ask, "for_people": for_people}
    with _tidy_end(), opened(place, **how) as (watched, looks), _read_enough():
        seen = False
        try:
            for look in looks:
                fresh = watched.see(look)
                seen = seen or not look.trouble
                show.look(watched, look, fresh)
                if watched.ended and not stay:
                    break
        except KeyboardInterrupt:
            if not seen:
                raise
        finally:
            show.close()
        show.end(watched)
    return watched.status


@contextmanager
def _read_enough() -> Iterator[None]:
    """Let a pipe that nobody reads any more end the looks as Ctrl-C does: it says nothing of the run."""
    try:
        yield
    except BrokenPipeError:
        pass
    except SystemExit as end:
        if end.code != 1:  # rich's for such a pipe
            raise


@contextmanager
def opened(
    place: Place, *, interval_s: float, once: bool, ask: bool, for_people: bool
) -> Iterator[tuple[Watched, Iterator[Look]]]:
    """Open a run to look at: its state, which takes the looks, and the looks, one every interval."""
    if place.local:
        watched = Watched(Path(place.path), place.text, for_people=for_people)
        with closing(_local_looks(Path(place.path), interval_s, once)) as looks:
            yield watched, looks
        return
    with tempfile.TemporaryDirectory(prefix="paceline-watch-") as copy:
        run = RemoteRun(place, Path(copy), interval_s=interval_s, ask=ask)
        watched = Watched(Path(copy), place.text, for_people=for_people)
        with closing(run.looks(once=once)) as looks:
            yield watched, looks


@contextmanager
def _tidy_end() -> Iterator[None]:
    """Let a closed terminal and SIGTERM end the command as an error does, so that nothing it has made stays behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _local_looks(run: Path, interval_s: float, once: bool) -> Generator[Look]:
    while True:
        owner = claim(run)  # before the events are read: if nobody owns it, they are all there
        name = f"process {owner.process} on {owner.host}" if owner.host else ""
        yield Look(owner.held, time.time(), name)
        if once:
            return
        time.sleep(interval_s)
