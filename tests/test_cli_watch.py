"""`paceline watch` as a person or a script types it: what it prints, and the exit status that tells the run's state."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from told_run import Event, append, begin, sample_event, step_event, told

from paceline.checkpoint.folder import claimed
from paceline.cli_options import plain
from paceline.observe.reading import read_events
from paceline.observe.state import RunState
from paceline.recipes import watch as recipe

Ran = tuple[int, str, str]


@pytest.fixture
def watch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    def run(*arguments: object) -> Ran:
        from paceline import cli

        monkeypatch.setattr(sys, "argv", ["paceline", "watch", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def ended_status() -> Callable[..., int]:
    """Run a command into a pipe that nobody reads and return its exit status."""

    def run(*arguments: object) -> int:
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "paceline", *map(str, arguments)]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writing)
        assert ended.stderr == ""
        return ended.returncode

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    append(folder, *begin(), step_event(4, 1010.0), sample_event(1011.0, {"data": 0.1}, {"features": 0.4}))
    return folder


FINISHED = told("trained", 1020.0, run="r", drafter="r/drafter", train_steps=5, loss="nan", train_s=20.0)


@pytest.mark.parametrize("via", [[], ["--via", "env X=1"]])
def test_once_in_words(run: Path, watch: Callable[..., Ran], via: list[str]) -> None:
    append(run, FINISHED)
    status, out, err = watch(run, "--once", *via)
    assert (status, err) == (0, "")
    assert "finished" in out.splitlines()[0]
    assert "step 5/100" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize("via", [[], ["--via", "env X=1"]])
def test_once_as_json(run: Path, watch: Callable[..., Ran], via: list[str]) -> None:
    append(run, step_event(5, 1012.0, loss="nan", grad_norm="inf"))
    with claimed(run):
        status, out, err = watch(run, "--once", "--json", *via)
    assert (status, err) == (3, "")
    said, state = json.loads(out, parse_constant=pytest.fail), RunState()
    for event in read_events(run):
        state.apply(event)
    assert {key: value for key, value in said.items() if key not in ("held", "now")} == json.loads(
        json.dumps(plain(state.as_dict()))
    )
    assert (said["held"], said["outcome"], said["step"], said["loss"]) == (True, "running", 6, None)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (told("failed", 1020.0, message="It broke."), 1),
        (told("interrupted", 1020.0, message="SIGTERM."), 75),
        (None, 1),
    ],
)
def test_other_ends(run: Path, watch: Callable[..., Ran], last: Event | None, status: int) -> None:
    append(run, *([last] if last else []))
    assert watch(run, "--once")[0] == status
    assert watch(run)[0] == status
    assert watch(run, "--json")[0] == status


def looking(monkeypatch: pytest.MonkeyPatch, *between: Callable[[], Any]) -> None:
    """Let something happen between two looks."""
    steps = iter(between)
    monkeypatch.setattr(recipe.time, "sleep", lambda _: next(steps)())


def test_lines_where_there_is_no_terminal(
    run: Path, watch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(run, *(told("checkpoint", 1011.0, steps=step, bytes=0, copy_s=0, write_s=0) for step in range(20)))
    with claimed(run):
        looking(monkeypatch, lambda: append(run, step_event(5, 1030.0)), lambda: None, lambda: append(run, FINISHED))
        status, out, err = watch(run)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["saved"] * 10 + ["step", "trained"]
    assert lines[9].startswith("saved after step 19 ")
    assert lines[10].startswith("step 6/100 ")


def test_json_line_by_line(run: Path, watch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(run):
        looking(monkeypatch, lambda: append(run, step_event(5, 1012.0)), lambda: None, lambda: append(run, FINISHED))
        status, out, err = watch(run, "--json")
    assert (status, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    assert [(state["outcome"], state["step"]) for state in told] == [("running", 5), ("running", 6), ("finished", 5)]


def test_it_is_seen_that_a_run_was_killed(
    run: Path, watch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = claimed(run)
    holding.__enter__()
    looking(monkeypatch, lambda: None, lambda: holding.__exit__(None, None, None))
    status, out, _ = watch(run, "--json")
    first, last = map(json.loads, out.splitlines())
    assert (first["outcome"], first["held"]) == ("running", True)
    assert (last["outcome"], last["held"], status) == ("failed", False, 1)
    assert last["message"].startswith("Nobody trains into this folder any more, and no event tells the end")


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_ctrl_c_leaves_with_the_state(
    run: Path, watch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with claimed(run):
        looking(monkeypatch, lambda: None, interrupt)
        status, out, err = watch(run, *how)
    assert (status, err) == (3, "")
    assert out


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 3), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
def test_a_signal_leaves_nothing_behind(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    """A terminal sends Ctrl-C to all of its processes."""
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    with claimed(run):
        command = [sys.executable, "-m", "paceline", "watch", str(run), "--json", "--via", "env X=1"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        killer = threading.Timer(60, process.kill)
        killer.start()
        assert json.loads(process.stdout.readline())["outcome"] == "running"
        assert list((tmp_path / "copies").iterdir())
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate()
        killer.cancel()
    assert (process.returncode, out, err) == (status, "", "")
    assert not list((tmp_path / "copies").iterdir())


def test_bad_input(run: Path, tmp_path: Path, watch: Callable[..., Ran]) -> None:
    (tmp_path / "empty").mkdir()
    append(tmp_path / "newer", {"schema": 2, "t": 1.0, "event": "started"})
    append(tmp_path / "strange", *begin(), told("step", 1010.0))
    for arguments, sentence in (
        ([tmp_path / "nowhere"], f"A run is a folder, but {tmp_path / 'nowhere'} is not there. Name the run_dir of a "),
        ([run / "events.jsonl"], f"A run is a folder, but {run / 'events.jsonl'} is a file. Name the run_dir of a "),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'} is not a run's folder: it has neither events.jsonl nor "),
        ([tmp_path / "newer"], f"{tmp_path / 'newer'}/events.jsonl has events of schema 2, but this version of "),
        ([tmp_path / "strange"], f"Events of {tmp_path / 'strange'} are not as docs/events.md has them (step: 'step'"),
        ([tmp_path / "newer", "--via", "env"], f"{tmp_path / 'newer'}/events.jsonl has events of schema 2, but this "),
        ([tmp_path / "nowhere", "--via", "env"], f"There is no folder {tmp_path / 'nowhere'} behind `env`. Check the "),
        ([run, "--via", "no-such-command here"], "There is no command no-such-command on this machine. Correct --via."),
        ([run, "--via", "'"], '--via must be a command as a shell would read it, got "\'": No closing quotation.'),
        (
            ["ssh://host:99999/run"],
            "A port is a number from 1 to 65535, got '99999' in ssh://host:99999/run: the form ",
        ),
    ):
        for how in (["--once"], ["--once", "--json"], []):
            status, out, err = watch(*arguments, *how)
            assert (status, out) == (2, ""), arguments
            assert err.startswith(f"error: {sentence}"), (arguments, err)
            assert err.count("\n") == 1


def test_every_key_is_documented(run: Path, watch: Callable[..., Ran]) -> None:
    _, out, _ = watch(run, "--once", "--json")
    text = (Path(__file__).parent.parent / "docs" / "watch.md").read_text()
    assert [key for key in json.loads(out) if f"`{key}`" not in text] == []


def test_a_pipe_that_nobody_reads_says_nothing_of_the_run(run: Path, ended_status: Callable[..., int]) -> None:
    append(run, FINISHED)
    assert ended_status("watch", run) == 0
    assert ended_status("watch", run, "--json") == 0
    with claimed(run):
        append(run, told("resumed", 1021.0, steps=5, settings={}))
        assert ended_status("watch", run, "--json") == 3


@pytest.mark.parametrize("how", [["--once"], [], ["--once", "--json"], ["--json"]])
def test_what_cannot_be_shown_is_no_run_that_failed(run: Path, how: list[str]) -> None:
    append(run, FINISHED)
    command = [sys.executable, "-m", "paceline", "watch", str(run), *how]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
    assert "No space left on device" in ended.stderr


def test_events_that_are_nested_too_deep(tmp_path: Path, watch: Callable[..., Ran]) -> None:
    ends = set()
    for depth in range(300, 1000, 20):  # how deep is too deep depends on who calls
        nested = json.dumps(told("machine", 1000.0, x=0)).replace('"x": 0', f'"x": {"[" * depth}{"]" * depth}')
        run = tmp_path / str(depth)
        run.mkdir()
        (run / "events.jsonl").write_text(f"{nested}\n")
        status, _, err = watch(run, "--once", "--json")
        assert err == "" if status == 1 else err.startswith("error: Events of ") and err.count("\n") == 1
        ends.add(status)
    assert ends == {1, 2}


def test_a_terminal_that_has_ascii_alone(run: Path) -> None:
    append(run, told("failed", 1012.0, message="Пауза."))
    command = [sys.executable, "-m", "paceline", "watch", str(run), "--once"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    ended = subprocess.run(command, capture_output=True, check=False, env=environment)
    lines = ended.stdout.decode("ascii").splitlines()
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("step 5/100 =") and "=-" in line for line in lines)
    assert r"\u041f\u0430" in "".join(lines)
