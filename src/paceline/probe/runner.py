"""Runs probes in child processes and always gets an answer: a crash, a hang and silence are findings too."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

from paceline.probe.child import SEPARATOR
from paceline.probe.finding import Bench, Finding, tell

LOOK_EVERY_S = 0.1
LAST_LINES, LAST_CHARACTERS = 3, 300


@dataclass(frozen=True, slots=True)
class Call:
    """One probe as the child sees it: `module:function`, its arguments, and its time limit."""

    function: str
    limit_s: float
    arguments: tuple[str, ...] = ()


def run_probes(calls: Sequence[Call], bench: Bench) -> Generator[tuple[Finding, float], None, None]:
    """Yield the finding and the seconds of each call, in order.

    The calls share a process for as long as it lives; the rest goes on in a new one after a crash or a hang.
    """
    left = list(calls)
    while left:
        try:
            started = _Child(left, bench)
        except OSError as error:
            left.pop(0)
            yield Finding("refused", f"no process could be started for it: {tell(error)}", saw="fails"), 0.0
            continue
        with started as child:
            while left:
                began = time.monotonic()
                finding, alive = child.next(left.pop(0).limit_s)
                yield finding, time.monotonic() - began
                if not alive:
                    break


class _Child:
    """One child process in a process group of its own, which ends with it."""

    def __init__(self, calls: Sequence[Call], bench: Bench) -> None:
        self._noise: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (open for as long as the child is)
        self._lines, pipe = os.pipe()
        self._rest = b""
        words = [word for call in calls for word in (call.function, *call.arguments, SEPARATOR)]
        # -P: no module of the folder that the doctor is called from stands in for one that torch needs.
        command = [sys.executable, "-P", "-m", "paceline.probe.child", str(pipe), json.dumps(asdict(bench)), *words]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._noise,
                stderr=self._noise,
                pass_fds=(pipe,),
                start_new_session=True,
                env=_environment(bench),
            )
        except BaseException:
            os.close(self._lines)
            self._noise.close()
            raise
        finally:
            os.close(pipe)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        # The leader is not waited for before the group is ended: its number cannot have become another's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._lines)
        self._noise.close()

    def next(self, limit_s: float) -> tuple[Finding, bool]:
        """Return the next finding, and whether the child can go on."""
        until = time.monotonic() + limit_s
        while True:
            ended = self._ended()
            if (line := self._line()) is not None:
                return _parse(line), True
            if ended:  # it was looked for before the last line was: nothing can come any more
                return Finding("died", self._death(ended), saw="died"), False
            if time.monotonic() >= until:
                return Finding("hung", f"no answer within {limit_s:g} s{self._last_words()}", saw="hung"), False

    def _line(self) -> bytes | None:
        """Return a whole line, after waiting a little for one."""
        line, newline, rest = self._rest.partition(b"\n")
        if newline:
            self._rest = rest
            return line
        if select.select([self._lines], [], [], LOOK_EVERY_S)[0]:
            got = os.read(self._lines, 1 << 16)
            self._rest += got
            if not got:
                time.sleep(LOOK_EVERY_S)  # closed: the end is near
            return self._line() if got else None
        return None

    def _ended(self) -> os.waitid_result | None:
        """Return how the child ended, if it did; it stays a zombie, so that its group keeps its number."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _death(self, end: os.waitid_result) -> str:
        if end.si_code == os.CLD_EXITED:
            return f"ended with status {end.si_status} and without an answer{self._last_words()}"
        try:
            name = signal.Signals(end.si_status).name
        except ValueError:
            name = f"signal {end.si_status}"
        return f"died with {name}{self._last_words()}"

    def _last_words(self) -> str:
        self._noise.seek(0, os.SEEK_END)
        self._noise.seek(max(0, self._noise.tell() - 4096))
        lines = self._noise.read().decode(errors="replace").split("\n")
        words = " / ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
        return f"; its last words: {words[-LAST_CHARACTERS:]}" if words else ""


def _parse(line: bytes) -> Finding:
    try:
        return Finding(**json.loads(line))
    except (ValueError, TypeError):
        return Finding("died", f"wrote an answer that cannot be read: {line[:200]!r}", saw="died")


def _environment(bench: Bench) -> dict[str, str]:
    """Return the child's environment: caches of its own, so that a compile really compiles."""
    own = {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(bench.scratch, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(bench.scratch, "triton"),
    }
    return {"OMP_WAIT_POLICY": "passive", **os.environ, **own}  # the former as the command line sets it
