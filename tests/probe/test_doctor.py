"""The doctor as a whole: its judgement of made-up findings, and once for real."""

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.observe.console import Console
from paceline.probe import examine
from paceline.probe.entries import ENTRIES
from paceline.probe.finding import Bench, Finding, Verdict
from paceline.probe.runner import Call
from paceline.recipes.doctor import WIDTH, doctor
from paceline.runtime.profile import load_profile, this_machine

GPU = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8, "works": True, "in_arch_list": True}


class Machine:
    """Stands in for the runner: says of each probe what it is told to."""

    def __init__(self, devices: int, **verdicts: Verdict) -> None:
        self.devices, self.verdicts = devices, verdicts
        self.asked: list[str] = []

    def __call__(self, calls: Sequence[Call], bench: Bench) -> Generator[tuple[Finding, float], None, None]:
        for call in calls:
            name = call.function.rpartition(":")[2]
            self.asked.append(name)
            yield Finding(self.verdicts.get(name, "ok"), f"{name} was seen", self._numbers(name)), 0.5

    def _numbers(self, name: str) -> dict[str, Any]:
        if name == "torch_and_gpus":
            return {"torch": "2.11.0+cu130", "driver": "580.1", "devices": [GPU] * self.devices}
        if name == "flex_attention_both_ways":
            return {"works": {"NVIDIA H200": "forward and backward"}}
        return {"gb_s": [[None, 394.0], [393.0, None]]} if name == "copies_between_all_pairs" else {}


def diagnose(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(examine, "run_probes", machine)
    return doctor(console=Console(), out=tmp_path / "machine.json", runs=tmp_path)


@pytest.mark.parametrize(
    ("devices", "verdicts", "policy"),
    [
        (2, {}, "captured"),
        (2, {"eager_step": "degraded", "while_drawing_default": "refused", "named_mode": "died"}, "captured"),
        (1, {"while_allocating": "refused"}, "compiled"),
        (1, {"compiled_step": "died"}, "compiled"),
        (1, {"eager_step": "hung"}, "compiled"),
        (1, {"in_worker_thread": "hung"}, "eager"),
        (1, {"torch_and_gpus": "refused"}, "eager"),  # the GPU is there and cannot be used
        (0, {}, "compiled"),
        (0, {"in_worker_thread": "refused"}, "eager"),
    ],
)
def test_the_policy_follows_from_what_was_seen(
    devices: int, verdicts: dict[str, Verdict], policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = diagnose(Machine(devices, **verdicts), tmp_path, monkeypatch)
    assert report["profile"]["policy"] == policy
    assert json.loads((tmp_path / "machine.json").read_text()) == report["profile"]


def test_what_the_machine_lacks_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    report = diagnose(machine, tmp_path, monkeypatch)
    probes = {probe["name"]: probe for probe in report["probes"]}
    assert list(probes) == [entry.name for entry in ENTRIES]
    assert (probes["nccl"]["verdict"], probes["nccl"]["observed"]) == ("skipped", "needs two CUDA devices")
    assert probes["capture-worker"]["verdict"] == "ok"
    assert "sum_over_all" not in machine.asked


def test_two_gpus_give_the_matrix_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = diagnose(Machine(2), tmp_path, monkeypatch)
    assert report["profile"]["peer_gb_s"] == [[None, 394.0], [393.0, None]]
    assert report["profile"]["machine"]["devices"][1]["name"] == "NVIDIA H200"


def test_a_torch_that_dies_is_a_result_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0, torch_and_gpus="died", in_worker_thread="died")
    monkeypatch.setattr(machine, "_numbers", lambda name: {})
    report = diagnose(machine, tmp_path, monkeypatch)
    assert report["profile"]["policy"] == "eager"
    assert report["profile"]["machine"]["devices"] == []


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    diagnose(Machine(1, while_allocating="refused"), tmp_path, monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("refused"))
    assert lines[at].split() == ["refused", "capture-while-allocating", "while_allocating", "was", "seen"]
    assert lines[at + 1].strip() == "A capture fails beside a target on the same GPU."
    assert lines[-1].startswith("Policy: `train` takes `compiled`. ")
    assert max(map(len, lines[:-1])) <= WIDTH


def test_a_profile_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machine.json").mkdir()
    report = diagnose(Machine(0), tmp_path, monkeypatch)
    assert report["profile"]["policy"] == "compiled"
    assert "The profile could not be written to" in capsys.readouterr().out


@pytest.mark.slow
def test_for_real(tmp_path: Path) -> None:
    report = doctor(console=Console(json=True), out=tmp_path / "machine.json", runs=tmp_path)
    probes = {probe["name"]: probe for probe in report["probes"]}
    assert not [probe for probe in probes.values() if probe["verdict"] in ("died", "hung")]
    for name in ("compiler", "disk", "ports", "compile-main", "compile-worker", "compile-two-threads"):
        assert probes[name]["verdict"] == "ok", probes[name]
    for name in ("settings-in-threads", "is-compiling", "modules-while-tracing", "graph-trees-in-worker"):
        assert "NOT expected" not in probes[name]["observed"]
    profile, reason = load_profile(tmp_path / "machine.json", this_machine())
    assert profile is not None, reason
    if not torch.cuda.is_available():
        assert (profile.policy, profile.flex_attention) == ("compiled", {"cpu": "forward only"})
