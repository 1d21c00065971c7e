"""The count of a step's operations against torch's own counter, where every slot is real."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.flops import useful_flops
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
    step = DrafterStep(Drafter(drafter, hidden).initialise(0), FrozenEnds(embed_VH, embed_VH.clone()), train)
    with FlopCounterMode(display=False) as counted:
        step.micro()

    def flops(visible: int) -> float:
        sizes = {"hidden_size": hidden, "vocab_size": 128}
        return useful_flops(drafter, **sizes, tokens=tokens, visible=visible, blocks=blocks)

    slots = 4 * blocks
    # torch does not count attention on a CPU: without any visible token, not even a block's own, there is none.
    assert counted.get_total_flops() == flops(-slots)
    # A query of 4 heads of 16 and a visible token: 64 products and sums for the score, 64 for the value, thrice.
    assert flops(100) - flops(-slots) == 3 * layers * 4 * (100 + slots) * 2 * (64 + 64)
