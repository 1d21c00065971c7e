"""The scripts of benchmarks/ for one GPU go from their first line to their last, on a CPU that is taken for one.

What is measured there needs the GPU; that imports, calls, tables and JSON go together does not, and minutes on a GPU
are few.
"""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.bench.target import token_batches
from paceline.train.step import DrafterStep

FOLDER = Path(__file__).parents[2] / "benchmarks"
GIB = 2**30
fp8_on_a_cpu = pytest.mark.skipif(torch.__version__ < "2.12", reason="products in fp8 by rows take a GPU there")


def eager(*given: Any, policy: str = "", **more: Any) -> DrafterStep:
    return DrafterStep(*given, policy="eager", **more)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return what imports a script and lets it take the CPU for a GPU on which every step is eager."""
    monkeypatch.syspath_prepend(str(FOLDER))
    stand_ins: dict[str, Any] = {
        "get_device_properties": SimpleNamespace(total_memory=141 * GIB),
        "memory_allocated": GIB,
        "memory_reserved": 3 * GIB,
        "max_memory_allocated": 2 * GIB,
        "max_memory_reserved": 4 * GIB,
    }
    nothing = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_per_process_memory_fraction")
    for name, value in (stand_ins | dict.fromkeys(nothing)).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def imported(name: str) -> ModuleType:
        module = importlib.import_module(name)
        for what, value in {"DEVICE": "cpu", "DrafterStep": eager, "warm_compiler": lambda device: None}.items():
            if hasattr(module, what):
                monkeypatch.setattr(module, what, value)
        return module

    return imported


def test_a_long_run_saves_and_tells(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("long_run")
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(module, "SHAPE", SHAPES["tiny"])
    found = json.loads(json.dumps(module.measure(10, tmp_path)))
    assert (found["steps"], found["finite"], found["recompiles"]) == (10, True, 0)
    assert [(event["event"], event["steps"]) for event in found["saved"]] == [("checkpoint", 4), ("checkpoint", 7)]
    assert len(found["stall_s"]) == 2


def test_a_card_goes_from_the_plan_to_a_row(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("small_cards")
    monkeypatch.setattr(module, "sized", lambda name, **_: SHAPES[name])
    asked = module.parsed(["--steps", "3", "--at-once", "2"])
    assert module.run_case("24:tiny", asked) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["card_gib"], row["at_once"], row["out_of_memory"], row["recompiles"]) == (24, 2, False, 0)
    assert row["ratio"] == pytest.approx(row["estimate_gib"] / row["peak_gib"], abs=2e-3)
    assert row["failed"] == "the estimate is more than a tenth off"  # nothing was allocated on a GPU
    monkeypatch.setattr(module, "in_slots", partial(pytest.fail, "too late"))
    monkeypatch.setattr(DrafterStep, "warm", _out_of_memory)
    assert module.run_case("24:tiny", asked) == 1
    row = json.loads(capsys.readouterr().out)
    assert (row["out_of_memory"], row["failed"]) == (True, "3 GiB")


def _out_of_memory(step: DrafterStep) -> None:
    raise torch.OutOfMemoryError("3 GiB")


def test_a_steps_memory_is_held_against_its_estimate(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every case's settings can be had; one is measured; one that fails and one that is too late are said."""
    module = script("step_memory")
    for name, changes, _ in module.CASES:
        shape, train = module.settings_of(SHAPES[name], changes)
        assert (shape.anchor_slots, shape.context_slots) == (train.anchor_slots, train.context_slots)
    assert module.measure("tiny", {"recompute": "layers", "moments": "8bit"}, "captured")[:2] == (2 * GIB, 4 * GIB)

    def measured(name: str, changes: dict[str, Any], policy: str, until: float) -> Any:
        if policy == "compiled":
            raise RuntimeError("a child died")
        found = module.measure("tiny", changes, policy)
        return (found[2].total, *found[1:]) if changes else None

    monkeypatch.setattr(module, "in_process", measured)
    monkeypatch.setattr(module, "CASES", [("small", {"moments": "8bit"}, ["captured"])])
    assert module.main(2, 60.0) == 0
    monkeypatch.setattr(module, "CASES", [*module.CASES, ("small", {}, ["captured", "compiled"])])
    assert module.main(2, 60.0) == 1
    told = capsys.readouterr().out
    for text in ("  1.000  ", "captured   not begun within 60 s", "compiled   RuntimeError: a child died"):
        assert text.strip() in told, text
    assert module.in_process is measured


def test_nothing_is_begun_too_late(script: Callable[[str], ModuleType]) -> None:
    assert script("step_memory").in_process("small", {}, "captured", 0.0) is None


def test_kernels_of_a_step_are_told_by_kind(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("step_profile")
    monkeypatch.setattr(module, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "feature_batches", lambda *given: feature_batches(*given)[:2])
    found = module.measure("tiny", {"logits_mib": "64", "state": "bf16"})
    assert found["plain_ms"] > 0
    assert any("mm" in kernel for kernel in found["kernels"])
    with pytest.raises(SystemExit, match="less than half"):  # a CPU's operations take a GPU no time
        module.show("a step", found)
    kinds = {"matrix products": 6.0, "other": 1.0}
    found |= {"profiled_ms": 10.0, "kinds": type(found["kinds"])(kinds), "kernels": type(found["kernels"])(kinds)}
    module.show("a step", found)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kinds"] == kinds


@pytest.mark.parametrize("how", ["compiled", pytest.param("fp8", marks=fp8_on_a_cpu)])
def test_a_targets_kernels_are_looked_at(
    script: Callable[[str], ModuleType], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = script("step_profile")
    monkeypatch.setattr(profile, "ProfilerActivity", SimpleNamespace(CUDA=ProfilerActivity.CPU))
    module = script("target_profile")
    monkeypatch.setattr(module.FeatureTarget, "compile", lambda *_: "")
    monkeypatch.setattr(module, "token_batches", lambda work: _few(work))
    with pytest.raises(SystemExit, match="less than half"):
        module.main("tiny", how)


def _few(work: Any) -> Any:
    return token_batches(replace(work, tokens=512, budget=512))
