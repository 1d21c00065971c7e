"""`paceline report`: one self-contained page of a run or of several, made from what lies in their folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import write_whole
from paceline.observe.console import Console
from paceline.observe.report.page import is_report, open_runs, plotly_js, report_page, summary_of
from paceline.records import UserError

NAME = "report.html"


def report(folders: Sequence[Path], output: Path | None, *, console: Console) -> dict[str, Any]:
    """Write the page and return where it is and what it shows. Runs that are under way are shown as far as they are."""
    place = _place(folders, output)
    plotly_js()  # refused before long events are read
    with console.progress("read", len(folders)) as tick:
        runs = open_runs(folders, tick)
    text = report_page(runs)
    write_whole(place, text)
    return {"report": str(place), "bytes": len(text.encode()), "runs": [summary_of(run) for run in runs]}


def report_text(summary: dict[str, Any]) -> str:
    """Return what a person reads of it."""
    lines = [f"{run['run']}: {left}" for run in summary["runs"] for left in run["left_out"]]
    under_way = [run["run"] for run in summary["runs"] if run["state"] in ("starting", "running")]
    if under_way:
        lines.append(f"Without an end so far, under way or killed: {', '.join(under_way)}.")
    lines.append(f"Wrote {summary['report']} ({summary['bytes'] / 2**20:.1f} MiB): open it in a browser.")
    return "\n".join(lines)


def _place(folders: Sequence[Path], output: Path | None) -> Path:
    """Return where the page goes.

    Raises:
        UserError: the place is not said, not there, or taken by something that is no report.
    """
    if output is None and len(folders) > 1:
        raise UserError(f"A report of {len(folders)} runs belongs to none of their folders. Name a file with --output.")
    place = output or folders[0] / NAME
    if output is None and not folders[0].is_dir():
        raise UserError(f"{folders[0]} is no folder, and a report is of a run's folder. Name a run's folder.")
    if place.exists() and not is_report(place):
        raise UserError(f"{place} (--output) is no report of paceline, so it is not replaced. Name another file.")
    if not place.parent.is_dir():
        raise UserError(f"{place} (--output) lies in a folder that is not there. Make it, or name another file.")
    return place
