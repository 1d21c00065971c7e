"""observe.on_end is run however a run ends, as long as Python survives it, and changes no exit status."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

WRITE = (
    "import json, os, sys; given = {k: v for k, v in os.environ.items() if k[:9] == 'PACELINE_'}; "
    "json.dump(given, open(sys.argv[1] + '.new', 'w')); os.rename(sys.argv[1] + '.new', sys.argv[1]); sys.exit(9)"
)


def command(place: Path) -> tuple[str, ...]:
    return (sys.executable, "-c", WRITE, str(place))


def told(place: Path, child: Any) -> dict[str, str]:
    """Return the command's environment; it may outlive the run that started it."""
    until = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < until, child.text()
        time.sleep(0.01)
    return json.loads(place.read_text())


def test_a_finished_run(lab: Any, tmp_path: Path) -> None:
    run = lab.settings("finished", {"observe": {"on_end": command(tmp_path / "told")}})
    child = lab.train(run)
    assert child.status() == 0, child.text()
    found = told(tmp_path / "told", child)
    last = [event for event in lab.events(run) if event["event"] == "step"][-1]
    assert (found["PACELINE_OUTCOME"], found["PACELINE_STEP"]) == ("finished", "14")
    assert float(found["PACELINE_LOSS"]) == last["loss"]
    assert found["PACELINE_DRAFTER"] == str(run / "drafter")
    assert "ended with status 9" in child.text()


@pytest.mark.parametrize(("times", "grace_s", "status"), [(1, 60.0, 75), (2, 60.0, 130), (1, 0.5, 75)])
def test_a_stopped_run(lab: Any, tmp_path: Path, times: int, grace_s: float, status: int) -> None:
    """Saved, stopped at once, and given up because saving took too long: the process is ended then."""
    changes = {"checkpoint": {"every_steps": 1000, "grace_s": grace_s}}
    run = lab.settings("stopped", changes | {"observe": {"on_end": command(tmp_path / "told")}})
    child = lab.train(run, slow_s=0.02 if times == 1 and grace_s > 1 else 1)
    child.wait_for(lambda: lab.told(run, "step"), timeout_s=100)
    child.send(signal.SIGTERM)
    if times == 2:
        child.wait_for(lambda: "again stops at once" in child.text())
        child.send(signal.SIGTERM)
    assert child.status() == status, child.text()
    found = told(tmp_path / "told", child)
    ended = [event for event in lab.events(run) if event["event"] == "interrupted"]
    assert (found["PACELINE_OUTCOME"], found["PACELINE_MESSAGE"]) == ("interrupted", ended[0]["message"])
    assert ("longer than checkpoint.grace_s" in found["PACELINE_MESSAGE"]) == (grace_s < 1)
    assert found["PACELINE_RUN"] == str(run)


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_failed_run(lab: Any, tmp_path: Path, fault: str) -> None:
    changes = {"pipeline": {"restarts": 0, "work_timeout_s": 3.0}}
    run = lab.settings("failed", changes | {"observe": {"on_end": command(tmp_path / "told")}})
    child = lab.train(run, fault=("replica_faults", {"kind": fault, "at": 5}))
    assert child.status() == 1, child.text()
    found = told(tmp_path / "told", child)
    message = next(event["message"] for event in lab.events(run) if event["event"] == "failed")
    assert (found["PACELINE_OUTCOME"], found["PACELINE_MESSAGE"]) == ("failed", message)
