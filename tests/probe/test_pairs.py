"""What two drafters' threads show, with the CPU in the place of both GPUs where that can be."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.probe.finding import Bench, Finding
from paceline.probe.pairs import together, told_captures
from paceline.probe.runner import Call, run_probes


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    return Bench(devices=0, cache=str(tmp_path), runs=str(tmp_path), scratch=str(tmp_path))


def one(function: str, bench: Bench) -> Finding:
    ((found, _),) = run_probes([Call(function, 100.0)], bench)
    return found


def test_threads_are_there_together_and_told_apart() -> None:
    inside: list[threading.Thread] = []

    def body(device: torch.device, meet: Callable[[], object]) -> dict[str, Any]:
        inside.append(threading.current_thread())
        meet()
        return {"device": str(device), "there": len(inside)}

    found = together([torch.device("cuda", 0), torch.device("cuda", 1)], body)
    assert found == [{"device": "cuda:0", "there": 2}, {"device": "cuda:1", "there": 2}]
    assert len(set(inside)) == 2


def test_nobody_waits_for_a_thread_that_failed() -> None:
    def body(device: torch.device, meet: Callable[[], object]) -> dict[str, Any]:
        if device.index == 1:
            raise ArithmeticError("no capture")
        meet()
        return {}

    with pytest.raises(ArithmeticError, match="no capture"):
        together([torch.device("cuda", 0), torch.device("cuda", 1)], body)


@pytest.mark.parametrize(
    ("same", "difference", "verdict"),
    [(True, 0.0, "ok"), (False, 1e-6, "degraded"), (False, 0.1, "refused"), (False, float("nan"), "refused")],
)
def test_captures_at_once_are_judged_by_the_worst(same: bool, difference: float, verdict: str) -> None:
    fine = {"device": "cuda:0", "captures": 3, "same_bits": True, "difference": 0.0}
    other = {"device": "cuda:1", "captures": 3, "same_bits": same, "difference": difference}
    found = told_captures([fine, other])
    assert (found.verdict, len(found.numbers["attempts"])) == (verdict, 2)
    assert "cuda:1: replays" in found.observed


@pytest.mark.slow
def test_two_drafters_share_one_compile(bench: Bench) -> None:
    """On one device the second finds everything."""
    found = one("paceline.probe.pairs:one_compile", bench)
    assert found.verdict == "ok", found.observed
    first, second = found.numbers["warm_up"]
    assert (first["traced"], first["generated"]) == (1, 2)  # forward and backward
    assert (second["traced"], second["generated"]) == (0, 0)
    assert "for the second nothing again" in found.observed


@pytest.mark.slow
def test_a_call_that_would_be_compiled_again_is_refused(bench: Bench) -> None:
    found = one("fakes:widens", bench)
    assert found.verdict == "refused"
    assert "fail_on_recompile" in found.observed
