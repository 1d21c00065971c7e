"""What `paceline evaluate --probe` prints, and what it ends with."""

import textwrap
from typing import Any

from paceline.records import RunError


def probe_text(report: dict[str, Any]) -> str:
    """Return a line a convention, in 80 columns, and what was found against a reference."""
    lines = [
        textwrap.fill(
            f"{one['convention']}: {one['text']}",
            width=80,
            initial_indent=f"{one['state']:<10}",
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        for one in report["checks"]
    ]
    return "\n".join([*lines, *(_reference_lines(report["reference"]) if report["reference"] else ())])


def probe_error(report: dict[str, Any]) -> RunError | None:
    """Return what to end with if a convention is off."""
    wrong = [one["convention"] for one in report["checks"] if one["state"] == "off"]
    return RunError(f"{', '.join(wrong)}: off, see above. A drafter is served as it was trained.") if wrong else None


def _reference_lines(effect: dict[str, Any]) -> list[str]:
    """Return the lines of a table: a tap and how far its features are from the reference's."""
    rows = [f"  {one['tap']:>5}  {one['relative_error']:14.2g}" for one in effect["taps"]]
    return [f"against {effect['target']}", "    tap  relative error", *rows]
