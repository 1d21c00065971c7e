"""Plan and datasets to micro-batches: the one shape of C context slots and A anchors that the drafter sees.

What is in a micro-batch follows from the rows' lengths and candidates alone (`schedule`); tokens are read only when it
is built. Anchors depend on (seed, pass, row), so a sample brings the same blocks whatever batch it is in.

Shapes: n samples of a micro-batch, R rows that the target computes, S padded length, T real tokens, K anchors, B slots
of a block, M batches and U micro-batches of an epoch, N rows of an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import count

import numpy as np
import torch
from jaxtyping import Bool, Int

from paceline import blocks
from paceline.config import DataSettings, TrainSettings
from paceline.data.arrays import PIECE, long_array
from paceline.data.mixture import Mixture, batches_of_epochs, plan_epoch
from paceline.data.plan import ROUND, widths
from paceline.records import BlockSet, RunError, TokenBatch, UserError


@dataclass(frozen=True, slots=True)
class Cut:
    """A micro-batch before its tokens are read: its place in the run, its rows and how the target gets them."""

    seq: int
    epoch: int
    step: int
    closes_step: bool
    rows: tuple[int, ...]
    passes: tuple[int, ...]  # over its dataset that each row belongs to
    width: int  # tokens of a padded row
    packed: bool


@dataclass(frozen=True, slots=True, eq=False)
class EpochCuts:
    """The micro-batches of an epoch, in order: number i holds rows_N[starts[i] : starts[i + 1]].

    It stays while its epoch is read, so it keeps no more of a row than four bytes, and one more where passes differ.
    """

    rows_N: Int[np.ndarray, " N"]  # numbered through all datasets
    passes_N: Int[np.ndarray, " N"]
    batches: int
    packed: bool
    starts: Int[np.ndarray, " ends"]  # U + 1 of them
    batch_U: Int[np.ndarray, " U"]
    width_U: Int[np.ndarray, " U"]

    def cells_U(self) -> Int[np.ndarray, " U"]:
        """Return how many tokens the target computes for each, padding included."""
        return self.width_U.astype(np.int64) * (1 if self.packed else np.diff(self.starts))

    def cut(self, index: int, *, seq: int, epoch: int, first_step: int, batches_per_step: int) -> Cut:
        """Return a micro-batch of the epoch whose first optimizer step is `first_step`."""
        batch = int(self.batch_U[index])
        last_of_batch = index + 1 == len(self.batch_U) or self.batch_U[index + 1] != batch
        mine = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return Cut(
            seq=seq,
            epoch=epoch,
            step=first_step + batch // batches_per_step,
            closes_step=bool(last_of_batch) and ((batch + 1) % batches_per_step == 0 or batch + 1 == self.batches),
            rows=tuple(self.rows_N[mine].tolist()),
            passes=tuple(self.passes_N[mine].tolist()),
            width=int(self.width_U[index]),
            packed=self.packed,
        )


def micro_batches(
    mixture: Mixture,
    data: DataSettings,
    train: TrainSettings,
    block_size: int,
    *,
    first_step: int = 0,
    pin: bool = False,
) -> Iterator[TokenBatch]:
    """Return the run's stream of micro-batches: all epochs, or up to train.max_steps.

    From optimizer step `first_step` on it is what a run from the start would see there, but that `seq` counts from 0;
    no row before it is read. `pin` puts the tensors where a CUDA device copies from while the host goes on.

    Raises:
        UserError: a row does not fit train.context_slots (before the first micro-batch), or see plan.
        RunError: while it is read: a row holds an id that the dataset has not.
    """
    check_lengths(mixture, train)
    cuts = schedule(mixture, data, train, first_step=first_step)
    return (build(mixture, cut, train, block_size, pin=pin) for cut in cuts)


def largest_micro_batch(mixture: Mixture, data: DataSettings, train: TrainSettings, block_size: int) -> TokenBatch:
    """Return the first epoch's micro-batch with the most padded tokens, to rehearse the start-up with.

    Raises:
        UserError: as micro_batches.
    """
    check_lengths(mixture, train)
    cuts = cut_epoch(mixture, data, train, epoch=0, edges=mixture.edges(data))
    largest = int(cuts.cells_U().argmax())
    cut = cuts.cut(largest, seq=0, epoch=0, first_step=0, batches_per_step=train.batches_per_step)
    return build(mixture, cut, train, block_size)


def count_steps(mixture: Mixture, data: DataSettings, train: TrainSettings) -> int:
    """Return the optimizer steps of the run.

    Raises:
        UserError: see plan.
    """
    batches = batches_of_epochs(mixture, data, seed=train.seed, epochs=train.epochs)
    steps = sum(-(-count // train.batches_per_step) for count in batches)
    return steps if train.max_steps is None else min(steps, train.max_steps)


def check_lengths(mixture: Mixture, train: TrainSettings) -> None:
    """Refuse a dataset with a row that no micro-batch has room for.

    Raises:
        UserError: such a row exists.
    """
    lengths_N = mixture.lengths
    row = int(lengths_N.argmax()) if len(mixture) else 0
    if len(mixture) and lengths_N[row] > train.context_slots:
        raise UserError(
            f"A sample must fit train.context_slots ({train.context_slots:,}), got {mixture.where(row)} "
            f"(data.dataset) with {lengths_N[row]:,} tokens. Raise train.context_slots or prepare shorter rows."
        )


def schedule(mixture: Mixture, data: DataSettings, train: TrainSettings, *, first_step: int = 0) -> Iterator[Cut]:
    """Yield the run's micro-batches in order, from an optimizer step on.

    A step is batches_per_step plan batches; an epoch's last may be less.
    """
    edges = mixture.edges(data)
    batches = batches_of_epochs(mixture, data, seed=train.seed, epochs=train.epochs)
    seq = count()
    step = 0  # the epoch's first
    for epoch, planned in enumerate(batches):
        behind = step + -(-planned // train.batches_per_step)
        if behind > first_step:
            cuts = cut_epoch(mixture, data, train, epoch=epoch, edges=edges)
            skipped = max(first_step - step, 0) * train.batches_per_step
            for index in range(int(np.searchsorted(cuts.batch_U, skipped)), len(cuts.batch_U)):
                now = step + int(cuts.batch_U[index]) // train.batches_per_step
                if train.max_steps is not None and now >= train.max_steps:
                    return
                per_step = train.batches_per_step
                yield cuts.cut(index, seq=next(seq), epoch=epoch, first_step=step, batches_per_step=per_step)
            del cuts  # before the next epoch is planned
        step = behind


def cut_epoch(
    mixture: Mixture, data: DataSettings, train: TrainSettings, *, epoch: int, edges: tuple[int, ...]
) -> EpochCuts:
    """Return an epoch's micro-batches: each batch cut, in its order, into the fewest runs that fit C and A."""
    made, held = plan_epoch(mixture, data, seed=train.seed, epoch=epoch, edges=edges)
    lengths_N = held.lengths()
    anchors_N = held.candidates(train.anchors_per_sample)
    starts, batch_U = cut_batches(lengths_N, anchors_N, made.offsets, train, made.rows_N)
    del anchors_N
    width_U = long_array(len(batch_U), np.min_scalar_type(-made.edges[-1] - ROUND))
    for first, behind in _together(starts):
        ordered_n = lengths_N[made.rows_N[starts[first] : starts[behind]]]
        bucket_u = made.bucket_M[batch_U[first:behind]]
        width_U[first:behind] = widths(made, ordered_n, starts[first : behind + 1] - starts[first], bucket_u)
    del lengths_N
    passes_N, rows_N = held.passes(made.rows_N), held.rows(made.rows_N)
    return EpochCuts(rows_N, passes_N, len(made), made.layout == "packed", starts, batch_U, width_U)


