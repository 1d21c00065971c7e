"""Follows a run that is elsewhere: over ssh, inside a container, or both.

Its event files are copied, byte for byte, into a folder of this machine, so that whoever reads events here reads those
too, a torn line or a newer schema among them. A connection that breaks is made again and goes on at the byte where the
copy ends. What comes is data: bytes for the copy and words that are compared, nothing of it is run.
"""

import math
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from paceline.observe.far_side import far_command
from paceline.observe.place import Place
from paceline.observe.reading import rotated_name
from paceline.observe.ssh_errors import Ended, explained, is_final
from paceline.observe.watched import Look
from paceline.records import UserError

_LIFE_S = 86400.0  # of one connection: a script whose container forgot it ends by itself
_SILENCE_S = 30.0  # beyond the interval, after which a connection is given up
_BACK_OFF_S = (1, 2, 4, 8, 15, 30)
_LONGEST_LINE = 2**24
_CHUNK = 2**16
_TROUBLE = {
    "missing": "There is no folder {path} {where}. Check the path.",
    "folder": "A run is a folder, but {path} {where} is a file. Name the run_dir of a `paceline train`.",
    "closed": "{path} {where} may not be read by the user who looks. Choose another user, or permit it there.",
    "none": "{path} {where} is not a run's folder: it has neither events.jsonl nor settings.yaml. Name the run_dir of "
    "a `paceline train`.",
    "gap": "Of the events in {path} {where} a file is missing, {what}.",
    "lacks": "The shell {where} has no command {what}, without which a run is not read there: install it, or watch "
    "through another host or container (--via).",
}


class _Lost(Exception):
    """A connection that broke, or that was not there."""


class RemoteRun:
    """A run elsewhere. `folder` holds the copy of its events and belongs to whoever made it."""

    def __init__(self, place: Place, folder: Path, *, interval_s: float, ask: bool) -> None:
        """`ask`: ssh may ask for a password or a passphrase at the terminal."""
        self.folder = folder
        self._place, self._interval_s, self._ask = place, interval_s, ask
        self._copy = _Copy(folder)
        self._met = False  # it has answered once

    def looks(self, *, once: bool = False) -> Generator[Look]:
        """Yield a look every interval until the caller stops; when the connection is lost, one that says so.

        With `once` there is a single look, and no second try.

        Raises:
            UserError: the run cannot be read: at first for any reason, later for one that will not pass.
        """
        failures = 0
        while True:
            try:
                for look in self._connected(once):
                    self._met, failures = True, 0
                    yield look
                if once:
                    return
                time.sleep(min(1.0, self._interval_s))  # it has ended as it should
            except _Lost as lost:
                if once or not self._met:
                    raise UserError(str(lost)) from None
                wait = _BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)]
                failures += 1
                yield Look(None, time.time(), trouble=f"{lost} Trying again in {wait} s.")
                time.sleep(wait)

    def _connected(self, once: bool) -> Iterator[Look]:
        mark = secrets.token_hex(16)
        rounds = 1 if once else max(1, math.ceil(_LIFE_S / self._interval_s))
        command = far_command(
            self._place,
            number=self._copy.number,
            at=self._copy.size,
            pause_s=self._interval_s,
            rounds=rounds,
            mark=mark,
            ask=self._ask,
        )
        with _Connection(command, self._place, silence_s=_SILENCE_S + self._interval_s, ask=self._ask) as connection:
            for word, rest in self._copy.take(connection.lines(), mark):
                connection.met = True
                if word == "look":
                    yield _look(rest)
                elif word == "trouble":
                    raise self._refused(rest)
                elif word == "end":
                    return
                elif word == "anew":
                    self._copy.begin()
                    yield Look(None, time.time())  # whoever reads the copy finds it empty, and so begins anew too
                    return
            raise connection.lost()

    def _refused(self, rest: str) -> UserError:
        kind, _, what = rest.partition(" ")
        sentence = _TROUBLE.get(kind, "{path} {where} cannot be read: {what}.")
        path = self._place.path.removeprefix("./")
        if kind == "closed" and what:  # a file in it
            path = f"{path}/{what}"
        return UserError(sentence.format(path=path, where=self._place.whereabouts, what=what))


