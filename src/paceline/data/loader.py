"""Plan and datasets to micro-batches: the one shape of C context slots and A anchors that the drafter sees.

What is in a micro-batch follows from the rows' lengths and candidates alone (`schedule`); tokens are read only when it
is built. Anchors depend on (seed, pass, row), so a sample brings the same blocks whatever batch it is in.

Shapes: n samples of a micro-batch, R rows that the target computes, S padded length, T real tokens, K anchors, B slots
of a block, M batches and U micro-batches of an epoch, N rows of an epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int

from paceline import blocks
from paceline.config import DataSettings, TrainSettings
from paceline.data.arrays import PIECE, Marks
from paceline.data.mixture import Mixture, batches_of_epochs, plan_epoch
from paceline.data.plan import Plan, width, widths
from paceline.data.set_aside import BadRow, SetAside, fault_when_read
from paceline.data.store import CompletionDataset
from paceline.records import BlockSet, TokenBatch, UserError

OnBad = Callable[[CompletionDataset, BadRow], None]
# Lengths and anchors of the epoch's rows from one up to another.
Told = Callable[[int, int], tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]

_SPREAD = 1 << 10  # rows whose marks are spread out at a time


@dataclass(frozen=True, slots=True)
class Cut:
    """A micro-batch before its tokens are read: its place in the run, its rows and how the target gets them."""

    seq: int
    epoch: int
    step: int
    closes_step: bool
    rows: tuple[int, ...]
    passes: tuple[int, ...]  # over its dataset that each row belongs to
    layout: str
    edges: tuple[int, ...]  # of the length buckets; packed: the token budget


class Run(NamedTuple):
    """Which rows of an epoch a micro-batch holds."""

    batch: int  # of the plan
    start: int
    behind: int
    closes_batch: bool


@dataclass(frozen=True, slots=True, eq=False)
class EpochCuts:
    """The micro-batches of an epoch, in order.

    It stays while its epoch is read, so it keeps no more of a row than four bytes, and one more where passes differ. A
    micro-batch may be one long row: all that is kept of it is a bit of its last row. Widths follow from lengths, which
    are known once tokens are read.
    """

    rows_N: Int[np.ndarray, " N"]  # numbered through all datasets
    passes_N: Int[np.ndarray, " N"]
    cut_ends: Marks  # rows that end a micro-batch
    batch_ends: Marks  # rows that end a batch of the plan
    batches: int
    layout: str
    edges: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[Int[np.ndarray, " ends"], Int[np.ndarray, " u"], Bool[np.ndarray, " u"]]]:
        """Yield of some micro-batches at a time where they start, and the end, their batches and who closes one."""
        start = batch = 0
        for first in range(0, len(self.rows_N), _SPREAD):
            behind = min(first + _SPREAD, len(self.rows_N))
            ends_u = np.flatnonzero(self.cut_ends.between(first, behind))
            if len(ends_u):
                closes_u = self.batch_ends.between(first, behind)[ends_u]
                batch_u = batch + np.cumsum(closes_u) - closes_u
                yield np.concatenate([[start], ends_u + (first + 1)]), batch_u, closes_u
                start, batch = first + int(ends_u[-1]) + 1, int(batch_u[-1]) + int(closes_u[-1])

    def runs(self, skipped: int) -> Iterator[Run]:
        """Yield the micro-batches from a batch of the plan on."""
        for starts, batch_u, closes_u in self.pieces():
            if batch_u[-1] >= skipped:
                ends = starts.tolist()
                runs = map(Run, batch_u.tolist(), ends, ends[1:], closes_u.tolist())
                yield from (run for run in runs if run.batch >= skipped)

    def largest(self, lengths_N: Int[np.ndarray, " N"]) -> Run:
        """Return the first of those for which the target computes the most tokens, padding included."""
        most, found = -1, None
        for starts, batch_u, closes_u in self.pieces():
            ordered_n = lengths_N[self.rows_N[starts[0] : starts[-1]]]
            cells_u = widths(self.layout, self.edges, ordered_n, starts - starts[0])
            cells_u = cells_u if self.layout == "packed" else cells_u * np.diff(starts)
            at = int(cells_u.argmax())
            if cells_u[at] > most:
                most = int(cells_u[at])
                found = Run(int(batch_u[at]), int(starts[at]), int(starts[at + 1]), bool(closes_u[at]))
        assert found is not None, "a plan has rows"
        return found

    def cut(self, run: Run, *, seq: int, epoch: int, first_step: int, batches_per_step: int) -> Cut:
        """Return a micro-batch of the epoch whose first optimizer step is `first_step`."""
        behind = run.batch + 1
        return Cut(
            seq=seq,
            epoch=epoch,
            step=first_step + run.batch // batches_per_step,
            closes_step=run.closes_batch and (behind % batches_per_step == 0 or behind == self.batches),
            rows=tuple(self.rows_N[run.start : run.behind].tolist()),
            passes=tuple(self.passes_N[run.start : run.behind].tolist()),
            layout=self.layout,
            edges=self.edges,
        )


def micro_batches(
    mixture: Mixture,
    data: DataSettings,
    train: TrainSettings,
    block_size: int,
    *,
    first_step: int = 0,
    pin: bool = False,
    set_aside: SetAside | None = None,
) -> Iterator[TokenBatch]:
    """Return the run's stream of micro-batches: all epochs, or up to train.max_steps.

    From optimizer step `first_step` on it is what a run from the start would see there, but that `seq` counts from 0;
    no row before it is read. `pin` puts the tensors where a CUDA device copies from while the host goes on. Rows that
    turn out to be bad go to `set_aside`.

    Raises:
        UserError: a row does not fit train.context_slots (before the first micro-batch), or see plan.
        RunError: while it is read: more than data.bad_rows of a dataset's rows are bad.
    """
    check_lengths(mixture, train)
    cuts = schedule(mixture, data, train, first_step=first_step)
    aside = SetAside(data.bad_rows) if set_aside is None else set_aside
    return (build(mixture, cut, train, block_size, pin=pin, on_bad=aside.add) for cut in cuts)


def largest_micro_batch(mixture: Mixture, data: DataSettings, train: TrainSettings, block_size: int) -> TokenBatch:
    """Return the first epoch's micro-batch with the most padded tokens, to rehearse the start-up with.

    Raises:
        UserError: as micro_batches.
    """
    check_lengths(mixture, train)
    cuts = cut_epoch(mixture, data, train, epoch=0, edges=mixture.edges(data))
    largest = cuts.largest(mixture.lengths)
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


def check_lengths(mixture: Mixture, train: TrainSettings, *, key: str = "data.dataset") -> None:
    """Refuse a dataset, named by the setting `key`, with a row that no micro-batch has room for.

    Raises:
        UserError: such a row exists.
    """
    lengths_N = mixture.lengths
    row = int(lengths_N.argmax()) if len(mixture) else 0
    if len(mixture) and lengths_N[row] > train.context_slots:
        raise UserError(
            f"A sample must fit train.context_slots ({train.context_slots:,}), got {mixture.where(row)} "
            f"({key}) with {lengths_N[row]:,} tokens. Raise train.context_slots or prepare shorter rows."
        )


def schedule(mixture: Mixture, data: DataSettings, train: TrainSettings, *, first_step: int = 0) -> Iterator[Cut]:
    """Yield the run's micro-batches in order, from an optimizer step on.

    A step is batches_per_step plan batches; an epoch's last may be less.
    """
    edges = mixture.edges(data)
    batches = batches_of_epochs(mixture, data, seed=train.seed, epochs=train.epochs)
    seq = count()
    step = 0  # the epoch's first
    per_step = train.batches_per_step
    for epoch, planned in enumerate(batches):
        behind = step + -(-planned // per_step)
        if behind > first_step:
            cuts = cut_epoch(mixture, data, train, epoch=epoch, edges=edges)
            for run in cuts.runs(max(first_step - step, 0) * per_step):
                if train.max_steps is not None and step + run.batch // per_step >= train.max_steps:
                    return
                yield cuts.cut(run, seq=next(seq), epoch=epoch, first_step=step, batches_per_step=per_step)
            del cuts  # before the next epoch is planned
        step = behind


def cut_epoch(
    mixture: Mixture, data: DataSettings, train: TrainSettings, *, epoch: int, edges: tuple[int, ...]
) -> EpochCuts:
    """Return an epoch's micro-batches: each batch cut, in its order, into the fewest runs that fit C and A."""
    made, held = plan_epoch(mixture, data, seed=train.seed, epoch=epoch, edges=edges)
    lengths_N = held.lengths()

    def told(first: int, behind: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        places_n = made.rows_N[first:behind]
        return lengths_N[places_n], held.candidates(places_n, train.anchors_per_sample)

    cut_ends, batch_ends = cut_plan(made, told, train)
    del lengths_N
    passes_N, rows_N = held.passes(made.rows_N), held.rows(made.rows_N)
    return EpochCuts(rows_N, passes_N, cut_ends, batch_ends, len(made), made.layout, made.edges)


def cut_plan(made: Plan, told: Told, train: TrainSettings) -> tuple[Marks, Marks]:
    """Return which of a plan's rows, in their order, end a micro-batch, and which a batch."""
    cut_ends, batch_ends = Marks(len(made.rows_N)), Marks(len(made.rows_N))
    for ends_u in cut_batches(told, made.offsets, train):
        cut_ends.set(ends_u - 1)
    for first, behind in _together(made.offsets):
        batch_ends.set(made.offsets[first + 1 : behind + 1] - 1)
    return cut_ends, batch_ends


def cut_batches(told: Told, offsets: Int[np.ndarray, " ends"], train: TrainSettings) -> Iterator[Int[np.ndarray, " u"]]:
    """Yield where micro-batches end, those of some batches at a time. Every row fits alone."""
    for first, behind in _together(offsets):
        ends = offsets[first : behind + 1] - offsets[first]
        lengths_n, anchors_n = told(int(offsets[first]), int(offsets[behind]))
        yield _cut_together(lengths_n, anchors_n, ends, train) + offsets[first]


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
) -> Int[np.ndarray, " u"]:
    """Return where micro-batches end: one round finds the next cut of every batch."""
    tokens = np.concatenate([[0], np.cumsum(lengths_n, dtype=np.int64)])  # before each row
    drawn = np.concatenate([[0], np.cumsum(anchors_n, dtype=np.int64)])
    at_M, end_M = offsets[:-1], offsets[1:]
    ends = []
    while len(at_M):
        by_tokens_M = np.searchsorted(tokens, tokens[at_M] + train.context_slots, side="right")
        by_anchors_M = np.searchsorted(drawn, drawn[at_M] + train.anchor_slots, side="right")
        next_M = np.minimum(np.minimum(by_tokens_M, by_anchors_M) - 1, end_M)
        ends.append(next_M)
        goes_on_M = next_M < end_M
        at_M, end_M = next_M[goes_on_M], end_M[goes_on_M]
    return np.sort(np.concatenate(ends))


