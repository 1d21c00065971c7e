"""Tells TensorBoard, Weights & Biases, MLflow and Trackio of a run.

Each tracker has a process of its own (tracker_process), which reads the run's events as they come. So a library that is
slow, hangs, prints, or ends its process stalls no step and costs the run nothing but the tracker, and what it has not
been told is still in the events. This side starts the processes, says when the run is over, and reports one that
failed.
"""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.observe.events import EventLog
from paceline.observe.tracker_numbers import BEGIN
from paceline.records import UserError

TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "Trackio"}
HANG_S = 120.0  # longest that a library may take for one call
END_S = 60.0  # longest that the trackers may take to finish, all at once
_KILLED_S = 5.0  # longest that a killed process may take

# Libraries that would report on their users do not, unless they are told to.
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed.

    Raises:
        UserError: the first one.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"{TITLES[name]} (observe.trackers: {name}) is not installed here: install it with "
                f"`pip install 'paceline[{name}]'`, or take it out of observe.trackers."
            )


class Trackers:
    """The trackers of a run; they begin with the event that begins a part of it."""

    def __init__(self, run: Path, names: Sequence[str], *, events: EventLog, tell: Callable[[str], None]) -> None:
        """`tell` gets a line for a person."""
        self._run, self._names, self._events, self._tell = run.resolve(), names, events, tell
        self._following: list[_Process] = []

    def follow(self, event: dict[str, Any]) -> None:
        """Look at an event."""
        if event["event"] in BEGIN:
            for name in self._names:
                try:
                    self._following.append(_Process(self._run, name, self._failed))
                except OSError as error:
                    self._failed(name, f"its process cannot be started: {error}.")
            self._names = ()

    def end(self, until: float) -> None:
        """Let the trackers finish, until the time (monotonic) at most: what has not ended then is ended."""
        for process in self._following:
            process.over()
        for process in self._following:
            process.wait(until)

    def _failed(self, name: str, message: str) -> None:
        self._events.write("tracker_failed", tracker=name, message=message)
        self._tell(f"  {TITLES[name]} is told nothing any more: {message}")


class _Process:
    """A tracker's process, and the thread that waits for it."""

    def __init__(self, run: Path, name: str, failed: Callable[[str, str], None]) -> None:
        self._name, self._failed, self._late = name, failed, False
        self._log = run / "trackers" / f"{name}.log"
        if self._log.parent.is_symlink():
            raise OSError(f"{self._log.parent} is a link, and a run writes only into its own folder")
        self._log.parent.mkdir(exist_ok=True)
        self._log.unlink(missing_ok=True)  # an earlier part's, or a link to somewhere else
        command = [sys.executable, "-m", "paceline.observe.tracker_process", str(run), name, str(HANG_S)]
        with self._log.open("xb") as log:
            # A session of its own: Ctrl-C in the terminal is for the run, which then says that it is over.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_QUIET | os.environ,
                start_new_session=True,
            )
        self._waiting = threading.Thread(target=self._wait, name=f"tracker {name}", daemon=True)
        self._waiting.start()

    def over(self) -> None:
        """Say that nothing more comes."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, until: float) -> None:
        """Wait for its end, or make an end of it."""
        self._waiting.join(max(until - time.monotonic(), 0))
        if self._waiting.is_alive():
            self._late = True
            self._process.kill()
            self._waiting.join(_KILLED_S)

    def _wait(self) -> None:
        status = self._process.wait()
        self.over()
        if status:
            said = "it did not finish in time" if self._late else self._cause(status)
            self._failed(self._name, f"{said.rstrip('.')}. What it printed is in {self._log}.")

    def _cause(self, status: int) -> str:
        """Return the last line that the process printed, of a traceback the error, unless it ended without one."""
        lines = self._log.read_text(errors="replace").split("\n") if status == 1 else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return (
            last[:300] or f"its process {'was killed by signal' if status < 0 else 'ended with status'} {abs(status)}"
        )
