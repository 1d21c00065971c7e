"""Reads a run's events, while it works or afterwards. Free of torch.

`events.jsonl` is being written; events-000001.jsonl and on are what it was before (see events). What is read of a file
stays true when it is renamed, so a reader needs no more than the number that the file has, or will have, and how far it
came. Files are opened only while they are read.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from paceline.records import UserError

SCHEMA = 1  # of the events that are written, and the newest that is read
_CHUNK = 2**20  # bytes read at once
_ROTATED = re.compile(r"events-(\d{6,})\.jsonl")
_BEGIN = ("started", "resumed")  # a part of a run begins with one of these
_NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
# Last words of the keys whose values are numbers that may not be finite.
_NUMBERS = {"loss", "sum", "norm", "limit", "lr", "acceptance", "estimate", "tau", "pooled", "K"}
_NUMBERS |= {"share", "s", "mib", "min", "avg", "utilisation", "mfu", "flops"}


def rotated_name(number: int) -> str:
    """Return the name of the file that events.jsonl became when it was full for the `number`th time, from 1."""
    return f"events-{number:06d}.jsonl"


def rotated_numbers(run: Path) -> list[int]:
    """Return the numbers of a run's full files, the oldest first."""
    return sorted(int(found[1]) for name in os.listdir(run) if (found := _ROTATED.fullmatch(name)))


def read_events(run: Path) -> Iterator[dict[str, Any]]:
    """Return all events of a run, the oldest first; a last line that is not whole yet is left out.

    Raises:
        UserError: the folder is not a run's (at once), its events are of a newer schema, or a file of them is missing.
    """
    return _all(EventTail(run))


class EventTail:
    """Follows a run's events: what came since the last time, in order, each event once.

    A run that was begun anew in the same folder is read from its beginning.
    """

    def __init__(self, run: Path) -> None:
        """Begin before the first event.

        Raises:
            UserError: the folder is not a run's.
        """
        _check_run(run)
        self._run = run
        self._number = 0  # of the file that is read, once it is full; 0: none was read yet
        self._at = 0  # bytes of it that were read: whole lines
        self._t = 0.0  # of the last event
        self._bad: dict[str, Any] | None = None  # a line that is no event, until the next one tells why

    def poll(self) -> list[dict[str, Any]]:
        """Return the events that came since the last call; does not wait for any.

        Raises:
            UserError: the events are of a newer schema, or a file of them is missing.
        """
        return list(self._fresh())

    def _fresh(self) -> Iterator[dict[str, Any]]:
        while True:
            path = self._next_file()
            try:
                with _opened(path) as file:
                    if path.name == "events.jsonl" and self._full():  # renamed since it was found: this is another one
                        continue
                    if os.fstat(file.fileno()).st_size < self._at:  # not what was read
                        self._number, self._at = 0, 0
                        continue
                    yield from self._events(file, path)
            except FileNotFoundError:
                if not self._full():
                    return
                continue
            except OSError as error:
                raise _unreadable(path, error) from None
            if path.name != "events.jsonl":  # nothing is written into it any more
                self._number, self._at = self._number + 1, 0
            elif not self._full():
                return

    def _full(self) -> bool:
        return (self._run / rotated_name(self._number)).exists()

    def _next_file(self) -> Path:
        try:
            numbers = rotated_numbers(self._run)
        except OSError as error:
            raise _unreadable(self._run, error) from None
        if self._number == 0:
            self._number = numbers[0] if numbers else 1
        if self._number in numbers:
            return self._run / rotated_name(self._number)
        if numbers and numbers[-1] > self._number:
            name = rotated_name(self._number)
            raise UserError(f"Of the events in {self._run} a file is missing, {name}: copy the whole folder again.")
        return self._run / "events.jsonl"

    def _events(self, file: Any, path: Path) -> Iterator[dict[str, Any]]:
        """Yield what is behind the place that was reached."""
        file.seek(self._at)
        rest = b""
        while chunk := file.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                began, self._at = self._at, self._at + len(line) + 1
                yield from self._told(_parsed(line, path), began, path)
        if rest and path.name != "events.jsonl":  # nobody will finish it
            yield from self._told(None, self._at, path)

    def _told(self, event: dict[str, Any] | None, began: int, path: Path) -> Iterator[dict[str, Any]]:
        """Yield an event, and before it what is to be said of a line that was none.

        One that a killed process has torn is followed by the beginning of the run's next part, and is as if it had
        never been written. Any other is damage, and told.
        """
        bad, self._bad = self._bad, None
        if bad is not None and (event is None or event["event"] not in _BEGIN):
            yield bad
        if event is None:
            message = f"{path.name} has a line that is no event, at byte {began:,}."
            self._bad = {"schema": SCHEMA, "t": self._t, "event": "unreadable", "message": message}
        else:
            self._t = event["t"]
            yield event