def cut_batches(
    lengths_N: Int[np.ndarray, " N"],
    anchors_N: Int[np.ndarray, " N"],
    offsets: Int[np.ndarray, " ends"],
    train: TrainSettings,
    rows_N: Int[np.ndarray, " N"] | None = None,
) -> tuple[Int[np.ndarray, " starts"], Int[np.ndarray, " U"]]:
    """Return where micro-batches start, and the end, and the batch of each. Every row fits alone.

    `rows_N` says whose length and anchors come where; without it they come as they lie.
    """
    count, done = int(offsets[-1]), 0
    starts, batch_U = long_array(count + 1), long_array(count)  # touched as far as cuts go
    for first, behind in _together(offsets):
        mine: slice | Int[np.ndarray, " n"] = slice(int(offsets[first]), int(offsets[behind]))
        if rows_N is not None:
            mine = rows_N[mine]
        ends = offsets[first : behind + 1] - offsets[first]
        start_u, batch_u = _cut_together(lengths_N[mine], anchors_N[mine], ends, train)
        span = slice(done, done + len(start_u))
        starts[span], batch_U[span] = start_u + offsets[first], batch_u + np.int32(first)
        done += len(start_u)
    starts[done] = count
    return starts[: done + 1], batch_U[:done]


def _together(offsets: Int[np.ndarray, " ends"]) -> Iterator[tuple[int, int]]:
    """Yield (first, behind) of as many runs of rows as have no more than PIECE of them together, one at least."""
    first, count = 0, len(offsets) - 1
    while first < count:
        behind = int(np.searchsorted(offsets, offsets[first] + PIECE, side="right")) - 1
        behind = max(behind, first + 1)
        yield first, behind
        first = behind


