"""The count of a step's operations against torch's own counter, where every slot is real.

Useful is what the drafter's maths says, whoever computes it; the step leaves out some of it without changing a result.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.flops import useful_flops
from paceline.drafter.joined import distinct_rows
from paceline.drafter.loss import frozen_head_loss
from paceline.drafter.model import Drafter
from paceline.train.step import DrafterStep


@pytest.mark.parametrize(("tokens", "blocks", "layers", "hidden"), [(24, 1, 2, 40), (32, 5, 3, 24), (7, 3, 1, 16)])
def test_matrix_products_are_those_that_torch_counts(tokens: int, blocks: int, layers: int, hidden: int) -> None:
    drafter = DrafterSettings(
        block_size=4,
        layers=layers,
        taps=(0, 2, 4),
        mask_token_id=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rope_theta=1e4,
    )
    train = TrainSettings(context_slots=tokens, anchor_slots=blocks, anchors_per_sample=blocks, dtype="float32")
    embed_VH = torch.randn(128, hidden)
    slots = 4 * blocks
    plain = Drafter(drafter, hidden).initialise(0)
    with FlopCounterMode(display=False) as counted:
        context = plain.context(torch.zeros(1, tokens, 3 * hidden), torch.arange(tokens)[None])
        everything = Dense(torch.ones(1, slots, tokens + slots, dtype=torch.bool))
        out = plain(torch.zeros(1, slots, hidden), torch.arange(slots)[None], context, everything)
        behind = out.view(blocks, 4, hidden)[:, 1:].flatten(0, 1)
        labels, weights = torch.zeros(len(behind), dtype=torch.long), torch.ones(len(behind))
        *_, grad = frozen_head_loss(behind.detach(), embed_VH, labels, weights, logits_bytes=1 << 20)
        torch.autograd.grad(behind, list(plain.parameters()), grad)
    step = DrafterStep(plain, FrozenEnds(embed_VH, embed_VH.clone()), train)
    with FlopCounterMode(display=False) as done:
        step.micro()

    def flops(visible: int) -> float:
        sizes = {"hidden_size": hidden, "vocab_size": 128}
        return useful_flops(drafter, **sizes, tokens=tokens, visible=visible, blocks=blocks)

    # torch does not count attention on a CPU: without any visible token, not even a block's own, there is none.
    assert counted.get_total_flops() == flops(-slots)
    # Not computed: q, k, v of the first layer for slots of one input, and slot 0 behind the last layer's attention.
    first = (slots - distinct_rows(blocks)) * hidden * (64 + 2 * 32)
    last = blocks * hidden * (64 + 3 * 96)
    assert done.get_total_flops() == flops(-slots) - 2 * 3 * (first + last)
    # A query of 4 heads of 16 and a visible token: 64 products and sums for the score, 64 for the value, thrice.
    assert flops(100) - flops(-slots) == 3 * layers * 4 * (100 + slots) * 2 * (64 + 64)
