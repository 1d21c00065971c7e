"""events.jsonl: the append-only record of a run, one JSON object a line.

Every line has `schema` (version of this format), `t` (seconds since the epoch) and `event` (its kind); docs/events.md
lists the kinds. Numbers that are not finite, which JSON has not, are strings. A line is written with one call, so a
killed run leaves at most one torn last line. On a full disk lines wait in memory until there is room.

A file that is full is renamed to events-000001.jsonl, the next one to events-000002.jsonl, and a new one begun. A
process that is killed between the two leaves no events.jsonl, which is as if the new one were still empty.
"""

import errno
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.observe.reading import SCHEMA, as_read, rotated_name, rotated_numbers
from paceline.records import UserError

FULL_BYTES = 64 * 2**20  # of events.jsonl

Follower = Callable[[dict[str, Any]], None]


class LineFile:
    """Appends JSON objects to a file, a line each in one call; safe to call from every role's thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._waiting = b""  # what a full disk did not take; a run may be waiting for room
        self._file: IO[bytes] | None = self._opened()
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # what a killed run left: the next line must not become a part of it
                self._waiting = b"\n"
        self._lock = threading.Lock()
        self._closed = False

    def write(self, **values: Any) -> str:
        """Append one object, and return its line."""
        line = json.dumps(plain({"schema": SCHEMA, "t": round(time.time(), 3), **values}))
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._path} is closed")
            self._waiting += line.encode() + b"\n"
            with _full_disk_waits():
                self._flush()
        return line

    def rotate(self, full_bytes: int) -> None:
        """If the file is full, give it its number and begin a new one."""
        with self._lock, _full_disk_waits():
            if self._file is None or self._waiting or self._file.tell() < full_bytes:
                return
            numbers = rotated_numbers(self._path.parent)
            with suppress(FileNotFoundError):  # somebody has taken it away
                self._path.rename(self._path.with_name(rotated_name(numbers[-1] + 1 if numbers else 1)))
            self._file.close()
            self._file = None
            self._flush()

    def close(self) -> None:
        """Close the file; later lines are an error."""
        with self._lock:
            if not self._closed:
                with _full_disk_waits():
                    self._flush()
            if self._file is not None:
                self._file.close()
            self._closed = True

    def _flush(self) -> None:
        self._file = self._file or self._opened()
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _opened(self) -> IO[bytes]:
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UserError(f"{self._path} is a link, and a run writes only into its own folder. Remove it.") from None
        return os.fdopen(handle, "a+b", buffering=0)


class EventLog:
    """A run's events.jsonl; safe to call from every role's thread.

    Each event, as a reader will get it, is also given to every follower, in the order of the file and in the thread
    that writes it: a follower has to be quick and must not raise. What it raises ends nothing and is told once.
    A follower may write events itself.
    """

    def __init__(
        self, run: Path, followers: Sequence[Follower] = (), *, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        """`tell` gets a sentence for a person when a follower fails."""
        self._lines = LineFile(run / "events.jsonl")
        self._followers, self._tell = list(followers), tell
        self._failed: set[int] = set()  # followers that were told of
        self._lock = threading.RLock()
        self._undelivered: deque[dict[str, Any]] = deque()
        self._delivering = False

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        with self._lock:
            line = self._lines.write(event=event, **values)
            self._lines.rotate(FULL_BYTES)
            if self._followers:
                self._undelivered.append(as_read(line.encode()))
                if not self._delivering:  # else the write that is under way in this thread goes on with it
                    self._deliver()

    def follow(self, follower: Follower) -> None:
        """Give the events from now on to one more follower."""
        with self._lock:
            self._followers.append(follower)

    def _deliver(self) -> None:
        self._delivering = True
        try:
            while self._undelivered:
                event = self._undelivered.popleft()
                for place, follower in enumerate(self._followers):
                    try:
                        follower(event)
                    except Exception as error:
                        if place not in self._failed:
                            self._failed.add(place)
                            cause = f"{type(error).__name__}: {error}".rstrip(". ")
                            self._tell(f"  what follows the run's events failed at `{event['event']}` ({cause})")
        finally:
            self._delivering = False

    def close(self) -> None:
        """Close the file; later events are an error."""
        self._lines.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _full_disk_waits() -> Iterator[None]:
    """A full disk is no error: what it did not take stays where it is until the next time."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def plain(value: Any) -> Any:
    """Return a value with the names of numbers that are not finite in their place: nan, inf, -inf."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