# What values of other kinds lead to; a time that no calendar has is an OSError.
_OTHER_KINDS = (LookupError, ArithmeticError, AttributeError, TypeError, ValueError, RecursionError, OSError)


@contextmanager
def understood(name: str, what: str) -> Iterator[None]:
    """Refuse events of the run `name` whose values are of other kinds than docs/events.md has them.

    Raises:
        UserError: something in the block, which deals with `what` of them, could not be done for that.
    """
    try:
        yield
    except _OTHER_KINDS as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(
            f"Events of {name} are not as docs/events.md has them ({what}: {cause}): was the file changed, or written "
            "by something else than paceline?"
        ) from None


def _all(tail: EventTail) -> Iterator[dict[str, Any]]:
    yield from tail._fresh()
    if tail._bad is not None:  # damage: a torn line is not whole, or the next part has begun behind it
        yield tail._bad


def _opened(path: Path) -> IO[bytes]:
    """Open a file of events. A pipe or a device, also behind a link, is none: reading it might never end.

    Raises:
        UserError: it is no file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"A run's events are in a file, but {path} is none: copy the whole folder again.")
    return open(handle, "rb")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}.")


def _check_run(run: Path) -> None:
    if not run.is_dir():
        what = "a file" if run.exists() else "not there"
        raise UserError(f"A run is a folder, but {run} is {what}. Name the run_dir of a `paceline train`.")
    try:
        made = (run / "events.jsonl").exists() or (run / "settings.yaml").exists() or bool(rotated_numbers(run))
    except OSError as error:
        raise _unreadable(run, error) from None
    if not made:
        raise UserError(
            f"{run} is not a run's folder: it has neither events.jsonl nor settings.yaml. Name the run_dir of a "
            "`paceline train`."
        )


def _parsed(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return the event of a line, or None where it is none.

    Raises:
        UserError: it is of a newer schema.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("schema"), int):
        return None
    if event["schema"] > SCHEMA:
        raise UserError(
            f"{path} has events of schema {event['schema']}, but this version of paceline reads {SCHEMA}. Update "
            "paceline to the version that wrote them, or a newer one."
        )
    if not isinstance(event.get("event"), str) or not isinstance(event.get("t"), int | float):
        return None
    return _with_numbers(event, line)


def as_read(line: bytes) -> dict[str, Any]:
    """Return the event of a line that was just written, as a reader will get it."""
    return _with_numbers(json.loads(line), line)


def _with_numbers(event: dict[str, Any], line: bytes) -> dict[str, Any]:
    if b'nan"' in line or b'inf"' in line:
        return {key: _number(item, key) for key, item in event.items()}
    return event


def _number(value: Any, key: str) -> Any:
    """Return a value with the numbers in it that are not finite as floats. A list's items are under its key."""
    if isinstance(value, dict):
        return {name: _number(item, name) for name, item in value.items()} if key != "settings" else value
    if isinstance(value, list):
        return [_number(item, key) for item in value]
    if isinstance(value, str) and key.rsplit("_", 1)[-1] in _NUMBERS:
        return _NOT_FINITE.get(value, value)
    return value
