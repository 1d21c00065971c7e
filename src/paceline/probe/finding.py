"""What a probe gets, what it returns, and how an exception is told in one line."""

import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "degraded", "refused", "skipped", "died", "hung"]

_LONGEST = 240  # characters of an exception's text


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a probe works. A probe asks this and not torch whether it may use a GPU."""

    devices: int  # CUDA devices that the probe `torch` could use
    cache: str  # folder of what is made once and reused
    runs: str  # folder where runs are written
    scratch: str  # temporary folder of this doctor, removed at its end


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe saw."""

    verdict: Verdict
    observed: str
    numbers: dict[str, Any] = field(default_factory=dict)
    saw: str = ""  # one of the entry's outcomes, where the version of torch decides which
    meaning: str = ""  # where the probe knows better than its entry
    remedy: str = ""


def tell(error: BaseException) -> str:
    """Return type, text, last frame and first cause of an exception; no text is `<empty message>`."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return _one(error) if cause is error else f"{_one(error)}, caused by {_one(cause)}"


def _one(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text or '<empty message>'}{place}"
