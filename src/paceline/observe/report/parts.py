"""What a page is made of: figures that Plotly draws, tables, and how numbers are said."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.observe.report.files import Evaluation, Folder
from paceline.observe.report.history import History, Steps

_MOST_LABEL = 60  # letters in a figure


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of a row is its heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in Plotly's form, without colours, which the page's style decides, and what it says in words.

    `meta` of a trace says which run it is of (`run`), or only whose colour it takes (`colour`).
    """

    name: str
    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    said: Sequence[str]  # the figure's main numbers, a sentence each
    table: Table | None = None
    over_steps: bool = False  # its x axis are steps, as that of other figures is


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands where a figure or table would, and says why there is none."""

    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a page shows of one run."""

    index: int
    name: str
    place: str
    history: History
    steps: Steps
    state: str  # a word
    folder: Folder

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """What `paceline evaluate` left in the folder."""
        return self.folder.evaluations


def figures(value: float | None, digits: int = 4) -> str:
    """Return a number in so many significant digits; – where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 10**15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def length(value: float | None) -> str:
    """Return an acceptance length."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}"


def share(value: float | None) -> str:
    """Return a share in percent."""
    return "–" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def gib(count: float | None) -> str:
    """Return bytes in GiB."""
    return "–" if count is None or not math.isfinite(count) else f"{count / 2**30:,.2f} GiB"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


def moment(t: float) -> str:
    """Return a time since 1970 in words, UTC."""
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return "at an unknown time"


def clock_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that a time axis of this length is told in, and its seconds."""
    return ("h", 3600.0) if seconds > 3 * 3600 else ("min", 60.0) if seconds > 180 else ("s", 1.0)


def label(text: str) -> str:
    """Return a text for Plotly, which would take some of its characters for HTML; the beginning of a long one."""
    text = text if len(text) <= _MOST_LABEL else f"{text[: _MOST_LABEL - 1]}…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def name_of(path: Path) -> str:
    """Return what a run's folder is called."""
    return path.resolve().name or str(path)
