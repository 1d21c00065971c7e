"""Features as bytes on a GPU: the same bytes as on a CPU, in a run, and nobody waits for them."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_requests import waiting_is_an_error

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.bench.weights import random_drafter, random_ends
from paceline.drafter.packed import broken_tokens, pack, room_like, unpack
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.slots import Landing, Slots
from paceline.runtime.streams import own_stream
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

ONE = ("cuda:0", "cuda:0")
CAPTURED = {"policy": "captured", "context_slots": 128, "anchor_slots": 32}
T, TAPS, H = 333, 5, 512
D = TAPS * H


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    given_TD = (torch.randn(T, D, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    given_TD[7] *= 1e-30
    given_TD[8] = 0
    bytes_TP, there_TP = pack(given_TD, TAPS), pack(given_TD.cuda(), TAPS)
    assert torch.equal(there_TP.cpu(), bytes_TP)
    here_TD, there_TD = torch.zeros(T, D, dtype=dtype), torch.zeros(T, D, dtype=dtype, device="cuda:0")
    unpack(bytes_TP, here_TD)
    unpack(there_TP, there_TD)
    assert torch.equal(there_TD.cpu(), here_TD)
    there_TD.zero_()
    unpack(bytes_TP, there_TD)  # from another device
    assert torch.equal(there_TD.cpu(), here_TD)


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, 0x7FFF0000, -1])
def test_what_is_not_finite_is_seen(bits: int) -> None:
    """NaN as GPUs make it overflows the whole number that a scale is made of; no negative value beside it helps."""
    given_TD = torch.rand(T, D, device="cuda:0")
    given_TD.view(torch.int32)[11, H + 2] = bits
    bytes_TP = pack(given_TD, TAPS)
    assert broken_tokens(bytes_TP).nonzero().flatten().tolist() == [11]
    widened_TD = torch.zeros_like(given_TD)
    unpack(bytes_TP, widened_TD)
    assert not torch.isfinite(widened_TD[11, H : 2 * H]).any()


def test_landing_and_loading_bytes_waits_for_nothing() -> None:
    shape, device = SHAPES["tiny"], torch.device("cuda:0")
    taps = len(shape.drafter.taps)
    settings = shape.train_settings("bfloat16")
    step = DrafterStep(random_drafter(shape, device), random_ends(shape, device, torch.bfloat16), settings)
    batch = feature_batches(shape, device, torch.bfloat16)[0]
    tokens = replace(batch.tokens, closes_step=True)
    slots = Slots(1, replicas=1, ranks=1)
    slots.make(0, room_like(step.buffers.features_CD, taps))
    source = Dispenser(iter(replace(tokens, seq=seq) for seq in range(2)), lambda n: None, slots)
    outlet = source.open()
    landing = Landing("cuda:0", outlet, slots)
    with own_stream("cuda:0"):
        for at, mode in enumerate(("default", "error")):  # memory is pinned and kernels are loaded at the first time
            source.lease(outlet)
            with waiting_is_an_error() if mode == "error" else nullcontext():
                room_TP = landing.room(tokens)
                assert room_TP is not None
                landed = landing.land(replace(batch, features_TD=pack(batch.features_TD, taps, room_TP)))
                with landed.reading():
                    step.load(landed)
            outlet.settle(at)
    expected_TD = torch.zeros_like(batch.features_TD)
    unpack(pack(batch.features_TD, taps), expected_TD)
    assert torch.equal(step.buffers.features_CD[: tokens.num_tokens], expected_TD)


def test_losses_are_near_those_of_features_as_they_are(losses: Any) -> None:
    """And the same each time, however the drafter's step runs ahead."""
    exact = losses("exact", ONE, "bfloat16", more=CAPTURED)
    found = losses("bytes", ONE, "bfloat16", more=CAPTURED, target={"features": "fp8"})
    assert found != exact
    assert found == pytest.approx(exact, rel=0.03)