def build(
    mixture: Mixture,
    cut: Cut,
    train: TrainSettings,
    block_size: int,
    *,
    pin: bool = False,
    on_bad: OnBad = lambda dataset, bad: None,
) -> TokenBatch:
    """Read the rows of a cut, draw their anchors and lay the samples end to end.

    A row with ids that it may not have, or with another loss mask than the one that was counted, goes to `on_bad`; it
    stays as long as it is, with ids 0 and no anchors.
    """
    rows = [mixture.row(row) for row in cut.rows]
    lengths_n = np.array([len(ids) for ids, _ in rows])
    ends_n = np.cumsum(lengths_n)
    starts_n = ends_n - lengths_n
    ids_T = np.concatenate([ids for ids, _ in rows], dtype=np.int64, casting="same_kind")
    mask_T = np.concatenate([mask for _, mask in rows])
    largest_n = np.maximum.reduceat(ids_T.view(np.uint64), starts_n)  # a negative id is the largest of all
    last_n = mixture.largest_ids(cut.rows)
    wrong_n = largest_n > last_n.astype(np.uint64)
    wrong_n |= _anchors_of(mask_T, starts_n, ends_n) != mixture.candidates_of(cut.rows)
    for place in np.flatnonzero(wrong_n).tolist():
        mine = slice(int(starts_n[place]), int(ends_n[place]))
        dataset, row = mixture.find(cut.rows[place])
        on_bad(dataset, fault_when_read(dataset, row, int(last_n[place])))
        ids_T[mine], mask_T[mine] = 0, False

    # 1. The rows that the target computes.
    lengths, packed = lengths_n.tolist(), cut.layout == "packed"
    padded = width(cut.layout, cut.edges, lengths)
    padded_RS = np.zeros((1 if packed else len(rows), padded), dtype=np.int64)
    places_T = np.arange(len(ids_T))
    if not packed:
        places_T += np.repeat(np.arange(len(rows)) * padded - starts_n, lengths_n)
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
        lengths=tuple(lengths),
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


def _anchors_of(
    mask_T: Bool[np.ndarray, " T"], starts_n: Int[np.ndarray, " n"], ends_n: Int[np.ndarray, " n"]
) -> Int[np.ndarray, " n"]:
    """Return how many positions of each sample may be anchors."""
    pairs_T = mask_T.copy()
    pairs_T[:-1] &= mask_T[1:]
    pairs_T[ends_n - 1] = False  # a sample's last token is followed by none of its own
    return np.add.reduceat(pairs_T, starts_n, dtype=np.int64)


def _pinned(batch: TokenBatch) -> TokenBatch:
    blockset = BlockSet(*(getattr(batch.blocks, field.name).pin_memory() for field in fields(BlockSet)))
    ids_RS, places_T = batch.input_ids.pin_memory(), batch.places_T.pin_memory()
    return replace(batch, input_ids=ids_RS, places_T=places_T, blocks=blockset)
