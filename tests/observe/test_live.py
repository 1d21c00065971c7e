"""What a person sees of a run that works here: lines to a file, a panel on a terminal, nothing where nobody looks."""

import io
import os
import pty
import re
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from told_run import Event, begin, sample_event, step_event, told

from paceline.observe.console import Console
from paceline.observe.live import RunView

SAVED = told("checkpoint", 1012.0, steps=10, bytes=2**20, write_s=1.0, copy_s=0.5)
END = [told("trained", 1020.0, train_steps=100, train_s=20.0, drafter="d")]


def follow(view: RunView, events: list[Event]) -> None:
    with view:
        for event in begin():
            view.follow(event)
        view.begin()
        for event in events:
            view.follow(event)


def test_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    steps = [step_event(i, 1010.0 + i) for i in range(3)]
    follow(RunView(Console()), [*steps, SAVED, sample_event(1013.0, {}, {"features": 0.4}), *END])
    first, saved, sample, advice = out.getvalue().splitlines()
    assert first.startswith("  step 1/100 epoch 0 loss 2.5000 accept 1.50 slot-1 40%")
    assert saved == "  saved after step 10 (1.0 MiB in 1.0 s; the step waited 0.50 s)"
    assert sample.startswith("  target-replica-0 busy 100% drafter-rank-0 busy 60% waits 40% for features queue 1.0MiB")
    assert advice.startswith("  Drafters wait 40 % for features: add a target replica")


def test_the_same_advice_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    waits = [{"features": 0.4}, {"features": 0.5}, {}, {"features": 0.5}]
    samples = [sample_event(1000.0 + 100 * i, {}, wait, s=100.0) for i, wait in enumerate(waits)]
    follow(RunView(Console()), samples)
    assert out.getvalue().count("add a target replica") == 2


class Terminal:
    """A terminal of 80 by 20 and what is written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end, self.stream = pty.openpty()
        termios.tcsetwinsize(self.stream, (20, 80))
        monkeypatch.setenv("TERM", "xterm")
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        self.out = os.fdopen(self.stream, "w")
        monkeypatch.setattr("sys.stdout", self.out)

    def read(self) -> str:
        found = b""
        os.set_blocking(self.end, False)
        try:
            while part := os.read(self.end, 2**16):
                found += part
        except BlockingIOError:
            pass
        return found.decode()


def test_a_terminal_gets_lines_and_below_them_one_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    with terminal.out:
        follow(RunView(Console()), [step_event(9, 1010.0), SAVED, step_event(19, 1015.0)])
        text = terminal.read()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    last = plain[plain.rindex("/runs/one") :].splitlines()
    assert last[1].startswith("step 20/100 ━")
    assert "tokens/s 200" in plain
    assert plain.count("  saved after step 10") == 1
    assert plain.index("  saved after step 10") < plain.rindex("/runs/one")
    assert "  step 10/100 epoch" not in plain, "the panel has it"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and comes back


@pytest.mark.parametrize("closed", ["terminal", "full disk", "pipe"])
def test_whoever_writes_events_does_not_learn_that_nobody_looks(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    terminal, lost = Terminal(monkeypatch), list[str]()
    reader, writer = os.pipe()
    os.close(reader)
    with terminal.out, Path("/dev/full").open("w") as full, os.fdopen(writer, "w") as pipe:
        if closed != "terminal":
            monkeypatch.setattr("sys.stdout", full if closed == "full disk" else pipe)
        console = Console()
        with console.outlived(lost.append):
            view = RunView(console, refresh_s=0.01)
            if closed == "terminal":
                shown = threading.Event()
                told_by(console, shown.set)
                with view:
                    assert shown.wait(30)
                    os.close(terminal.end)
                    for event in [*begin(), SAVED]:
                        view.follow(event)
            else:
                follow(view, [SAVED, step_event(9, 1010.0)])
    assert len(lost) == (closed != "terminal")


def told_by(console: Console, call: Callable[[], object]) -> None:
    """Call when the console has written something."""
    written = console._written

    def both(write: Callable[[], None]) -> None:
        written(write)
        call()

    console._written = both  # type: ignore[method-assign]
