"""`paceline bench step --peer` with the peers' real packages, on a CPU: the same work, and one run for all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import blocks
from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES

pytestmark = pytest.mark.interop

SHAPE = SHAPES["tiny-2x128"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    folder = os.environ.get("PACELINE_PEERS", "")
    if not (Path(folder) / "specforge").is_dir():
        rule = f"PACELINE_PEERS must name the folder of the peers' packages, got {folder!r}."
        pytest.fail(f"{rule} Run `make interop`, which sets it.", pytrace=False)
    command = [sys.executable, "-m", "paceline", "bench", "step", "--shape", SHAPE.name, "--policy", "eager"]
    options = ["--peer", "specforge", "--peer", "speculators", "--dtype", "float32", "--steps", "4", "--device", "cpu"]
    paths = [folder, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    done = subprocess.run([*command, *options, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_peer_and_setting_has_its_row(rows: list[dict[str, Any]]):
    assert [(row["who"], row["policy"]) for row in rows] == [
        ("specforge 0.2.0", "objective_chunk_blocks 128"),
        ("specforge 0.2.0", "objective_chunk_blocks 0"),
        ("speculators 0.9.0", "defaults"),
        ("paceline", "eager"),
    ]


def test_the_ratio_is_to_the_fastest_peer(rows: list[dict[str, Any]]):
    best = max(row["blocks_per_s"] for row in rows[:-1])
    assert rows[-1]["ratio_to_best_peer"] == pytest.approx(rows[-1]["blocks_per_s"] / best, abs=1e-3)


def test_specforge_computes_our_loss(rows: list[dict[str, Any]]):
    for row in rows[:2]:
        assert row["first_loss"] == pytest.approx(rows[-1]["first_loss"], abs=2e-5)


def test_speculators_computes_a_loss_over_as_many_labels(rows: list[dict[str, Any]]):
    """It divides by labels, not by their weights, and labels are the best tokens of what it is given as the target."""
    own = feature_batches(SHAPE, torch.device("cpu"), torch.float32)[0].tokens.blocks
    B = SHAPE.drafter.block_size
    weights = blocks.slot_weights(B, blocks.default_gamma(B))
    mean_weight = (own.valid_KB * weights).sum() / own.valid_KB.sum()
    assert rows[2]["first_loss"] == pytest.approx(rows[-1]["first_loss"] * mean_weight.item(), rel=0.03)
