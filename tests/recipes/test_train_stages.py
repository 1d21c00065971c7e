"""Stages of a start-up by a clock that the test sets: each as long as it is since the one before."""

import json
from pathlib import Path
from typing import Any

from paceline.observe.console import Console
from paceline.observe.events import EventLog
from paceline.recipes.train_stages import Stages


def test_each_stage_is_as_long_as_since_the_one_before(tmp_path: Path, capsys: Any) -> None:
    now = [50.0]
    stages = Stages(Console(), roles=2, clock=lambda: now[0])
    for name, seconds in (("dataset opened", 3.0), ("planned", 1.5)):
        now[0] += seconds
        stages.took(name)
    assert capsys.readouterr().out == "  dataset opened (3.0 s)\n  planned (1.5 s)\n"
    with EventLog(tmp_path) as events:
        stages.written_to(events)
        # The second role has not begun when the first has loaded already; later the first one loads once more.
        for role, state in (("a", "loading"), ("a", "compiling"), ("b", "loading"), ("a", "ready"), ("b", "compiling")):
            now[0] += 2
            stages.on_state(role, state)
        now[0] += 1
        stages.ready()
        for state in ("loading", "compiling"):
            stages.on_state("a", state)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["name"], event["s"]) for event in told] == [
        ("dataset opened", 3.0),
        ("planned", 1.5),
        ("models loaded", 10.0),
        ("compiled", 1.0),
        ("ready", 15.5),
    ]
    assert capsys.readouterr().out == "", "their lines are those of the events"
