"""What a block can and cannot see, and that training and decoding compute the same."""

from typing import Any

import pytest
import torch

from paceline import blocks
from paceline.config import DrafterSettings
from paceline.decode.draft import DraftSession
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import UserError

H, VOCAB, C = 32, 64, 20


@pytest.fixture(scope="module")
def drafter(shape: DrafterSettings) -> Drafter:
    # Larger than the real initial weights, so that every path carries a signal.
    drafter = Drafter(shape, H).initialise(0).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return drafter


@pytest.fixture(scope="module")
def ends() -> FrozenEnds:
    table = torch.randn(VOCAB, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return FrozenEnds(table, table)


class Inputs:
    """Two samples of 12 and 8 tokens end to end, blocks at anchors 4 and 7 of the first and 3 of the second."""

    def __init__(self, width: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.features = torch.randn(1, C, width, dtype=torch.float64, generator=generator)
        self.positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
        self.start = torch.tensor([[0, 0, 12]])
        self.anchor = torch.tensor([[4, 7, 15]])
        self.position = torch.tensor([[4, 7, 3]])
        self.tokens = torch.tensor([[10, 11, 12]])

    def logits(self, drafter: Drafter, ends: FrozenEnds, ids: torch.Tensor | None = None) -> torch.Tensor:
        B = drafter.settings.block_size
        ids = blocks.block_ids(self.tokens, drafter.settings.mask_token_id, B) if ids is None else ids
        present = torch.ones(1, 3, B, dtype=torch.bool)
        mask = blocks.block_mask(self.start, self.anchor, present, C)
        positions = blocks.block_positions(self.position, B).view(1, -1)
        context = drafter.context(self.features, self.positions)
        return ends.logits(drafter(ends.embed(ids.view(1, -1)), positions, context, Dense(mask))).view(3, B, -1)


@pytest.fixture
def inputs(shape: DrafterSettings) -> Inputs:
    return Inputs(len(shape.taps) * H)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_features_at_or_after_the_anchor_do_not_leak(
    drafter: Drafter, ends: FrozenEnds, inputs: Inputs, block: int
) -> None:
    before = inputs.logits(drafter, ends)[block]
    inputs.features[:, int(inputs.anchor[0, block]) :] += 1
    if inputs.start[0, block] > 0:
        inputs.features[:, : int(inputs.start[0, block])] += 1  # another sample's
    assert torch.equal(inputs.logits(drafter, ends)[block], before)
    inputs.features[:, int(inputs.anchor[0, block]) - 1] += 1
    assert not torch.allclose(inputs.logits(drafter, ends)[block], before)


def test_blocks_do_not_see_each_other_and_slots_of_a_block_do(
    drafter: Drafter, ends: FrozenEnds, inputs: Inputs
) -> None:
    B = drafter.settings.block_size
    ids = blocks.block_ids(inputs.tokens, drafter.settings.mask_token_id, B)
    before = inputs.logits(drafter, ends, ids)
    changed = ids.clone()
    changed[0, 0] = torch.tensor([30, 31, 32, 33])
    after = inputs.logits(drafter, ends, changed)
    assert torch.equal(after[1:], before[1:])
    assert not torch.allclose(after[0], before[0])
    last = ids.clone()
    last[0, 0, B - 1] = 40
    assert not torch.allclose(inputs.logits(drafter, ends, last)[0, 1], before[0, 1])  # attention is bidirectional


def test_the_anchor_token_matters(drafter: Drafter, ends: FrozenEnds, inputs: Inputs) -> None:
    before = inputs.logits(drafter, ends)
    inputs.tokens = torch.tensor([[13, 11, 12]])
    after = inputs.logits(drafter, ends)
    assert not torch.allclose(after[0], before[0])
    assert torch.equal(after[1:], before[1:])


@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_training_block_equals_the_decoding_step_with_a_cached_context(
    drafter: Drafter, ends: FrozenEnds, inputs: Inputs, block: int
) -> None:
    trained = inputs.logits(drafter, ends)[block]
    start, anchor = int(inputs.start[0, block]), int(inputs.anchor[0, block])
    length = anchor - start
    session = DraftSession(drafter, ends, rows=2, slots=32)
    features = inputs.features[:, start:anchor]
    for part in (slice(0, 2), slice(2, length)):  # the context arrives in pieces, as in decoding
        session.extend(features[:, part], torch.arange(length)[None, part], torch.tensor([0]))
    session.extend(features.flip(1), torch.arange(length)[None], torch.tensor([1]))  # another row
    # Junk behind the row's end, as rejected tokens leave it.
    session.extend(torch.ones_like(features[:, :2]), torch.tensor([[length, length + 1]]), torch.tensor([0]))
    hidden = session.hidden(
        inputs.tokens[:, block], torch.tensor([length]), torch.tensor([drafter.settings.block_size]), reach=32
    )
    torch.testing.assert_close(ends.logits(hidden)[0], trained, rtol=1e-9, atol=1e-9)


def test_parameters_have_the_published_names_and_count(shape: DrafterSettings) -> None:
    big = DrafterSettings(
        block_size=16, layers=5, taps=(1, 9, 17, 25, 33), mask_token_id=151669, heads=32, kv_heads=8, head_dim=128,
        intermediate_size=12288, rope_theta=1e6,
    )  # fmt: skip
    with torch.device("meta"):
        drafter = Drafter(big, 4096)
    assert sum(p.numel() for p in drafter.parameters()) == 1_048_626_432  # the published Qwen3-8B drafter
    names = dict(drafter.named_parameters())
    assert len(names) == 58
    assert names["layers.4.self_attn.k_norm.weight"].shape == (128,)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.mlp.down_proj.weight"} <= names.keys()


def lacking(weights: dict[str, torch.Tensor]) -> None:
    del weights["norm.weight"]


def extra(weights: dict[str, torch.Tensor]) -> None:
    weights["embed.weight"] = torch.zeros(3)


def reshaped(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = torch.zeros(3)


def narrow(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"].bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking, r"weights lack norm\.weight"),
        (extra, r"weights have no place for embed\.weight"),
        (reshaped, r"must hold norm\.weight as float32 \[64\] by its settings, found float32 \[3\]"),
        (narrow, r"must hold norm\.weight as float32 \[64\] by its settings, found bfloat16 \[64\]"),
    ],
)
def test_weights_of_other_settings_are_refused(shape: DrafterSettings, change: Any, message: str) -> None:
    weights = {name: p.detach() for name, p in Drafter(shape, 64).initialise(0).named_parameters()}
    change(weights)
    with pytest.raises(UserError, match=message):
        Drafter.from_weights(shape, 64, weights)
