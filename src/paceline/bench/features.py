"""Micro-batches of random features, with the lengths and the cuts of a run's plan.

Shapes: N rows, T real tokens, D feature width, K anchors in use, B block slots.
"""

from collections.abc import Sequence

import numpy as np
import torch

from paceline import blocks
from paceline.bench.lengths import run_lengths
from paceline.bench.shapes import Shape
from paceline.config import DataSettings
from paceline.data.loader import cut_batches
from paceline.data.plan import plan
from paceline.records import BlockSet, FeatureBatch, TokenBatch

_ROWS = 20_000
_FIXED = 4  # micro-batches where the shape has samples of its own: they differ in tokens and anchors
_PROMPT = 4  # a quarter of a row is the prompt


def feature_batches(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[FeatureBatch]:
    """Return the emptiest and the fullest micro-batch of every bucket of an epoch, as it is planned by default.

    Lengths are those of the run that paceline is modelled on, cut at the context slots. Where the shape has samples of
    its own, every micro-batch holds these. What a CUDA device reads of them lies in pinned memory, as in a run.
    """
    cuts = [list(shape.lengths)] * _FIXED if shape.lengths else _of_every_bucket(shape)
    most = max(map(sum, cuts))
    generator = torch.Generator(device=device).manual_seed(0)
    width = len(shape.drafter.taps) * shape.hidden_size
    features_TD = torch.randn(most, width, device=device, generator=generator).to(dtype)
    return [
        FeatureBatch(
            _tokens(shape, lengths, seq, pin=device.type == "cuda"),
            features_TD[: sum(lengths)],
            blocks.context_positions(lengths),
        )
        for seq, lengths in enumerate(cuts)
    ]


def _of_every_bucket(shape: Shape) -> list[list[int]]:
    """Return the lengths of two micro-batches a bucket."""
    settings, train = DataSettings(dataset="bench"), shape.train_settings("bfloat16")
    lengths_N = np.minimum(run_lengths(_ROWS), min(shape.context_slots, settings.token_budget)).astype(np.int32)
    made = plan(lengths_N, settings, seed=0, epoch=0)
    ordered_N = lengths_N[made.rows_N]
    anchors_N = np.minimum(_candidates(ordered_N), shape.anchors_per_sample)
    ends = cut_batches(lambda first, behind: (ordered_N[first:behind], anchors_N[first:behind]), made.offsets, train)
    starts = np.concatenate([[0], *ends])
    batch_U = np.searchsorted(made.offsets, starts[:-1], side="right") - 1
    tokens_U = np.add.reduceat(ordered_N, starts[:-1])
    chosen = []
    for bucket in range(len(made.edges)):
        own = np.flatnonzero(made.bucket_M[batch_U] == bucket)
        if len(own):
            chosen += [int(own[tokens_U[own].argmin()]), int(own[tokens_U[own].argmax()])]
    return [ordered_N[starts[i] : starts[i + 1]].tolist() for i in chosen]


def _candidates(lengths_N: np.ndarray) -> np.ndarray:
    return np.maximum(lengths_N - 1 - lengths_N // _PROMPT, 0)


def _tokens(shape: Shape, lengths: Sequence[int], seq: int, *, pin: bool) -> TokenBatch:
    B = shape.drafter.block_size
    generator = torch.Generator().manual_seed(seq)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    drawn = [
        blocks.sample_anchors(np.arange(n // _PROMPT, n - 1), shape.anchors_per_sample, seed=0, epoch=seq, sample=row)
        for row, n in enumerate(lengths)
    ]
    counts = [len(places) for places in drawn]
    ids_T = torch.randint(0, shape.vocab_size, (sum(lengths),), generator=generator)
    start_K = torch.from_numpy(np.repeat(starts[:-1], counts))
    position_K = torch.from_numpy(np.concatenate(drawn))
    anchor_K = start_K + position_K
    slots_KB = anchor_K[:, None] + torch.arange(B)
    valid_KB = slots_KB < torch.from_numpy(np.repeat(starts[1:], counts))[:, None]
    valid_KB[:, 0] = False
    labels_KB = ids_T[slots_KB.clamp(max=len(ids_T) - 1)] * valid_KB
    columns = (start_K, anchor_K, position_K, ids_T[anchor_K], labels_KB, valid_KB)
    block_set = BlockSet(*(column.pin_memory() if pin else column for column in columns))
    ids_RS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    places_T = torch.cat([torch.arange(n) + row * max(lengths) for row, n in enumerate(lengths)])
    ids_RS.flatten()[places_T] = ids_T
    return TokenBatch(seq, 0, seq, True, tuple(range(len(lengths))), ids_RS, tuple(lengths), places_T, block_set)
