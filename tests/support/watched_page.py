"""A run that somebody watches in a browser: this process appends its events, another one serves its page."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.checkpoint.folder import claimed
from paceline.observe.events import LineFile
from paceline.observe.reading import EventTail
from paceline.observe.state import RunState


class Run:
    """A run's folder that this process holds and appends events to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()

    def open(self) -> None:
        """Hold it."""
        self._lines = LineFile(self.folder / "events.jsonl")
        self._claim = claimed(self.folder)
        self._claim.__enter__()

    def tell(self, *events: dict[str, Any]) -> None:
        for event in events:
            self._lines.write(**event)

    def close(self) -> None:
        """Let go of it, as a process does that ends or is killed."""
        self._claim.__exit__(None, None, None)
        self._lines.close()

    @property
    def state(self) -> dict[str, Any]:
        """Its state now, folded from the file."""
        state = RunState()
        for event in EventTail(self.folder).poll():
            state.apply(event)
        return state.as_dict()


class Server:
    """`watch --web` in a process of its own."""

    def __init__(self, folder: Path, port: int = 0, *more: object) -> None:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "watch",
            folder,
            "--web",
            "--interval",
            "0.1",
            "--port",
            port,
            *more,
        ]
        self.process = subprocess.Popen(
            [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "The run's live page, until Ctrl-C:\n"
        self.url = self.process.stdout.readline().strip()
        self.port = int(urlsplit(self.url).port or 0)

    def end(self, how: int = signal.SIGINT) -> str:
        """Send a signal and return what the process has printed by its end."""
        self.process.send_signal(how)
        return self.process.communicate(timeout=30)[0]