class _Copy:
    """The event files of a run elsewhere, as far as they have come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.begin()

    def begin(self) -> None:
        """Begin with the first file, which is empty."""
        self.number, self.size = 0, 0
        for path in self._folder.glob("events-*.jsonl"):
            path.unlink()
        (self._folder / "events.jsonl").write_bytes(b"")

    def take(self, lines: Iterator[bytes], mark: str) -> Iterator[tuple[str, str]]:
        """Keep the bytes of the files and yield, as they come, the marked lines between: a word and the rest.

        The line feed before a marked line is not a file's.
        """
        start = mark.encode() + b" "
        file: IO[bytes] | None = None
        due = b""  # a line feed that is a file's unless a marked line follows
        try:
            for line in lines:
                if not line.startswith(start):
                    if file is not None:
                        self.size += file.write(due + line[:-1])
                        due = b"\n"
                    continue
                due = b""
                word, _, rest = line[len(start) : -1].decode(errors="replace").partition(" ")
                if word == "at":
                    self.number = _number(rest)
                    file = file or (self._folder / "events.jsonl").open("ab")
                if file is not None:
                    file.flush()
                if word == "full":
                    (self._folder / "events.jsonl").rename(self._folder / rotated_name(_number(rest)))
                    self.number, self.size = _number(rest) + 1, 0
                    if file is not None:
                        file.close()
                    file = (self._folder / "events.jsonl").open("ab")
                elif word != "at":
                    yield word, rest
        finally:
            if file is not None:
                file.close()


class _Connection:
    """A command that runs where the run is, and what it prints."""

    def __init__(self, command: list[str], place: Place, *, silence_s: float, ask: bool) -> None:
        self.met = False
        self._command, self._place, self._silence_s, self._ask = command, place, silence_s, ask
        self._silent = False
        self._said, self._noise = b"", b""  # on standard error; on standard output before the script's first word

    def __enter__(self) -> "_Connection":
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},  # causes are told in English
            )
        except OSError as error:
            raise _not_started(self._command[0], error) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def lines(self) -> Iterator[bytes]:
        """Yield whole lines of standard output until it ends or stays silent."""
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        rest = bytearray()
        with selectors.DefaultSelector() as selector:
            for stream in (out, err):
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                # Who is asked for a password may take a while.
                waits = None if self._ask and not self.met else self._silence_s
                ready = selector.select(waits)
                if not ready:
                    self._silent = True
                    return
                for key, _ in ready:
                    chunk = os.read(key.fd, _CHUNK)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is err:
                        self._said = (self._said + chunk)[-_CHUNK:]
                    else:
                        if not self.met:
                            self._noise = (self._noise + chunk)[-_CHUNK:]
                        rest += chunk
                        yield from _cut(rest)

    def lost(self) -> Exception:
        """Return what is to be raised when the output has ended too early."""
        if self._silent:
            return _Lost(f"The connection to the run {self._place.whereabouts} is silent.")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        said = self._said if self.met or self._said.strip() else self._noise
        ended = Ended(self._process.returncode, said.decode(errors="replace"), met=self.met)
        sentence = explained(ended, self._place)
        return UserError(sentence) if is_final(ended) else _Lost(sentence)


def _cut(rest: bytearray) -> Iterator[bytes]:
    """Yield the whole lines of what was read and take them away."""
    end = rest.rfind(b"\n") + 1
    lines = bytes(rest[:end]).split(b"\n")[:-1]
    del rest[:end]
    if len(rest) > _LONGEST_LINE:
        raise UserError(f"The far side sent a line of more than {_LONGEST_LINE:,} bytes: that is no run's.")
    for line in lines:
        yield line + b"\n"


def _not_started(program: str, error: OSError) -> UserError:
    if isinstance(error, FileNotFoundError):
        hint = "Install it (Debian, Ubuntu: apt-get install openssh-client)." if program == "ssh" else "Correct --via."
        return UserError(f"There is no command {program} on this machine. {hint}")
    return UserError(f"{program} cannot be started: {error.strerror}.")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 10):
        raise UserError(f"The far side answers what no run has: a file number {text[:20]!r}.")
    return int(text)


def _look(rest: str) -> Look:
    owner, _, more = rest.partition(" ")
    now, _, who = more.partition(" ")
    held = {"held": True, "free": False}.get(owner)
    process, _, host = who.strip().partition(" ")
    name = f"process {process} on {host}" if host else ""
    clock = float(now) if now.isascii() and now.isdecimal() and len(now) < 12 else time.time()
    return Look(held, clock, name)
