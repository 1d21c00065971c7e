"""Run folders that no training made, written event by event, and what a plain loop finds in one."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.bench.report import made_up

HOSTILE = "</script><img src=x onerror=\"console.error('run')\"><b>&amp;' \u2028 {{ 7 * 7 }}"


def write_events(run: Path, events: Iterable[dict[str, Any]]) -> Path:
    """Write the events of a run, in the form that paceline writes them."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def poisoned(value: Any, key: str = "") -> Any:
    """Return an event with HOSTILE behind every text but those that are numbers or say what it is."""
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return value if not isinstance(value, str) or key in ("event", "loss", "grad_norm") else value + HOSTILE


def eventful(steps: int = 900, seed: int = 0) -> list[dict[str, Any]]:
    """Events of a run that was rolled back, stopped, resumed an hour later, and ended: with steps that are told again,
    not applied, and not finite.
    """
    whole = list(made_up(steps, random.Random(seed)))
    third, half = steps // 3, steps // 2
    events: list[dict[str, Any]] = []
    later_s = 0.0
    for event in whole:
        event = {**event, "t": event["t"] + later_s}
        step = event["step"] if event["event"] == "step" else None
        if step in (third, third + 1):
            event |= {"loss": "inf", "loss_sum": "inf", "applied": False}
        if step == third + 2:
            event |= {"loss": 55.5, "loss_sum": 55.5 * event["weight_sum"], "applied": False}
        events.append(event)
        if step == third + 3:
            events.append({**event, "event": "rolled_back", "steps": step + 1, "to": third - 10, "checkpoint": "c"})
        if step == half:
            lost = [{**event, "step": step + more, "loss": 77.0} for more in range(1, 8)]
            told = {**event, "event": "held_out", "steps": step + 5, "loss": 66.0}
            last = {**event, "event": "interrupted", "message": "after step 451 of 900, saved."}
            later_s = 3600.0
            resumed = {**event, "event": "resumed", "t": event["t"] + later_s, "steps": step + 1, "checkpoint": "c"}
            events += [*lost, told, last, {**resumed, "settings": whole[0]["settings"], "best": None}]
    return events


def last_told(run: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the steps, held-out losses and evaluations that count, by steps done, read with a plain loop."""
    found: dict[str, dict[int, dict[str, Any]]] = {"step": {}, "held_out": {}, "evaluated": {}}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "resumed":
            found = {kind: {n: one for n, one in told.items() if n <= event["steps"]} for kind, told in found.items()}
        if event["event"] in found:
            done = event["step"] + 1 if event["event"] == "step" else event["steps"]
            found[event["event"]][done] = event
    return {kind: dict(sorted(told.items())) for kind, told in found.items()}
