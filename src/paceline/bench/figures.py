"""Rows of figures as a person reads them: a column for each measurement, in tables that 80 columns hold.

What is the same in all measurements is told once, beneath. JSON has the rows as they are.
"""

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from paceline.observe.console import Console

_WIDTH = 80
_GAP = 2  # spaces between two columns
_CELL = 18  # a longer text goes on in a line below, at a space
_NOTHING = "-"


def show_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print rows of figures, each named as in JSON, a field of fields `roles.drafter rank 0`."""
    told = [dict(_fields(row)) for row in rows]
    names = list(dict.fromkeys(name for row in told for name in row))
    cells = {name: [_spelled(row.get(name)) for row in told] for name in names}
    cells = {name: values for name, values in cells.items() if set(values) != {_NOTHING}}
    alike = [name for name, values in cells.items() if len(rows) > 1 and len(set(values)) == 1]
    room = _WIDTH - _GAP - max(map(len, cells))
    each = [name for name in cells if name not in alike]
    if each:
        limit = room if len(rows) == 1 else _CELL
        columns = [[_folded(cells[name][at], limit, room) for name in each] for at in range(len(rows))]
        for part in _parts(columns, room):
            lines = [line for line in zip(each, *part, strict=True) if set(line[1:]) != {_NOTHING}]
            console.line("")
            console.table("", lines[0], lines[1:])
    if alike:
        console.line("")
        console.table("", ("in all of them", ""), [(name, _folded(cells[name][0], room, room)) for name in alike])


def brief(row: dict[str, Any], *names: str) -> str:
    """Return some of a row's figures in one line, for who waits for the others; why it failed, where it did."""
    if "failed" in row:
        return f"  failed: {row['failed']}"
    return "  " + "  ".join(f"{name} {_spelled(row.get(name))}" for name in names)


def _fields(row: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{within}{name}.")
        else:
            yield within + name, value


def _spelled(value: object) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_spelled, value))
    return str(value)


def _folded(text: str, limit: int, room: int) -> str:
    """Return a text in lines of at most `limit`, or as wide as its longest word if there is room for that."""
    longest = max(map(len, text.split()), default=0)
    return "\n".join(wrap(text, max(limit, min(longest, room)), break_on_hyphens=False))


def _parts(columns: list[list[str]], room: int) -> Iterator[list[list[str]]]:
    """Yield the columns in groups that fit side by side."""
    part: list[list[str]] = []
    left = room
    for column in columns:
        width = max(len(line) for cell in column for line in cell.split("\n"))
        if part and width + _GAP > left:
            yield part
            part, left = [], room
        part.append(column)
        left -= width + (_GAP if len(part) > 1 else 0)
    yield part
