"""A run as somebody outside sees it: whether it lives, how it ended, and what its texts may do to a terminal."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from told_run import Event, append, begin, sample_event, step_event, told

from paceline.observe.lines import Lines
from paceline.observe.watched import Look, Watched, readable
from paceline.records import UserError

HOSTILE = "\x1b[2J\x1b]0;title\x07 [red]x[/red] [/] \r\n\t \u202ereversed \x9b31m \ud800 é"


def watched(run: Path, *looks: bool | None, **more: Any) -> Watched:
    made = Watched(run, "RUN", **more)
    for held in looks:
        made.see(Look(held, 1100.0, "process 12 on gpu7"))
    return made


def printed(seen: Watched) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(seen.panel(width=200))
    return out.getvalue()


@pytest.mark.parametrize(
    ("last", "held", "outcome", "status"),
    [
        (told("trained", 1020.0, train_steps=5), False, "finished", 0),
        (told("failed", 1020.0, message="It broke."), False, "failed", 1),
        (told("interrupted", 1020.0, message="Stopped."), False, "interrupted", 75),
        (step_event(5, 1020.0), True, "running", 3),
        (step_event(5, 1020.0), None, "running", 3),
        (step_event(5, 1020.0), False, "failed", 1),
        (told("trained", 1020.0, train_steps=5), True, "finished", 0),
    ],
)
def test_outcome_and_status(tmp_path: Path, last: Event, held: bool | None, outcome: str, status: int) -> None:
    append(tmp_path / "run", *begin(), last)
    seen = watched(tmp_path / "run", held)
    assert (seen.state.outcome, seen.status, seen.ended) == (outcome, status, status != 3)
    assert seen.as_dict()["held"] is held
    assert seen.as_dict()["now"] == 1100.0


def test_before_its_first_event(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.yaml").touch()
    assert (watched(run, True).state.outcome, watched(run, True).status) == ("starting", 3)
    assert watched(run, False).status == 1


def test_a_run_that_was_killed_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append(run, *begin(), step_event(5, 1020.0))
    seen = watched(run, True, False)
    assert seen.state.message == (
        "Nobody trains into this folder any more (process 12 on gpu7), and no event tells the end: the run was "
        "killed, or its machine went down. Go on with `paceline train RUN --resume`."
    )
    assert seen.see(Look(False, 1101.0)) == []  # it is said once
    append(run, told("resumed", 1200.0, steps=4, settings={}))
    seen.see(Look(True, 1201.0))
    assert seen.status == 3


def test_trouble_changes_nothing(tmp_path: Path) -> None:
    append(tmp_path / "run", *begin())
    seen = watched(tmp_path / "run", True)
    append(tmp_path / "run", told("trained", 1020.0))
    assert seen.see(Look(None, 0.0, trouble="The connection broke.")) == []
    assert (seen.status, seen.as_dict()["held"]) == (3, True)


def test_no_text_reaches_the_terminal_as_an_order(tmp_path: Path) -> None:
    run = tmp_path / "run"
    events = [
        *begin(run_dir=HOSTILE),
        step_event(5, 1020.0),
        sample_event(1021.0, {}, {HOSTILE: 0.4}),
        told("replica_failed", 1022.0, role=HOSTILE, device=HOSTILE, message=HOSTILE, restarted=False),
        told("role", 1023.0, role=HOSTILE, device=HOSTILE, state=HOSTILE, s=1.0),
        told("stage", 1024.0, name=HOSTILE, s=1.0),
        told("failed", 1025.0, message=HOSTILE),
    ]
    append(run, *events)
    seen, lines = Watched(run, "RUN"), Lines()
    fresh = seen.see(Look(False, 1100.0, HOSTILE))
    text = printed(seen) + "\n".join(filter(None, (seen.line(lines, event) for event in fresh)))
    assert {letter for letter in text if not letter.isprintable()} == {"\n"}
    assert "\\x1b[2J" in text
    assert "[red]x[/red] [/]" in text
    assert "é" in text


def test_the_text_of_a_killed_runs_owner(tmp_path: Path) -> None:
    append(tmp_path / "run", *begin())
    seen = Watched(tmp_path / "run", "RUN")
    seen.see(Look(False, 1100.0, HOSTILE))
    assert seen.state.message is not None
    assert seen.state.message.isprintable()


def test_readable_keeps_what_is_no_text() -> None:
    assert readable({"a\n": [1, None, True, 2.5, "ü", {"b": "\x00"}]}) == {
        "a\\n": [1, None, True, 2.5, "ü", {"b": "\\x00"}]
    }


def test_a_program_gets_texts_as_they_are(tmp_path: Path) -> None:
    append(tmp_path / "run", *begin(), told("failed", 1025.0, message=HOSTILE))
    assert watched(tmp_path / "run", False, for_people=False).as_dict()["message"] == HOSTILE


@pytest.mark.parametrize(
    "event",
    [
        told("step", 1020.0),
        step_event(5, 1020.0) | {"step": "many"},
        step_event(5, 1020.0, loss=[1]),
        step_event(5, 1020.0, since="long"),
        told("sample", 1020.0, roles=3),
        told("started", 1020.0, settings=[1]),
        told("evaluated", 1020.0, tau="high"),
        told("rolled_back", 1e18),
    ],
)
def test_values_of_other_kinds(tmp_path: Path, event: Event) -> None:
    append(tmp_path / "run", *begin(), event)
    with pytest.raises(UserError, match=r"^Events of RUN are not as docs/events.md has them \(") as error:
        watched(tmp_path / "run", True).panel(width=80)
    assert "\n" not in str(error.value)


def test_a_newer_schema_names_the_run(tmp_path: Path) -> None:
    append(tmp_path / "copy", {"schema": 2, "t": 1.0, "event": "step"})
    with pytest.raises(UserError, match=r"^RUN/events.jsonl has events of schema 2, but this version"):
        watched(tmp_path / "copy", True)


def test_a_last_line_that_is_not_whole(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append(run, *begin(), step_event(5, 1020.0))
    whole = json.dumps(step_event(6, 1021.0))
    with (run / "events.jsonl").open("a") as file:
        file.write(whole[:40])
    seen = watched(run, True)
    assert seen.state.step == 6
    with (run / "events.jsonl").open("a") as file:
        file.write(whole[40:] + "\n")
    seen.see(Look(True, 1102.0))
    assert seen.state.step == 7
