"""events.jsonl: the append-only record of a run, one JSON object a line.

Every line has `schema` (version of this format), `t` (seconds since the epoch) and `event` (its kind); docs/events.md
lists the kinds. Numbers that are not finite, which JSON has not, are strings. A line is written with one call, so a
killed run leaves at most one torn last line. On a full disk lines wait in memory until there is room.
"""

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from paceline.records import UserError

SCHEMA = 1


class LineFile:
    """Appends JSON objects to a file, a line each in one call; safe to call from every role's thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise UserError(f"{path} is a link, and a run writes only into its own folder. Remove it.") from None
        self._file = os.fdopen(handle, "a+b", buffering=0)
        self._waiting = b""  # what a full disk did not take; a run may be waiting for room
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # what a killed run left: the next line must not become a part of it
                self._waiting = b"\n"
        self._lock = threading.Lock()

    def write(self, **values: Any) -> None:
        """Append one object."""
        line = json.dumps(_plain({"schema": SCHEMA, "t": round(time.time(), 3), **values}))
        with self._lock:
            self._waiting += line.encode() + b"\n"
            self._flush()

    def close(self) -> None:
        """Close the file; later lines are an error."""
        with self._lock:
            self._flush()
            self._file.close()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


class EventLog:
    """A run's events.jsonl; safe to call from every role's thread."""

    def __init__(self, run: Path) -> None:
        self._lines = LineFile(run / "events.jsonl")

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        self._lines.write(event=event, **values)

    def close(self) -> None:
        """Close the file; later events are an error."""
        self._lines.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """Return a value with the names of numbers that are not finite in their place: nan, inf, -inf."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