def _cut_together(
    lengths_n: Int[np.ndarray, " n"],
    anchors_n: Int[np.ndarray, " n"],
    offsets: Int[np.ndarray, " ends"],
    train: TrainSettings,
) -> tuple[Int[np.ndarray, " u"], Int[np.ndarray, " u"]]:
    """Return where micro-batches start and the batch of each: one round finds the next cut of every batch."""
    tokens = np.concatenate([[0], np.cumsum(lengths_n, dtype=np.int64)])  # before each row
    drawn = np.concatenate([[0], np.cumsum(anchors_n, dtype=np.int64)])
    at_M, batch_M = offsets[:-1], np.arange(len(offsets) - 1, dtype=np.int32)
    starts, batches = [], []
    while len(at_M):
        starts.append(at_M)
        batches.append(batch_M)
        by_tokens_M = np.searchsorted(tokens, tokens[at_M] + train.context_slots, side="right")
        by_anchors_M = np.searchsorted(drawn, drawn[at_M] + train.anchor_slots, side="right")
        next_M = np.minimum(by_tokens_M, by_anchors_M) - 1
        goes_on_M = next_M < offsets[batch_M + 1]
        at_M, batch_M = next_M[goes_on_M], batch_M[goes_on_M]
    start_U, batch_U = np.concatenate(starts), np.concatenate(batches)
    order_U = np.argsort(start_U, kind="stable")
    return start_U[order_U], batch_U[order_U]


def build(mixture: Mixture, cut: Cut, train: TrainSettings, block_size: int, *, pin: bool = False) -> TokenBatch:
    """Read the rows of a cut, draw their anchors and lay the samples end to end.

    Raises:
        RunError: a row holds an id that its dataset has not.
    """
    rows = [mixture.row(row) for row in cut.rows]
    lengths_n = np.array([len(ids) for ids, _ in rows])
    ends_n = np.cumsum(lengths_n)
    starts_n = ends_n - lengths_n
    ids_T = np.concatenate([ids for ids, _ in rows], dtype=np.int64, casting="same_kind")
    mask_T = np.concatenate([mask for _, mask in rows])
    largest_n = np.maximum.reduceat(ids_T.view(np.uint64), starts_n)  # a negative id is the largest of all
    if (largest_n > mixture.largest_ids(cut.rows).astype(np.uint64)).any():
        _check_ids(mixture, cut)

    # 1. The rows that the target computes.
    padded_RS = np.zeros((1 if cut.packed else len(rows), cut.width), dtype=np.int64)
    places_T = np.arange(len(ids_T))
    if not cut.packed:
        places_T += np.repeat(np.arange(len(rows)) * cut.width - starts_n, lengths_n)
    padded_RS.reshape(-1)[places_T] = ids_T

    # 2. The blocks of each sample.
    anchor_K, counts_n = _draw(mask_T, starts_n, ends_n, cut, train)
    start_K, end_K = np.repeat(starts_n, counts_n), np.repeat(ends_n, counts_n)
    labels_KB, valid_KB = blocks.block_labels(ids_T, mask_T, anchor_K, end_K, block_size)
    batch = TokenBatch(
        seq=cut.seq,
        epoch=cut.epoch,
        step=cut.step,
        closes_step=cut.closes_step,
        samples=cut.rows,
        input_ids=torch.from_numpy(padded_RS),
        lengths=tuple(lengths_n.tolist()),
        places_T=torch.from_numpy(places_T),
        blocks=BlockSet(
            start_K=torch.from_numpy(start_K),
            anchor_K=torch.from_numpy(anchor_K),
            position_K=torch.from_numpy(anchor_K - start_K),
            token_K=torch.from_numpy(ids_T[anchor_K]),
            labels_KB=torch.from_numpy(labels_KB),
            valid_KB=torch.from_numpy(valid_KB),
        ),
    )
    return _pinned(batch) if pin else batch


def _draw(
    mask_T: Bool[np.ndarray, " T"],
    starts_n: Int[np.ndarray, " n"],
    ends_n: Int[np.ndarray, " n"],
    cut: Cut,
    train: TrainSettings,
) -> tuple[Int[np.ndarray, " K"], Int[np.ndarray, " n"]]:
    """Return the flat places of all anchors and how many each sample has."""
    drawn = []
    for row, turn, start, end in zip(cut.rows, cut.passes, starts_n.tolist(), ends_n.tolist(), strict=True):
        candidates = blocks.anchor_candidates(mask_T[start:end])
        kept = blocks.sample_anchors(candidates, train.anchors_per_sample, seed=train.seed, epoch=turn, sample=row)
        kept += start
        drawn.append(kept)
    return np.concatenate(drawn), np.array([len(kept) for kept in drawn])


def _check_ids(mixture: Mixture, cut: Cut) -> None:
    for row in cut.rows:
        dataset, _ = mixture.find(row)
        ids, last = mixture.row(row)[0], dataset.manifest.largest_id
        wrong = ids[(ids < 0) | (ids > last)]
        if len(wrong):
            raise RunError(
                f"Token ids of {dataset.folder} lie in 0..{last:,} by its manifest, but {mixture.where(row)} holds "
                f"{wrong[0]:,}: the dataset is damaged. Look at it with `paceline prepare {dataset.folder} --verify`."
            )


def _pinned(batch: TokenBatch) -> TokenBatch:
    blockset = BlockSet(*(getattr(batch.blocks, field.name).pin_memory() for field in fields(BlockSet)))
    ids_RS, places_T = batch.input_ids.pin_memory(), batch.places_T.pin_memory()
    return replace(batch, input_ids=ids_RS, places_T=places_T, blocks=blockset)
