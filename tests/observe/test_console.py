"""Progress where there is no terminal, with the time left; and a console whose reader has gone."""

import io
import os
import pty
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import console as module
from paceline.observe.console import Console
from paceline.records import RunError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def lines(monkeypatch: pytest.MonkeyPatch, work: Any, total: int | None) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with Console().progress("decode", total) as tick:
        work(tick)
    return out.getvalue().splitlines()


def test_the_time_left_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    def work(tick: Any) -> None:
        for done, seconds in ((1, 4.0), (2, 2.0), (40, 354.0), (100, 600.0)):
            clock[0] += seconds
            tick(done, 100)

    # 6 s for 2 of 100, 360 s for 40, and the end has none.
    assert lines(monkeypatch, work, 100) == [
        "  decode 2/100 2% eta 4:54",
        "  decode 40/100 40% eta 9:00",
        "  decode 100/100 100%",
        "  decode 100/100 100%",
    ]


def test_a_note_stands_alone_and_without_a_total_nothing_is_left(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    def work(tick: Any) -> None:
        clock[0] += 6
        tick(3, note="busy")

    assert lines(monkeypatch, work, 10) == ["  decode 3/10 30% busy"] * 2
    assert lines(monkeypatch, lambda tick: tick(3), None) == ["  decode 3"]


def test_a_terminal_that_was_closed_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stream = pty.openpty()
    with os.fdopen(stream, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        console = Console()
        console.line("somebody reads this")
        assert os.read(terminal, 100).strip() == b"somebody reads this"
        os.close(terminal)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(stream, b"the terminal is really gone")
        for _ in range(3):
            console.line("and nobody this")
        out.write("what is left goes nowhere")
        out.flush()


@pytest.mark.parametrize("kind", ["full disk", "pipe"])
def test_work_outlives_a_stream_that_cannot_be_written_any_more(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    told: list[str] = []
    with Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", full if kind == "full disk" else pipe)
        console = Console()
        with console.outlived(told.append):
            console.line("one")
            console.line("two")
    cause = {"full disk": "No space left on device", "pipe": "nobody reads it any more"}[kind]
    assert told == [f"Standard output cannot be written: {cause}."]


def test_other_work_ends_with_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        console = Console()
        with console.outlived(lambda text: None):
            pass
        with pytest.raises(RunError, match="Standard output cannot be written: No space left on device"):
            console.line("one")


@pytest.mark.parametrize("columns", [12, 24, 40, 80])
def test_a_narrow_terminal_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    rows = [["1", "69,267,923,129,927.8", "both in turn"], ["2", "3.5", "features"]]
    Console().table("a title", ["targets", "samples/s", "limited by"], rows)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    whole = "".join(out.getvalue().split())
    if columns < 80:  # names beside figures, row by row
        wanted = ["targets1", "69,267,923,129,927.8", "targets2", "samples/s3.5", "limitedbyfeatures"]
        assert all(text in whole for text in wanted) if columns > 12 else "…" not in whole
    else:
        assert whole == "atitletargetssamples/slimitedby169,267,923,129,927.8bothinturn23.5features"
