"""`paceline report` on the command line: where the page goes, what it replaces, and what a program reads."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import eventful, write_events
from typer.testing import CliRunner

from paceline.cli import app
from paceline.observe.report.page import is_report
from paceline.records import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_events(tmp_path / "first", eventful(40))
    write_events(tmp_path / "second", eventful(40, seed=3)[:-1])
    return tmp_path


def told(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["report", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.fixture
def refused(here: Path) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
        with pytest.raises(UserError) as caught:
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
        assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
        return str(caught.value)

    return run


def test_the_page_of_a_run_lies_in_its_folder_and_is_made_anew(here: Path) -> None:
    (here / "first" / "evaluation.json").write_text("{")
    for _ in range(2):
        summary = told("first")
        assert summary["report"] == "first/report.html"
        assert summary["bytes"] == (here / "first" / "report.html").stat().st_size
        (run,) = summary["runs"]
        assert (run["run"], run["state"], run["step"]) == ("first", "finished", 40)
        assert run["left_out"] == ["evaluation.json is left out: it cannot be read as JSON (JSONDecodeError)."]
    assert is_report(here / "first" / "report.html")


def test_several_runs_need_a_place(here: Path, refused: Callable[..., str]) -> None:
    assert refused("first", "second") == (
        "A report of 2 runs belongs to none of their folders. Name a file with --output."
    )
    summary = told("first", "second", "--output", "both.html")
    assert [run["state"] for run in summary["runs"]] == ["finished", "running"]
    done = CliRunner().invoke(app, ["report", "first", "second", "--output", "both.html"])
    assert "Without an end so far, under way or killed: second." in done.stdout
    assert "Wrote both.html (" in done.stdout


def test_what_is_no_report_stays(here: Path, refused: Callable[..., str]) -> None:
    for name, content in (("page.html", "<!doctype html><title>mine</title>"), ("notes", "paceline report")):
        (here / name).write_text(content)
        assert refused("first", "--output", name) == (
            f"{name} (--output) is no report of paceline, so it is not replaced. Name another file."
        )
    assert "is no report" in refused("first", "--output", "second")


def test_a_link_is_replaced_and_not_followed(here: Path) -> None:
    told("first")
    (here / "link.html").symlink_to("first/report.html")
    before = (here / "first" / "report.html").read_bytes()
    told("second", "--output", "link.html")
    assert not (here / "link.html").is_symlink()
    assert (here / "first" / "report.html").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere"),
        (["first/events.jsonl"], "events.jsonl"),
        (["empty"], "is not a run's folder"),
        (["newer"], "schema 99"),
        (["first", "--output", "no/where.html"], "lies in a folder that is not there"),
        (["first", "first", "--output", "x.html"], "named twice"),
    ],
)
def test_bad_input(here: Path, refused: Callable[..., str], arguments: list[str], words: str) -> None:
    (here / "empty").mkdir()
    write_events(here / "newer", [{"schema": 99, "t": 1.0, "event": "started"}])
    assert words in refused(*arguments)


def test_without_plotly_one_sentence_says_so(
    here: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError(name)
        return known(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert refused("first") == (
        "`paceline report` draws with plotly, which is not installed. Install it: pip install 'paceline[report]'."
    )
