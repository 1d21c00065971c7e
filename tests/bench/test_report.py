"""The report's bench with a short run and a browser that is none."""

import io
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from paceline.bench import report
from paceline.observe.console import Console
from paceline.records import RunError


@pytest.fixture
def console() -> Console:
    made = Console()
    made.rich = RichConsole(file=io.StringIO(), width=80)
    return made


def browser(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in the browser's place."""
    path = folder / "chromium"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(report, "BROWSERS", ("no such browser", str(path)))


def test_without_a_browser_the_page_is_only_made(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(report, "BROWSERS", ("no such browser",))
    result = report.bench_report(steps=50, opens=1, console=console)
    assert result["browser"] is None
    assert result["events_bytes"] > 20_000
    assert result["page_bytes"] > result["plotly_bytes"] > 1_000_000


def test_the_median_of_what_the_page_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    count = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 9); echo $((n - 1)) > {tmp_path}/n"
    noted = 'data-first-figure-ms=\\"${n}00\\" data-last-figure-ms=\\"${n}50\\" data-figures=\\"8\\"'
    browser(tmp_path, monkeypatch, f'{count}; echo "<html {noted}>"')
    result = report.bench_report(steps=50, opens=3, console=console)
    assert (result["first_figure_s"], result["last_figure_s"], result["figures"]) == (0.8, 0.85, 8)


def test_a_browser_that_draws_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    browser(tmp_path, monkeypatch, 'echo "<html>"; echo no display >&2')
    with pytest.raises(RunError, match="did not draw the page's figures and said: no display"):
        report.bench_report(steps=50, opens=1, console=console)
