"""benchmarks/one_gpu.py: which figures it holds against which bars, and most of its parts once on a CPU."""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROFILE = "a step: 240.0 ms, 241.0 ms under the profiler\n  kernels whose purpose is known are {} % of the time\n"
MEMORY = """shape     changed                 policy        GiB  estim.  ratio  resrvd  peak
small     recompute layers        captured     1.00    {0}  {0}    1.20  backward
  weights 1.00
qwen3-8b                          captured    44.10   44.32  1.005   48.20  head
"""
Answers = Callable[[tuple[str, ...]], str]
Judged = Callable[[str, Answers], dict[str, bool | None]]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("one_gpu")


@pytest.fixture
def judged(one_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Judged:
    """Return a function that runs a part as on a GPU whose commands print `answers`, and says which bars are met."""

    def run(part: str, answers: Answers) -> dict[str, bool | None]:
        monkeypatch.setattr(one_gpu, "run", lambda asked, log, *command, **how: answers(command))
        found = importlib.import_module("parts").Found()
        one_gpu.PARTS[part].body(argparse.Namespace(device="cuda", out=tmp_path), found)
        return {row.what: row.met for row in found.rows if row.bar}

    return run


def steps(**of_policy: dict[str, Any]) -> str:
    """Return what `bench step --json` prints, with good values for what is not given."""
    good = {"recompiles": 0, "reserved_growth_gib": 0, "first_step_s": 15.0, "compiled": 0, "found": 5, "tflops": 601}
    good |= {"matrix_peak_tflops": 630, "ratio_to_best_peer": 1.4, "peak_gib": 30.6, "blocks_per_s": 6300, "step_ms": 9}
    return json.dumps([{"who": "paceline", "policy": policy, **good, **own} for policy, own in of_policy.items()])


@pytest.mark.parametrize(("eager", "compiled", "met"), [(12.0, 10.0, True), (11.9, 9.9, False)])
def test_a_small_step_is_three_times_eager_and_two_and_a_half_times_compiled(
    judged: Judged, eager: float, compiled: float, met: bool
) -> None:
    told = steps(eager={"step_ms": eager}, compiled={"step_ms": compiled}, captured={"step_ms": 4.0})
    assert judged("small", lambda command: told) == {
        "eager / captured": met,
        "compiled / captured": met,
        "recompiles": True,
    }


@pytest.mark.parametrize(("captured", "met"), [(14.0, True), (14.1, False)])
def test_threads_slow_the_captured_step_by_half_of_eager_s_at_most(judged: Judged, captured: float, met: bool) -> None:
    def answers(command: tuple[str, ...]) -> str:
        noisy = "--noise" in command
        return steps(
            captured={"step_ms": captured if noisy else 4.0}, eager={"step_ms": 48.0 if noisy else 28.0}
        )  # eager: 20 more

    assert judged("beside", answers) == {"captured, ms a step more": met}


@pytest.mark.parametrize("bad", ["first_step_s", "step_ms", "recompiles", "reserved_growth_gib"])
def test_a_cold_start_is_held_to_its_bars(judged: Judged, bad: str) -> None:
    worse = {"first_step_s": 120.1, "step_ms": 10.1, "recompiles": 1, "reserved_growth_gib": 0.1}
    rows = {
        "first_step_s": "captured, seconds to the first step",
        "step_ms": "compiled / captured",
        "recompiles": "recompiles",
        "reserved_growth_gib": "growth of reserved memory, GiB",
    }
    good = {"first_step_s": 120.0, "step_ms": 10.0}
    fine = judged("cold", lambda command: steps(captured=good, compiled={"step_ms": 10.0}))
    assert fine == dict.fromkeys(rows.values(), True)
    missed = judged("cold", lambda command: steps(captured=good | {bad: worse[bad]}, compiled={"step_ms": 10.0}))
    assert missed == fine | {rows[bad]: False}


def test_a_warm_start_compiles_nothing_within_twenty_seconds(judged: Judged) -> None:
    assert set(judged("warm", lambda command: steps(captured={"first_step_s": 20.0})).values()) == {True}
    bad = {"first_step_s": 20.1, "compiled": 1, "found": 0}
    assert set(judged("warm", lambda command: steps(captured=bad)).values()) == {False}


def test_many_steps_neither_compile_nor_grow(judged: Judged) -> None:
    good = {"steps": 500, "step_ms": 440.0, "recompiles": 0, "reserved_growth_bytes": 0, "finite": True}
    assert set(judged("long", lambda command: json.dumps(good)).values()) == {True}
    bad = {"steps": 499, "step_ms": 440.0, "recompiles": 1, "reserved_growth_bytes": 2, "finite": False}
    assert set(judged("long", lambda command: json.dumps(bad)).values()) == {False}


@pytest.mark.parametrize(("ratio", "met"), [("1.099", True), ("0.899", False)])
def test_an_estimate_of_memory_is_within_a_tenth(judged: Judged, ratio: str, met: bool) -> None:
    found = judged("memory", lambda command: MEMORY.format(ratio))
    assert found["cases measured"] is True
    assert all(found.values()) is met


def test_a_case_of_memory_that_failed_is_missed(judged: Judged) -> None:
    text = MEMORY.format("1.000") + "qwen3-8b  layers 3    captured   OutOfMemoryError: full\n"
    assert judged("memory", lambda command: text)["cases measured"] is False


def test_a_policy_that_failed_fails_its_part_with_the_cause(judged: Judged, one_gpu: ModuleType) -> None:
    rows = json.loads(steps(eager={}, captured={}))
    rows.append({"who": "paceline", "policy": "compiled", "blocks_per_s": None, "failed": "out of memory"})
    with pytest.raises(one_gpu.RunError, match="^small, compiled: out of memory$"):
        judged("small", lambda command: json.dumps(rows))


@pytest.mark.parametrize("good", [True, False])
def test_throughput_is_held_to_its_bars(judged: Judged, good: bool) -> None:
    own = {"blocks_per_s": 6200.0, "ratio_to_best_peer": 1.3, "peak_gib": 31.6} if good else {}
    own = own or {"blocks_per_s": 4017.0, "ratio_to_best_peer": 1.29, "peak_gib": 31.7}
    assert set(judged("step", lambda command: steps(captured=own)).values()) == {good}
    rows = [{"who": "transformers", "how": "padded", "tokens_per_s": 32_000.0}]
    for how, rate in (("compiled", 44_000.0), ("fp8", 70_000.0)):
        rows.append({"who": "paceline", "how": how, "tokens_per_s": rate - (not good)})
    assert set(judged("features", lambda command: json.dumps(rows)).values()) == {good}

    def whole(command: tuple[str, ...]) -> str:
        rate = (19.0 if "--fp8" in command else 13.0) - 0.1 * (not good)
        sides: list[dict[str, Any]] = [{"who": "a side"}, {"who": "a side"}]
        return json.dumps([*sides, {"who": "whole", "samples_per_s": rate, "share_of_bound": 0.95 if good else 0.94}])

    assert set(judged("whole", whole).values()) == {good}
    assert set(judged("where", lambda command: PROFILE.format("95.0" if good else "94.9")).values()) == {good}


def test_a_command_that_fails_says_so_with_its_last_words(one_gpu: ModuleType, tmp_path: Path) -> None:
    asked = argparse.Namespace(device="cpu", out=tmp_path)
    with pytest.raises(one_gpu.RunError, match="failed with status 3; the end of .*log:\nso it was"):
        one_gpu.run(asked, "log", "-c", "import sys; print('so it was', file=sys.stderr); sys.exit(3)", fine=1)
    assert one_gpu.run(asked, "log", "-c", "import sys; print('a row'); sys.exit(1)", fine=1) == "a row\n"
    with pytest.raises(one_gpu.RunError, match="status -9"):
        one_gpu.run(asked, "log", "-c", "import os; os.kill(os.getpid(), 9)", fine=1)


@pytest.mark.slow
def test_its_parts_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "one_gpu.py"), "--out", str(tmp_path), "--device", "cpu", "--parts"]
    done = subprocess.run([*command, "cold", "warm", "features", "whole"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_text())
    assert {name: part["ended"] for name, part in table["parts"].items()} == dict.fromkeys(
        ("cold", "warm", "features", "whole"), "done"
    )
    rows = {row["what"]: row["value"] for row in table["parts"]["warm"]["rows"]}
    assert rows["functions compiled"] == 0
    assert rows["functions found in the cache"] > 0
