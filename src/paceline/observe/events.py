"""events.jsonl: the append-only record of a run, one JSON object a line.

Every line has `schema` (version of this format), `t` (seconds since the epoch) and `event` (its kind); docs/events.md
lists the kinds. A line is written with one call and flushed, so a killed run leaves at most one torn last line.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

SCHEMA = 1


class EventLog:
    """Appends events to a run's events.jsonl; safe to call from every role's thread."""

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._file = (run / "events.jsonl").open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        line = json.dumps({"schema": SCHEMA, "t": round(time.time(), 3), "event": event, **values})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; later events are an error."""
        self._file.close()

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
