"""benchmarks/two_gpus.py and many_gpus.py: how parts are run and judged, what is read of a trace, and all of it once
with a CPU's stand-ins."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.bench.pipeline import Whole
from paceline.bench.shapes import SHAPES
from paceline.bench.weights import random_drafter

FOLDER = Path(__file__).parents[2] / "benchmarks"
STUB = """
import argparse, sys, time
sys.path.insert(0, {folder!r})
from parts import Part, known, main

def fine(asked, found):
    found.add("speed", 1.23456, ">= 1", True)
    found.add("not judged", "a|b", ">= 9", None)
    found.data["speed"] = 7
    found.notes.append("a timeline")

def slow(asked, found):
    found.add("speed of the other part", known(asked.out, "fine")["speed"], ">= 9", False)

def broken(asked, found):
    found.add("before it broke", 1)
    raise RuntimeError("gone")

def hangs(asked, found):
    found.add("before it hung", 1)
    time.sleep(600)

parts = {{"fine": Part(fine, 60), "slow": Part(slow, 60), "broken": Part(broken, 60), "hangs": Part(hangs, 9)}}
sys.exit(main(__file__, "Stubs", parts, argparse.ArgumentParser(), lambda asked: 2))
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return what imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run_script(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=280)


def table_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "table.json").read_text(encoding="utf-8"))
    return found


def rows_of(table: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in table["parts"][part]["rows"]}


@pytest.mark.slow
def test_parts_are_run_apart_and_what_they_found_is_kept(tmp_path: Path) -> None:
    script, out = tmp_path / "stub.py", tmp_path / "out"
    script.write_text(STUB.format(folder=str(FOLDER)), encoding="utf-8")
    assert run_script(script, "--out", out, "--device", "cpu", "--parts", "fine").returncode == 0
    assert table_of(out)["fine"] is True
    done = run_script(script, "--out", out, "--device", "cpu", "--parts", "slow", "broken", "hangs")
    assert done.returncode == 1
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text in done.stdout
    for line in (
        "| fine | speed | 1.235 | >= 1 | met |",
        "| fine | not judged | a/b | >= 9 |  |",
        "| slow | speed of the other part | 7 | >= 9 | MISSED |",
        "| broken | before it broke | 1 |  |  |",
        "| broken | the part itself | failed with status 1 | done | MISSED |",
        "| hangs | before it hung | 1 |  |  |",
        "| hangs | the part itself | ended at its limit of 9 s | done | MISSED |",
        "a timeline",
    ):
        assert line in text.splitlines(), line
    late = run_script(script, "--out", out, "--device", "cpu", "--parts", "fine", "--within", "1")
    assert late.returncode == 1
    assert "not begun within 1 s" in late.stdout


