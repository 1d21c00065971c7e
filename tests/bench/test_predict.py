"""Predictions: the arithmetic of splits, by hand, and what a sample costs, against a real target's layers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bench.pipeline import PipelineWork, target_facts
from paceline.bench.predict import Costs, Load, costs, predict, slowest_share, step_flops, target_flops
from paceline.records import UserError
from paceline.runtime.profile import Rates
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget
from paceline.target.replica import Pace

LOAD = Load(tokens=100.0, padding=0.0, samples=8.0, micro_samples=2.0, feature_bytes=10, weights=1000)
PLAIN, EAGER, FAST, FAST8 = Pace(), Pace(True), Pace(True, True), Pace(True, True, True)
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
    padded = replace(LOAD, padding=0.5)
    found = costs(padded, rates, target_flops=58e9, step_flops=72e9, peer_gb_s=100.0, pace=PLAIN)
    assert found.target == pytest.approx(2e-3), "half of what is computed is padding"
    assert found.micro == pytest.approx(1e-3)
    assert found.update == pytest.approx(38 * 1000 / 1e12)
    assert found.gradients == pytest.approx(4 * 1000 / 1e11)
    assert found.features == pytest.approx(100 * 10 / 1e11)
    unknown = costs(LOAD, rates, target_flops=1.0, step_flops=1.0, peer_gb_s=None, pace=PLAIN)
    assert (unknown.gradients, unknown.features) == (0.0, 0.0)


H200 = Rates(bf16_tflops=797.0, fp8_tflops=1400.0, memory_gb_s=4000.0)


@pytest.mark.parametrize(("pace", "measured"), [(PLAIN, 32_700), (EAGER, 32_000), (FAST, 43_626), (FAST8, 69_095)])
def test_tokens_of_each_path_are_those_that_an_h200_made(pace: Pace, measured: float) -> None:
    """Of Qwen3-8B's shape, as benchmarks/log.md has them; the plain path's where nothing was padded."""
    work = PipelineWork("qwen3-8b", ("cuda:0",), ("cuda:0",), "bfloat16", "captured", 40, False)
    tokens = 144_526 / 52
    load = replace(LOAD, tokens=tokens, padding=0.0)
    flops = target_flops(target_facts(work, Path("none")), max(work.target.taps), tokens)
    found = costs(load, H200, target_flops=flops, step_flops=1.0, peer_gb_s=None, pace=pace)
    assert tokens / found.target == pytest.approx(measured, rel=0.06)
    padded = costs(replace(load, padding=0.2), H200, target_flops=flops, step_flops=1.0, peer_gb_s=None, pace=pace)
    assert padded.target == pytest.approx(found.target if pace.fast else found.target / 0.8), (
        "only real tokens, if fast"
    )


@pytest.mark.parametrize(("fp8", "target", "step", "whole"), [(False, 80.5, 18.05, 14.75), (True, 133.5, 27.96, 21.71)])
def test_a_whole_run_is_predicted_as_an_h200_made_it(fp8: bool, target: float, step: float, whole: float) -> None:
    """`paceline bench pipeline` with and without --fp8, as benchmarks/log.md has it.

    Of what is predicted from, the step's share of fp8's rate was corrected by such a run, where it was 13 % low.
    """
    work = PipelineWork("qwen3-8b", ("cuda:0",), ("cuda:0",), "bfloat16", "captured", 40, fp8)
    facts, drafter, (tokens, *_) = target_facts(work, Path("none")), work.shape.drafter, work.shape.lengths
    samples = float(len(work.shape.lengths))
    load = Load(float(tokens), 0.0, samples, samples, feature_bytes=0, weights=1_050_000_000)
    train = work.shape.train_settings("bfloat16")
    slots = {"context_slots": train.context_slots, "anchor_slots": train.anchor_slots}
    cost = costs(
        load,
        H200,
        target_flops=target_flops(facts, max(drafter.taps), float(tokens)),
        step_flops=step_flops(drafter, facts, **slots, seen=tokens / 2),
        peer_gb_s=None,
        pace=FAST8 if fp8 else FAST,
        step8=fp8,
    )
    (found,) = predict(1, load, cost)
    assert found.target_side == pytest.approx(target, rel=0.1)
    assert found.drafter_side == pytest.approx(step, rel=0.1)
    assert found.samples_per_s == pytest.approx(whole, rel=0.1)


def test_what_nobody_measured_in_fp8_is_not_predicted() -> None:
    without = H200.model_copy(update={"fp8_tflops": None})
    for pace, step8, key in ((FAST8, False, "target.fp8"), (FAST, True, "train.fp8")):
        with pytest.raises(UserError, match=f"^{key}: on is predicted .* Set {key} to off, or name another profile"):
            costs(LOAD, without, target_flops=1.0, step_flops=1.0, peer_gb_s=None, pace=pace, step8=step8)


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
