"""The micro-batches that the step is measured with."""

from typing import get_args

import numpy as np
import pytest
import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.cli_bench import StepShape
from paceline.drafter.attention import fits_tiles


def test_the_command_line_names_every_shape():
    assert set(get_args(StepShape)) == set(SHAPES)


@pytest.mark.parametrize(
    ("name", "lengths", "anchors", "tokens"),
    [("qwen3-8b-2x3072", [3072] * 2, 1024, 6144), ("qwen3-8b-8x550", [550] * 8, 2048, 4400)],
)
def test_fixed_shapes_hold_what_their_names_say(name: str, lengths: list[int], anchors: int, tokens: int):
    shape = SHAPES[name]
    assert (list(shape.lengths), shape.anchor_slots, sum(shape.lengths)) == (lengths, anchors, tokens)
    assert shape.drafter == SHAPES["qwen3-8b"].drafter
    assert shape.context_slots - tokens < 128
    assert fits_tiles(shape.context_slots, anchors, shape.drafter.block_size)


@pytest.mark.parametrize("name", ["tiny", "tiny-2x128"])
def test_labels_are_the_tokens_behind_the_anchors(name: str):
    shape = SHAPES[name]
    for batch in feature_batches(shape, torch.device("cpu"), torch.float32):
        tokens, own = batch.tokens, batch.tokens.blocks
        samples = [row[:n].tolist() for row, n in zip(tokens.input_ids, tokens.lengths, strict=True)]
        starts = np.cumsum([0, *tokens.lengths])
        for k, start in enumerate(own.start_K.tolist()):
            ids = samples[int(np.searchsorted(starts, start))]
            at = int(own.position_K[k])
            wanted = ids[at + 1 : at + shape.drafter.block_size]
            assert own.token_K[k] == ids[at]
            assert own.labels_KB[k][own.valid_KB[k]].tolist() == wanted


def test_samples_of_a_shape_fill_it_in_every_micro_batch_and_each_time_anew():
    shape = SHAPES["tiny-2x128"]
    first, second, *_ = feature_batches(shape, torch.device("cpu"), torch.float32)
    for batch in (first, second):
        assert batch.tokens.lengths == shape.lengths
        assert len(batch.tokens.blocks.anchor_K) == shape.anchor_slots
    assert not torch.equal(first.tokens.blocks.anchor_K, second.tokens.blocks.anchor_K)
    assert not torch.equal(first.tokens.input_ids, second.tokens.input_ids)
