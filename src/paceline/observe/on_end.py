"""Runs a command when a run ends, with the outcome in its environment. docs/observe.md lists the variables."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.events import EventLog
from paceline.observe.tracker_numbers import OUTCOMES
from paceline.records import UserError

WAIT_S = 60.0  # longest that the end of a run waits for the command
_LONGEST = 4000  # characters of a variable

# Which keys of which events become which variables; the last event counts.
_VARIABLES = {
    "step": {"total_steps": "TOTAL_STEPS", "loss": "LOSS", "acceptance": "ACCEPTANCE"},
    "held_out": {"loss": "HELD_OUT_LOSS"},
    "evaluated": {"tau": "TAU"},
    "trained": {"drafter": "DRAFTER", "train_steps": "STEP"},
}


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that is not there.

    Raises:
        UserError: it is not.
    """
    if command and shutil.which(command[0]) is None:
        raise UserError(
            f"observe.on_end must begin with a program that is there and may be run, got {command[0]!r}: correct it, "
            "or name the program's whole path."
        )


class OnEnd:
    """Follows a run's events and runs `command` behind the one that ends it, once."""

    def __init__(self, run: Path, command: Sequence[str], *, events: EventLog, tell: Callable[[str], None]) -> None:
        """`tell` gets a line for a person when the command fails."""
        self._run, self._command, self._events, self._tell = run.absolute(), command, events, tell
        self._variables = dict.fromkeys(("TOTAL_STEPS", "LOSS", "ACCEPTANCE", "HELD_OUT_LOSS", "TAU", "DRAFTER"), "")
        self._variables |= {"RUN": str(self._run), "STEP": "0"}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._started = 0.0  # the command, by the monotonic clock
        self._log = self._run / "on_end.log"

    def follow(self, event: dict[str, Any]) -> None:
        """Look at an event. The command is started here, so that it is also where the process is about to be ended."""
        kind = event["event"]
        for key, name in _VARIABLES.get(kind, {}).items():
            self._variables[name] = "" if event.get(key) is None else str(event[key])
        if kind in ("step", "resumed"):
            self._variables["STEP"] = str(event["step"] + 1 if kind == "step" else event["steps"])
        if kind in OUTCOMES and not self._ended:
            self._ended = True
            self._variables |= {"OUTCOME": OUTCOMES[kind], "MESSAGE": event.get("message", "")}
            if self._command:
                self._start()

    def end(self, until: float) -> None:
        """Wait for the command until the time (monotonic) at most, then leave it alone; tell what became of it."""
        if self._process is None:
            return
        try:
            status = self._process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it is not ours any more
            self._say(f"is still running after {time.monotonic() - self._started:.0f} s and is left alone", None)
            return
        if status:
            self._say(f"ended with status {status}, see {self._log}", status)
        else:
            self._events.write("on_end", command=list(self._command), status=0, message=None)

    def _start(self) -> None:
        given = {f"PACELINE_{name}": _plain(value) for name, value in self._variables.items()}
        try:
            self._started = time.monotonic()
            self._log.unlink(missing_ok=True)  # an earlier part's, or a link to somewhere else
            with self._log.open("xb") as log:
                # A session of its own: it outlives this process, and Ctrl-C in the terminal.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | given,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._say(f"could not be started: {error}", None)

    def _say(self, what: str, status: int | None) -> None:
        message = f"observe.on_end ({self._command[0]}) {what}."
        self._events.write("on_end", command=list(self._command), status=status, message=message)
        self._tell(f"  {message}")


def _plain(text: str) -> str:
    """Return a text as a variable can hold it."""
    return text[:_LONGEST].replace("\0", "").encode(errors="backslashreplace").decode()
