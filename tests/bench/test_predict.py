"""Predictions: the arithmetic of splits, by hand, and what a sample costs, against a real target's layers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bench.predict import Costs, Load, costs, predict, slowest_share, target_flops
from paceline.runtime.profile import Rates
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget

LOAD = Load(tokens=100.0, padding=0.0, samples=8.0, micro_samples=2.0, feature_bytes=10, weights=1000)
COST = Costs(target=0.1, micro=0.2, update=0.1, gradients=0.3, features=0.0)


def test_every_split_and_both_roles_on_each_gpu() -> None:
    found = predict(3, LOAD, COST)
    assert [(one.targets, one.drafters, one.colocated) for one in found] == [(1, 2, False), (2, 1, False), (3, 3, True)]
    two, one, both = found
    # Four micro-batches: two for each of two ranks; four for one; for three ranks, one of them has two.
    assert two.drafter_side == pytest.approx(8 / (2 * 0.2 + 0.1 + 0.3))
    assert one.drafter_side == pytest.approx(8 / (4 * 0.2 + 0.1))
    assert (two.limit, two.samples_per_s) == ("targets", pytest.approx(10.0))
    assert (one.limit, one.samples_per_s) == ("drafters", one.drafter_side)
    assert both.samples_per_s == pytest.approx(8 / (8 * 0.1 / 3 + 2 * 0.2 + 0.1 + 4 / 3 * 0.3))


def test_one_gpu_is_shared() -> None:
    (both,) = predict(1, LOAD, COST)
    assert both.samples_per_s == pytest.approx(1 / (0.1 + 0.9 / 8)), "the harmonic sum"


def test_features_may_be_what_limits() -> None:
    slow = replace(COST, features=2.0, micro=0.01, update=0.0, gradients=0.0)
    split = predict(2, LOAD, slow)[0]
    assert (split.limit, split.samples_per_s) == ("features", 0.5)


def test_seconds_follow_from_rates() -> None:
    rates = Rates(bf16_tflops=100.0, fp8_tflops=None, memory_gb_s=1000.0)
    found = costs(replace(LOAD, padding=0.5), rates, target_flops=58e9, step_flops=72e9, peer_gb_s=100.0)
    assert found.target == pytest.approx(2e-3), "half of what is computed is padding"
    assert found.micro == pytest.approx(1e-3)
    assert found.update == pytest.approx(38 * 1000 / 1e12)
    assert found.gradients == pytest.approx(4 * 1000 / 1e11)
    assert found.features == pytest.approx(100 * 10 / 1e11)
    unknown = costs(LOAD, rates, target_flops=1.0, step_flops=1.0, peer_gb_s=None)
    assert (unknown.gradients, unknown.features) == (0.0, 0.0)


def test_a_samples_features_cost_what_the_layers_up_to_the_deepest_tap_compute(tiny: TargetFacts) -> None:
    target: Any = FeatureTarget(tiny, (0, 2), dtype=torch.float32, device="cpu")
    entries = sum(module.weight.numel() for module in target._trunk.layers.modules() if isinstance(module, nn.Linear))
    assert len(target._trunk.layers) == 3
    tokens = 100
    # Each query head: a product with every key that it sees, and one with its value; without the diagonal's half.
    attention = 3 * 4 * 2 * 2 * 16 * sum(range(1, tokens + 1))
    found = target_flops(tiny, 2, float(tokens))
    assert found == pytest.approx(2 * tokens * entries + attention, rel=0.02)
    assert math.isclose(found - 2 * tokens * entries, 3 * 2 * tokens**2 * 64)


def test_a_replica_on_several_gpus_is_as_fast_as_the_one_with_most_layers() -> None:
    found = predict(8, LOAD, COST, devices_per_replica=3)
    assert [(one.targets, one.drafters, one.colocated) for one in found] == [(1, 5, False), (2, 2, False)]
    assert [one.target_side for one in found] == pytest.approx([10.0, 20.0])
    assert predict(3, LOAD, COST, devices_per_replica=3) == [], "no GPU is left for a drafter"
    assert slowest_share((3, 4, 2)) == pytest.approx(4 / 9)
