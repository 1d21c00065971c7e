"""The verb `report` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli_options import AsJson, finish
from paceline.observe.console import Console


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, also of one under way.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: RUN_DIR/report.html; of several runs it is needed."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write one HTML page of a run, or of several over one another: curves, roles, faults, settings, results.

    The page holds everything and loads nothing, so it can be sent to somebody. Only a report is ever replaced.
    """
    from paceline.recipes.report import report as recipe
    from paceline.recipes.report import report_text

    console = Console(json=json)
    summary = recipe(run_dirs, output, console=console)
    finish(console, json, summary, report_text(summary))
