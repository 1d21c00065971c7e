"""Plan and dataset to micro-batches: the one shape of C context slots and A anchors that the drafter sees.

What is in a micro-batch follows from the rows' lengths and candidates alone (`schedule`); tokens are read only when it
is built. Anchors depend on (seed, epoch, row), so a sample brings the same blocks whatever batch it is in.

Shapes: n samples of a micro-batch, S padded length, K anchors, B slots of a block, N rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int

from paceline import blocks
from paceline.config import DataSettings, TrainSettings
from paceline.data.plan import plan
from paceline.data.store import CompletionDataset
from paceline.records import BlockSet, TokenBatch, UserError


@dataclass(frozen=True, slots=True)
class Cut:
    """A micro-batch before its tokens are read: its place in the run and its rows."""

    seq: int
    epoch: int
    step: int
    closes_step: bool
    rows: tuple[int, ...]


def micro_batches(
    dataset: CompletionDataset, data: DataSettings, train: TrainSettings, block_size: int
) -> Iterator[TokenBatch]:
    """Return the run's stream of micro-batches: all epochs, or up to train.max_steps.

    Raises:
        UserError: a row does not fit train.context_slots (before the first micro-batch), or see plan.
    """
    check_lengths(dataset, train)
    cuts = schedule(dataset.lengths, dataset.candidates, data, train)
    return (build(dataset, cut, train, block_size) for cut in cuts)


def largest_micro_batch(
    dataset: CompletionDataset, data: DataSettings, train: TrainSettings, block_size: int
) -> TokenBatch:
    """Return the first epoch's micro-batch with the most padded tokens, to rehearse the start-up with.

    Raises:
        UserError: as micro_batches.
    """
    check_lengths(dataset, train)
    whole_epoch = train.model_copy(update={"epochs": 1, "max_steps": None})
    cuts = schedule(dataset.lengths, dataset.candidates, data, whole_epoch)
    largest = max(cuts, key=lambda cut: len(cut.rows) * dataset.lengths[list(cut.rows)].max())
    return build(dataset, largest, train, block_size)


def count_steps(plan_batches: int, train: TrainSettings) -> int:
    """Return the optimizer steps of the run, given the batches of an epoch."""
    steps = train.epochs * -(-plan_batches // train.batches_per_step)
    return steps if train.max_steps is None else min(steps, train.max_steps)


def check_lengths(dataset: CompletionDataset, train: TrainSettings) -> None:
    """Refuse a dataset with a row that no micro-batch has room for.

    Raises:
        UserError: such a row exists.
    """
    row = int(dataset.lengths.argmax()) if len(dataset) else 0
    if len(dataset) and dataset.lengths[row] > train.context_slots:
        raise UserError(
            f"A sample must fit train.context_slots ({train.context_slots:,}), got row {row:,} of {dataset.folder} "
            f"(data.dataset) with {dataset.lengths[row]:,} tokens. Raise train.context_slots or prepare shorter rows."
        )


def schedule(
    lengths_N: Int[np.ndarray, " N"], candidates_N: Int[np.ndarray, " N"], data: DataSettings, train: TrainSettings
) -> Iterator[Cut]:
    """Yield the run's micro-batches in order. A step is batches_per_step plan batches; an epoch's last may be less."""
    anchors_N = np.minimum(candidates_N, train.anchors_per_sample)
    seq = step = 0
    for epoch in range(train.epochs):
        order = plan(lengths_N, data, seed=train.seed, epoch=epoch)
        for index in range(len(order)):
            rows = order.batch(index)
            parts = cut_batch(lengths_N[rows].tolist(), anchors_N[rows].tolist(), train)
            ends_step = (index + 1) % train.batches_per_step == 0 or index + 1 == len(order)
            for part in parts:
                closes = ends_step and part is parts[-1]
                yield Cut(seq, epoch, step, closes, tuple(rows[part].tolist()))
                seq += 1
            step += ends_step
            if step == train.max_steps:
                return


def cut_batch(lengths: list[int], anchors: list[int], train: TrainSettings) -> list[slice]:
    """Cut a batch, in its order, into the fewest runs within context_slots and anchor_slots; every row fits alone."""
    parts = []
    start = tokens = blocks_ = 0
    for i, (length, count) in enumerate(zip(lengths, anchors, strict=True)):
        if i > start and (tokens + length > train.context_slots or blocks_ + count > train.anchor_slots):
            parts.append(slice(start, i))
            start, tokens, blocks_ = i, 0, 0
        tokens += length
        blocks_ += count
    parts.append(slice(start, len(lengths)))
    return parts


def build(dataset: CompletionDataset, cut: Cut, train: TrainSettings, block_size: int) -> TokenBatch:
    """Read the rows of a cut, draw their anchors and lay the samples end to end."""
    lengths = tuple(int(dataset.lengths[row]) for row in cut.rows)
    input_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    samples = []
    start = 0
    for i, row in enumerate(cut.rows):
        ids, mask = dataset.row(row)
        ids_S, mask_S = torch.from_numpy(ids), torch.from_numpy(mask)
        input_ids[i, : lengths[i]] = ids_S
        drawn = blocks.sample_anchors(
            blocks.anchor_candidates(mask), train.anchors_per_sample, seed=train.seed, epoch=cut.epoch, sample=row
        )
        anchors_A = torch.from_numpy(drawn)
        labels_AB, valid_AB = blocks.block_labels(ids_S, mask_S, anchors_A, block_size)
        start_A = torch.full_like(anchors_A, start)
        samples.append((start_A, start + anchors_A, anchors_A, ids_S[anchors_A], labels_AB, valid_AB))
        start += lengths[i]
    return TokenBatch(
        seq=cut.seq,
        epoch=cut.epoch,
        step=cut.step,
        closes_step=cut.closes_step,
        samples=cut.rows,
        input_ids=input_ids,
        lengths=lengths,
        blocks=BlockSet(*(torch.cat(parts) for parts in zip(*samples, strict=True))),
    )
