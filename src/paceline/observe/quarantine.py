"""quarantine.jsonl: what a run set aside, one JSON object a line as in events.jsonl. No file while there is nothing.

Lines are appended in one call, by any thread; on a full disk they wait in memory. docs/events.md lists their kinds.
"""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.observe.events import LineFile


class Quarantine:
    """Appends to a run's quarantine.jsonl; safe to call from every role's thread."""

    def __init__(self, run: Path) -> None:
        self.path = run / "quarantine.jsonl"
        self._lines: LineFile | None = None
        self._lock = threading.Lock()

    def write(self, event: str, **values: Any) -> None:
        """Append one line."""
        with self._lock:
            self._lines = self._lines or LineFile(self.path)
            self._lines.write(event=event, **values)

    def entries(self) -> list[dict[str, Any]]:
        """Return what the lines say so far; one that a killed run has torn is passed over."""
        found = []
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._lines is not None:
                self._lines.close()
                self._lines = None

    def __enter__(self) -> "Quarantine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
