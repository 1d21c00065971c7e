"""The joined twin against the drafter it is the twin of: outputs and every parameter's gradient, in float64."""

import pytest
import torch
from torch import nn

from paceline import blocks
from paceline.config import DrafterSettings
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.joined import Joined, distinct_ids, leaf_names, turns
from paceline.drafter.model import Drafter

H, VOCAB, C = 32, 64, 20


def case(shape: DrafterSettings, layers: int, anchors: int) -> tuple[DrafterSettings, Drafter, dict[str, torch.Tensor]]:
    """Return a drafter whose every path carries a signal, norms included, and a micro-batch of two samples."""
    settings = shape.model_copy(update={"layers": layers})
    drafter = Drafter(settings, H).initialise(0).double()
    generator = torch.Generator().manual_seed(anchors)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    start_A = torch.where(torch.arange(anchors) < anchors / 2, 0, 12)
    anchor_A = start_A + torch.randint(1, 8, (anchors,), generator=generator)
    return settings, drafter, {
        "features": torch.randn(C, 3 * H, dtype=torch.float64, generator=generator),
        "positions": torch.cat([torch.arange(12), torch.arange(8)]),
        "start": start_A,
        "anchor": anchor_A,
        "token": torch.randint(4, VOCAB, (anchors,), generator=generator),
        "grad": torch.randn(anchors * (shape.block_size - 1), H, dtype=torch.float64, generator=generator),
    }  # fmt: skip


# 16 anchors fill whole rows of the first layer's products, 15 leave one for the mask token, 5 leave many.
@pytest.mark.parametrize("anchors", [5, 15, 16])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_twin_is_the_drafter(shape: DrafterSettings, layers: int, anchors: int) -> None:
    settings, drafter, given = case(shape, layers, anchors)
    B, mask = settings.block_size, settings.mask_token_id
    table = torch.randn(VOCAB, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ends = FrozenEnds(table, table, scale=1.5)
    position_A = given["anchor"] - given["start"]
    present = torch.ones(1, anchors, B, dtype=torch.bool)
    visibility = Dense(blocks.block_mask(given["start"][None], given["anchor"][None], present, C))

    positions_Q = blocks.block_positions(position_A, B).flatten()
    context = drafter.context(given["features"][None], given["positions"][None])
    embeds = ends.embed(blocks.block_ids(given["token"], mask, B).view(1, -1))
    plain = drafter(embeds, positions_Q[None], context, visibility).view(anchors, B, H)[:, 1:].flatten(0, 1)
    weights = dict(drafter.named_parameters())
    wanted = dict(zip(weights, torch.autograd.grad(plain, list(weights.values()), given["grad"]), strict=True))

    joins = leaf_names(weights)
    leaves = {leaf: nn.Parameter(torch.cat([weights[name].detach() for name in joins[leaf]])) for leaf in joins}
    twin = Joined(settings, leaves)
    assert len(list(twin.parameters())) == len(weights) - 2 * layers
    tables = turns(torch.cat([given["positions"], positions_Q]), settings, torch.float64)
    embeds_UH = ends.embed(distinct_ids(given["token"], mask)[None])[0]
    hidden = twin(given["features"], embeds_UH, (anchors, B), tables, visibility)
    torch.testing.assert_close(hidden, plain, rtol=1e-12, atol=1e-12)
    for leaf, found in zip(leaves, torch.autograd.grad(hidden, list(leaves.values()), given["grad"]), strict=True):
        truth = torch.cat([wanted[name] for name in joins[leaf]])
        error = (found - truth).norm() / truth.norm()
        assert error < 1e-12, (leaf, float(error))


def test_leaves_join_what_reads_the_same_rows(shape: DrafterSettings) -> None:
    names = [name for name, _ in Drafter(shape, H).named_parameters()]
    joins = leaf_names(names)
    assert joins["layers.1.self_attn.kv_proj.weight"] == (
        "layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.v_proj.weight",
    )
    assert joins["layers.0.mlp.gate_up_proj.weight"] == (
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
    )
    assert joins["layers.0.self_attn.q_proj.weight"] == ("layers.0.self_attn.q_proj.weight",)
    assert [name for members in joins.values() for name in members] == names


@pytest.mark.parametrize("anchors", [1, 15, 16, 1024])
def test_the_mask_token_stands_behind_the_anchors_in_whole_rows(anchors: int) -> None:
    ids = distinct_ids(torch.arange(10, 10 + anchors), 3)
    assert len(ids) % 16 == 0
    assert 0 < len(ids) - anchors <= 16
    assert ids.tolist() == [*range(10, 10 + anchors), *[3] * (len(ids) - anchors)]
