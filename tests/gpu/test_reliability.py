"""What a run survives on a CUDA device, where the faults are those of the device itself.

The rest is on CPUs, in tests/faults.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.recipes.train import train
from paceline.recipes.train_stop import StopRequest
from paceline.records import BlockSet, Interrupted, TokenBatch
from paceline.runtime.gate import Gate
from paceline.target.feature_cache import NoCache
from paceline.target.load import TargetFacts
from paceline.target.replica import TargetReplica
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

STEPS, STOP_AFTER = 14, 6
# The drafter's first update never comes to an end on the device; the host waits for it.
HANGS = """
import sys
import torch
from paceline import cli
from paceline.train.step import DrafterStep
update = DrafterStep.update
def hanging(self, lr):
    update(self, lr)
    torch.cuda._sleep(2**45)
DrafterStep.update = hanging
sys.argv = ["paceline", "train", sys.argv[1]]
cli.main()
"""


@pytest.fixture
def settings(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list[Any]
) -> Callable[..., RunSettings]:
    dataset = str(write_dataset(random_rows))

    def make(name: str, **changes: Any) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / name),
            "target": {"model": str(tiny_folder), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": dataset, "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"epochs": 20, "max_steps": STEPS, "context_slots": 128, "anchor_slots": 32}
            | {"anchors_per_sample": 4, "dtype": "float32", "log_every": 1, "lr": 1e-2, "policy": "captured"},
            "pipeline": {"targets": ["cuda:0", "cuda:0"], "drafters": ["cuda:0"]},
            "checkpoint": {"every_steps": 1000},
        }
        for section, values in changes.items():
            tree[section] = tree[section] | values
        return RunSettings.model_validate(tree)

    return make


def told(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_under_graphs_is_as_if_it_had_not_stopped(
    settings: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (settings(name, train={"optimizer": optimizer}) for name in ("whole", "cut"))
    train(whole, console=Console(json=True))
    run = Path(cut.run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "__call__", lambda self: len(told(run, "step")) >= STOP_AFTER)
        with pytest.raises(Interrupted, match="saved"):
            train(cut, console=Console(json=True))
    train(cut, console=Console(json=True), resume=True)
    one, other = ([event["loss"] for event in told(Path(tree.run_dir), "step")] for tree in (cut, whole))
    assert len(one) == STEPS
    assert one == pytest.approx(other, rel=1e-4)
    weights, expected = (load_file(Path(tree.run_dir, "drafter", "model.safetensors")) for tree in (cut, whole))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_is_not_applied_by_a_graph(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, load = [0], DrafterStep.load

    def poisoned(self: DrafterStep, batch: Any) -> None:
        load(self, batch)
        calls[0] += 1
        if calls[0] == 5:
            self.buffers.features_CD[0].fill_(torch.nan)

    monkeypatch.setattr(DrafterStep, "load", poisoned)
    tree = settings(
        "poisoned", data={"buckets": 1, "max_batch": 24, "token_budget": 2000}, train={"context_slots": 768}
    )
    train(tree, console=Console(json=True))
    run = Path(tree.run_dir)
    (rejected,) = told(run, "rejected")
    steps = told(run, "step")
    assert [event["step"] for event in steps if not event["applied"]] == [rejected["step"]]
    assert len(steps) == STEPS
    assert all(event["loss"] < 100 for event in steps if event["applied"])
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_target_without_room_computes_halves(tiny: TargetFacts) -> None:
    """The limit is torch's own for this process, half way between what the whole and a half need."""
    rows, width = 256, 512
    ids_RS = torch.randint(4, 128, (rows, width), generator=torch.Generator().manual_seed(0))
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none.view(0, 4), none.view(0, 4).bool())
    tokens = TokenBatch(0, 0, 0, True, tuple(range(rows)), ids_RS, (width,) * rows, torch.arange(rows * width), blocks)
    split: list[int] = []
    replica = TargetReplica(
        0, "cuda:0", facts=tiny, taps=(0, 2, 4), dtype=torch.float32, wire=torch.float32, largest=tokens,
        source=iter([]), cache=NoCache(), deliver=lambda batch: True, gate=Gate(),
        on_split=lambda replica, tokens, parts: split.append(parts),
    )  # fmt: skip
    replica.load()

    def peak(count: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        part = TokenBatch(
            0, 0, 0, True, tuple(range(count)), ids_RS[:count], (width,) * count, torch.arange(count * width), blocks
        )
        replica._features(part)
        return torch.cuda.max_memory_reserved()

    expected = replica._features(tokens)
    half, whole = peak(rows // 2), peak(rows)
    assert half < 0.8 * whole
    assert split == []
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction((half + whole) / 2 / total)
        found = replica._features(tokens)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert split == [2]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_kernel_that_hangs_ends_the_run_with_stacks(settings: Any, tmp_path: Path) -> None:
    tree = settings("hung", pipeline={"work_timeout_s": 8})
    path = tmp_path / "hung.yaml"
    path.write_text(dump_settings(tree))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stderr
    events = [json.loads(line) for line in Path(tree.run_dir, "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    assert "hangs" in events[-1]["message"], events[-1]["message"]
    assert "drafter rank 0" in Path(tree.run_dir, "stacks.txt").read_text()
    ready = max(event["t"] for event in events if event["event"] == "role" and event["state"] == "ready")
    assert events[-1]["t"] - ready < 8 + 30
    assert time.monotonic() - began < 240