def test_a_machine_with_too_few_gpus_is_told_so(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", "--out", str(tmp_path / "out")])
    two = module("two_gpus")
    status = module("parts").main("two_gpus.py", "Two", two.PARTS, two.argparse.ArgumentParser(), lambda asked: 2)
    assert status == 2
    assert "This measures on 2 CUDA devices, and this machine has 0." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_copies_and_kernels_are_read_of_a_trace(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    def copy(name: str, size: int) -> dict[str, Any]:
        return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": 0, "dur": 1, "args": {"bytes": size, "device": 0}}

    def kernel(gpu: int, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "args": {"device": gpu}}

    events = [
        copy("Memcpy PtoP (Device -> Device)", 100),
        copy("Memcpy PtoP (Device -> Device)", 100),
        copy("Memcpy HtoD (Pinned -> Device)", 3),
        copy("Memcpy DtoH (Device -> Pageable)", 4),
        {"ph": "X", "cat": "cpu_op", "name": "Memcpy HtoD", "ts": 0, "dur": 9},
        {"ph": "M", "name": "process_name"},
        kernel(0, 1000, 50),
        kernel(0, 1025, 25),  # beside the first, on another stream
        kernel(1, 1025, 75),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    runs = module("gpu_runs")
    read = runs.read_trace(tmp_path / "trace.json")
    assert runs.copied(read) == {"PtoP": [100, 100], "HtoD": [3], "DtoH": [4]}
    bins = runs.busy_bins(read, bins=4)
    assert bins == {0: pytest.approx([1, 1, 0, 0]), 1: pytest.approx([0, 1, 1, 1])}
    assert runs.timeline(bins) == "GPU 0 |##  |\nGPU 1 | ###|"
    assert runs.at_once(runs.busy_bins(read)) == pytest.approx(0.25, abs=0.01)
    assert runs.busy_bins([]) == {}


def test_losses_and_weights_are_compared(module: Callable[[str], ModuleType]) -> None:
    runs = module("gpu_runs")
    assert runs.apart([2.0, 4.0], [2.0, 4.1, 9.0]) == pytest.approx(0.025)
    for one, other in (([], [1.0]), ([1.0], [float("nan")])):
        assert runs.apart(one, other) == float("inf"), "nothing to compare is not equal"
    one, other = (random_drafter(SHAPES["tiny"], torch.device("cpu")) for _ in range(2))
    assert runs.same_weights(Whole(drafters=[one, other]))
    last_H = [*other.parameters()][-1].data
    last_H[-1] = torch.nextafter(last_H[-1], torch.tensor(9.0))
    assert not runs.same_weights(Whole(drafters=[one, other]))


def test_files_of_a_target_are_what_transformers_reads(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    from paceline.target.load import describe, load_trunk

    plans, work = module("plans"), module("gpu_runs").work_of("cpu", ["cpu"], ["cpu"], steps=8)
    size = plans.write_target(work, tmp_path / "real", real=True)
    plans.write_target(work, tmp_path / "hole", real=False)
    assert (tmp_path / "real" / "model.safetensors").stat().st_size == size
    assert (tmp_path / "hole" / "model.safetensors").stat().st_size == size
    trunk = load_trunk(describe(str(tmp_path / "real")), max(work.target.taps), dtype=torch.float32, device="cpu")
    assert float(trunk.embed_tokens.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(trunk.layers[0].input_layernorm.weight, torch.ones(64))


@pytest.mark.slow
def test_two_stand_ins_go_through_the_whole_script(tmp_path: Path) -> None:
    done = run_script(FOLDER / "two_gpus.py", "--out", tmp_path, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    table = table_of(tmp_path)
    assert list(table["parts"]) == ["doctor", "one", "apart", "both", "fault", "plan"]
    apart, both, fault = (rows_of(table, part) for part in ("apart", "both", "fault"))
    assert apart["losses against one device, relative"]["value"] == 0
    assert apart["share of the slower side"]["met"] is None, "a CPU's rates are not judged"
    assert both["losses against one rank with both micro-batches, relative"]["met"] is True
    assert next(row for what, row in both.items() if what.startswith("weights of both"))["met"] is True
    assert [row["met"] for row in fault.values()] == [True] * 6
    assert "oom: what is told" in " ".join(fault)
    assert len(rows_of(table, "plan")) == 4


@pytest.mark.slow
def test_stand_ins_go_through_the_script_for_many(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--out", out, "--work", tmp_path / "work", "--device", "cpu", "--gpus", 3)
    done = run_script(FOLDER / "many_gpus.py", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    table = table_of(out)
    assert list(table["parts"]) == ["prepare", "start", "doctor", "2+1", "all", "host", "kill", "plan"]
    start, kill = rows_of(table, "start"), rows_of(table, "kill")
    assert start["times that the target's files are read for them"] == {
        "what": "times that the target's files are read for them",
        "value": 1,
        "bar": "1",
        "met": True,
    }
    assert [f"stage {name}: seconds" in start for name in ("dataset opened", "planned", "compiled", "ready")] == [
        True
    ] * 4
    assert [row["met"] for row in kill.values()] == [True] * 3
    assert rows_of(table, "2+1")["samples/s"]["value"] > 0


def test_layouts_use_every_gpu(module: Callable[[str], ModuleType]) -> None:
    many = module("many_gpus")
    assert list(many.layouts(8)) == ["5+3", "4+4", "6+2", "all"]
    assert many.layouts(4) == {"3+1": (3, 1), "2+2": (2, 2), "all": (4, 4)}
    asked = many.argparse.Namespace(gpus=8, device="cuda")
    targets, drafters = many.placed(asked, "5+3")
    assert [*targets, *drafters] == [f"cuda:{index}" for index in range(8)]
    assert many.placed(asked, "all") == (many.devices("cuda", 8),) * 2
