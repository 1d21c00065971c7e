"""A command is run when a run ends, with the outcome in its environment, and never changes how the run ends."""

import json
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import ObserveSettings
from paceline.observe import attending
from paceline.observe.attending import attended
from paceline.observe.events import EventLog
from paceline.observe.reading import read_events

DUMP = (
    "import json, os, sys; given = {k: v for k, v in os.environ.items() if k[:9] == 'PACELINE_'}; "
    "json.dump(given, open(sys.argv[1], 'w'))"
)
STEP = {"total_steps": 9, "loss": 2.5, "acceptance": 1.5}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)


def ended(run: Path, command: Any, *events: tuple[str, dict[str, Any]], grace_s: float = 60.0) -> list[str]:
    """Let a run tell its events and end; return the lines for a person."""
    lines: list[str] = []
    with (
        EventLog(run) as log,
        attended(ObserveSettings(on_end=command), run, log, grace_s=grace_s, tell=lines.append),
    ):
        for kind, values in events:
            log.write(kind, **values)
    return lines


def test_the_outcome_is_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "it's out.json"
    lines = ended(
        tmp_path / "run",
        (sys.executable, "-c", DUMP, str(out)),
        ("started", {}),
        ("step", {"step": 3, **STEP, "loss": float("nan")}),
        ("held_out", {"loss": 3.25}),
        ("evaluated", {"tau": 2.75}),
        ("trained", {"drafter": "runs/x/drafter", "train_steps": 4}),
    )
    assert json.loads(out.read_text()) == {
        "PACELINE_OUTCOME": "finished",
        "PACELINE_RUN": str(tmp_path / "run"),
        "PACELINE_MESSAGE": "",
        "PACELINE_STEP": "4",
        "PACELINE_TOTAL_STEPS": "9",
        "PACELINE_LOSS": "nan",
        "PACELINE_ACCEPTANCE": "1.5",
        "PACELINE_HELD_OUT_LOSS": "3.25",
        "PACELINE_TAU": "2.75",
        "PACELINE_DRAFTER": "runs/x/drafter",
    }
    assert lines == []
    assert list(read_events(tmp_path / "run"))[-1] | {"t": 0} == {
        "schema": 1, "t": 0, "event": "on_end", "status": 0, "message": None,
        "command": [sys.executable, "-c", DUMP, str(out)],
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "outcome"), [("failed", "failed"), ("interrupted", "interrupted")])
def test_a_text_is_split_into_words_and_no_shell_sees_the_message(tmp_path: Path, kind: str, outcome: str) -> None:
    out = tmp_path / "out put.json"
    message = "x; $(touch y) \ud800\0é" + 9000 * "z"
    command = f"{sys.executable} -c \"{DUMP}\" '{out}'"
    assert ended(tmp_path / "run", command, ("resumed", {"steps": 7}), (kind, {"message": message})) == []
    found = json.loads(out.read_text())
    assert (found["PACELINE_OUTCOME"], found["PACELINE_STEP"], found["PACELINE_LOSS"]) == (outcome, "7", "")
    assert found["PACELINE_MESSAGE"] == ("x; $(touch y) \\ud800é" + 3983 * "z")[: len(found["PACELINE_MESSAGE"])]
    assert 3900 < len(found["PACELINE_MESSAGE"]) < 4100


def test_it_is_run_once_and_not_where_no_run_ended(tmp_path: Path) -> None:
    out = tmp_path / "times"
    command = ("sh", "-c", f"echo once >> {out}")
    ended(tmp_path / "run", command, ("interrupted", {"message": "late"}), ("interrupted", {"message": "as well"}))
    assert out.read_text() == "once\n"
    ended(tmp_path / "run", command, ("started", {}))
    assert out.read_text() == "once\n"


def test_its_failure_is_told_with_its_output_kept(tmp_path: Path) -> None:
    command = ("sh", "-c", "echo said; echo to both >&2; exit 3")
    (line,) = ended(tmp_path, command, ("trained", {}))
    assert line == f"  observe.on_end (sh) ended with status 3, see {tmp_path / 'on_end.log'}."
    last = list(read_events(tmp_path))[-1]
    assert (last["event"], last["status"], last["message"]) == ("on_end", 3, line.strip())
    assert (tmp_path / "on_end.log").read_text() == "said\nto both\n"


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program\0")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (line,) = ended(tmp_path / "run", (str(program),), ("trained", {}))
    assert "could not be started: [Errno 8] Exec format error" in line


def test_a_command_that_takes_long_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "WAIT_S", 0.1)
    pid = tmp_path / "pid"
    command = ("sh", "-c", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600")
    lines = ended(tmp_path / "run", command, ("trained", {}))
    assert lines == ["  observe.on_end (sh) is still running after 0 s and is left alone."]
    while not pid.exists():
        time.sleep(0.01)
    number = int(pid.read_text())
    assert os.getsid(number) != os.getsid(0), "Ctrl-C in the terminal is not for it"
    os.kill(number, signal.SIGKILL)  # it still was there


def test_after_a_stop_it_gets_what_is_left_of_the_grace(tmp_path: Path) -> None:
    began = time.monotonic()
    stop = (("stopping", {"message": "SIGTERM"}), ("interrupted", {"message": "m"}))
    lines = ended(tmp_path / "run", ("sleep", "25"), *stop, grace_s=0.1)
    assert time.monotonic() - began < 20, "not the 60 s that it may take else"
    assert "left alone" in lines[0]


@pytest.mark.parametrize("wrong", ["", "  ", "sh -c 'unclosed", [], [""], 5, ["sh", 5], {"a": 1}])
def test_what_is_no_command_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError, match="on_end|must be a command"):
        ObserveSettings.model_validate({"on_end": wrong})


def test_a_long_wait_is_explained_and_ctrl_c_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "SAID_S", 0.05)
    lines: list[str] = []
    begun = time.monotonic()
    with (
        EventLog(tmp_path / "run") as log,
        attended(ObserveSettings(on_end="sleep 30"), tmp_path / "run", log, grace_s=60.0, tell=lines.append),
    ):
        log.write("trained", drafter="d", train_steps=1)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert time.monotonic() - begun < 15
    assert lines[0] == "  waiting for observe.on_end to end, 60 s at most; Ctrl-C ends the wait"
    assert lines[1].startswith("  observe.on_end (sleep) is still running after ")
    assert list(read_events(tmp_path / "run"))[-1]["event"] == "on_end"
