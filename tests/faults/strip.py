"""What a run would be if some rows brought no anchors: their blocks are taken out of every micro-batch."""

from dataclasses import fields, replace

import torch

from paceline.data import loader
from paceline.records import BlockSet


def inject(rows: list[int]) -> None:
    """Take away the anchors of these rows, and their ids."""
    build = loader.build

    def stripped(*args, **more):
        batch = build(*args, **more)
        ids, stays, end = batch.input_ids.clone(), torch.ones(len(batch.blocks.anchor_K), dtype=torch.bool), 0
        for row, length in zip(batch.samples, batch.lengths, strict=True):
            end += length
            if row in rows:
                ids.view(-1)[batch.places_T[end - length : end]] = 0
                stays &= (batch.blocks.anchor_K < end - length) | (batch.blocks.anchor_K >= end)
        blocks = BlockSet(*(getattr(batch.blocks, field.name)[stays] for field in fields(BlockSet)))
        return replace(batch, input_ids=ids, blocks=blocks)

    loader.build = stripped
