"""quarantine.jsonl: what a run set aside, one JSON object a line as in events.jsonl. No file while there is nothing.

Lines are appended in one call, by any thread. Steps behind the checkpoint that a run goes on from are told again.
"""

import threading
from pathlib import Path
from typing import Any

from paceline.observe.events import EventLog


class Quarantine:
    """Appends to a run's quarantine.jsonl."""

    def __init__(self, run: Path) -> None:
        self.path = run / "quarantine.jsonl"
        self._lock = threading.Lock()
        self._log: EventLog | None = None

    def write(self, event: str, **values: Any) -> None:
        """Append one line."""
        with self._lock:
            self._log = self._log or EventLog(self.path.parent, self.path.name)
        self._log.write(event, **values)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._log is not None:
                self._log.close()

    def __enter__(self) -> "Quarantine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
