"""On a CUDA device: the same losses as on the CPU, and lossless decoding in float32."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from paceline.config import DataSettings, TrainSettings
from paceline.data import loader
from paceline.data.loader import micro_batches
from paceline.data.mixture import Mixture
from paceline.data.store import CompletionDataset
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter
from paceline.records import BlockSet, TokenBatch
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cpu", "cuda:0"), ("cuda:0", "cpu")])
def test_losses_equal_those_of_the_cpu(losses: Any, devices: tuple[str, str]) -> None:
    expected = losses("cpu", ("cpu", "cpu"), "float32")
    assert losses("gpu", devices, "float32") == pytest.approx(expected, rel=1e-3)


def test_bfloat16_losses_are_near(losses: Any) -> None:
    expected = losses("cpu", ("cpu", "cpu"), "float32")
    assert losses("gpu", ("cuda:0", "cuda:0"), "bfloat16") == pytest.approx(expected, rel=0.03)


def tensors_of(batch: TokenBatch) -> list[torch.Tensor]:
    return [batch.input_ids, batch.places_T, *(getattr(batch.blocks, field.name) for field in fields(BlockSet))]


@pytest.mark.parametrize("layout", ["trimmed", "packed"])
def test_micro_batches_are_pinned_where_they_are_asked_to_be(
    make_dataset: Callable[..., CompletionDataset], random_rows: list[Any], layout: str
) -> None:
    data = DataSettings(dataset="d", layout=layout, token_budget=120, align=8)
    small = TrainSettings(epochs=1, context_slots=100, anchor_slots=16, anchors_per_sample=4)
    mixture = Mixture([make_dataset(random_rows)])
    plain, pinned = (list(micro_batches(mixture, data, small, 4, pin=pin)) for pin in (False, True))
    for one, other in zip(plain, pinned, strict=True):
        assert not any(tensor.is_pinned() for tensor in tensors_of(one))
        assert all(tensor.is_pinned() for tensor in tensors_of(other))
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_pinning_changes_no_loss(losses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned tensors are copied while the host goes on: nothing may reuse them before."""
    asked: list[bool] = []

    def unpinned(*args: Any, pin: bool, **more: Any) -> Iterator[TokenBatch]:
        asked.append(pin)
        return micro_batches(*args, **more)

    pinned = losses("pinned", ("cuda:0", "cuda:0"), "float32")
    monkeypatch.setattr(loader, "micro_batches", unpinned)
    assert losses("unpinned", ("cuda:0", "cuda:0"), "float32") == pytest.approx(pinned, rel=1e-4)
    assert asked == [True], "a run on a device asks for pinned tensors"


def test_packed_losses_equal_those_of_the_same_batches_trimmed(losses: Any) -> None:
    """One batch that holds every sample, so both layouts train on the same rows in every step."""
    alike = {"slots": 700, "max_batch": 24, "buckets": 1}
    trimmed = losses("trimmed", ("cuda:0", "cuda:0"), "float32", layout="trimmed", token_budget=2000, **alike)
    packed = losses("packed", ("cuda:0", "cuda:0"), "float32", layout="packed", token_budget=700, **alike)
    assert packed == pytest.approx(trimmed, rel=1e-3)


def test_speculative_decoding_is_lossless(tiny: TargetFacts, shape: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 128, (n,), generator=generator).tolist() for n in (5, 2, 9, 3)]
    target = DecodingTarget(tiny, shape.taps, dtype=torch.float32, device="cuda:0")
    drafter = Drafter(shape, tiny.hidden_size).initialise(0).to("cuda:0")
    ends = load_ends(tiny).to("cuda:0", torch.float32)
    plain = dict(generate(target, prompts, max_new_tokens=40, rows=4))
    on_cpu = DecodingTarget(tiny, (), dtype=torch.float32, device="cpu")
    assert plain == dict(generate(on_cpu, prompts, max_new_tokens=40, rows=4))
    done = dict(speculate(target, drafter, ends, prompts, max_new_tokens=40, rows=4))
    assert {i: c.token_ids for i, c in done.items()} == {i: c.token_ids for i, c in plain.items()}
