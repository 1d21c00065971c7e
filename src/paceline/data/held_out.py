"""Held-out completions as micro-batches, which come into the stream behind the steps after which they are looked at.

They are the same each time: the first rows of the dataset that bring anchors, planned as an epoch of training data is,
with anchors that depend on the row alone. Not even on train.seed, so that losses of several runs on the same rows can
be compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from paceline.config import DataSettings, EvaluateSettings, TrainSettings
from paceline.data import loader
from paceline.data.loader import EpochCuts, OnBad, Run, build, cut_plan
from paceline.data.mixture import Mixture
from paceline.data.plan import check_lengths, plan
from paceline.data.set_aside import check_anchors
from paceline.data.store import CompletionDataset, open_dataset
from paceline.records import TokenBatch, UserError

_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """The held-out rows that are looked at, cut into micro-batches of the run's one shape."""

    mixture: Mixture  # of their dataset alone
    cuts: EpochCuts
    first_row: int  # what the first of them is numbered in a micro-batch: behind all training rows
    train: TrainSettings
    block_size: int

    @property
    def dataset(self) -> CompletionDataset:
        """The dataset that the rows are from."""
        return self.mixture.datasets[0]

    @property
    def rows(self) -> int:
        """How many rows are looked at."""
        return len(self.cuts.rows_N)

    def largest(self) -> TokenBatch:
        """Return the micro-batch with the most padded tokens."""
        largest = self.cuts.largest(self.dataset.lengths)
        return self._build(largest, seq=0, epoch=0, step=0)

    def micro_batches(
        self, step: int, *, epoch: int = 0, pin: bool = False, on_bad: OnBad = lambda dataset, bad: None
    ) -> Iterator[TokenBatch]:
        """Yield all of them, as of optimizer step `step`, which they follow; their `seq` count from 0.

        `on_bad`: see build.
        """
        for seq, run in enumerate(self.cuts.runs(0)):
            yield self._build(run, seq=seq, epoch=epoch, step=step, pin=pin, on_bad=on_bad)

    def _build(self, run: Run, *, seq: int, epoch: int, step: int, **how: Any) -> TokenBatch:
        cut = self.cuts.cut(run, seq=seq, epoch=epoch, first_step=step, batches_per_step=self.cuts.batches)
        batch = build(self.mixture, cut, self.train, self.block_size, **how)
        return replace(batch, samples=tuple(self.first_row + row for row in cut.rows), held_out=True)


def open_held_out(
    evaluate: EvaluateSettings,
    data: DataSettings,
    train: TrainSettings,
    block_size: int,
    *,
    first_row: int,
    vocab_size: int | None = None,
) -> HeldOut | None:
    """Return the held-out rows of evaluate.held_out, or None without one. `first_row`: see HeldOut.

    Raises:
        UserError: the folder holds no dataset, none with rows, or one with a row that no micro-batch has room for or
            with more than data.bad_rows of them without anchors.
    """
    if evaluate.held_out is None:
        return None
    dataset = open_dataset(Path(evaluate.held_out))
    if not len(dataset):
        raise UserError(f"Dataset {dataset.folder} (evaluate.held_out) has no rows. Prepare one that has.")
    mixture, train = Mixture([dataset], vocab_size=vocab_size), train.model_copy(update={"seed": _SEED})
    check_anchors(dataset, mixture.left_out[0], data.bad_rows)
    loader.check_lengths(mixture, train, key="evaluate.held_out")
    held = mixture.epoch_rows(_SEED, 0)  # all that are not left out, in their order
    lengths_N = held.lengths()[: evaluate.max_rows]
    # data.edges were written by hand for the training rows, and may end before the longest of these.
    settings = data.model_copy(update={"dataset": evaluate.held_out, "weights": None, "edges": None})
    edges = check_lengths(
        lengths_N, settings, None, where=lambda place: mixture.where(int(held.rows(np.array([place]))[0]))
    )
    made = plan(lengths_N, settings, seed=_SEED, epoch=0, edges=edges)

    def told(first: int, behind: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        places_n = made.rows_N[first:behind]
        return lengths_N[places_n], held.candidates(places_n, train.anchors_per_sample)

    marks = cut_plan(made, told, train)
    passes_N, rows_N = held.passes(made.rows_N), held.rows(made.rows_N)
    cuts = EpochCuts(rows_N, passes_N, *marks, len(made), made.layout, made.edges)
    return HeldOut(mixture, cuts, first_row, train, block_size)


def with_held_out(
    batches: Iterator[TokenBatch],
    held_out: HeldOut | None,
    due: Callable[[int], bool],
    *,
    owed: int | None = None,
    pin: bool = False,
    on_bad: OnBad = lambda dataset, bad: None,
) -> Iterator[TokenBatch]:
    """Pass the run's micro-batches on, and after each step that `due` says, given how many are done, all held-out ones.

    After `owed` steps, which are done before the first of `batches`, they were due and not looked at: they come first.
    `seq` is numbered anew, through both. Held-out rows that turn out to be bad go to `on_bad` (see loader.build).
    """
    if held_out is None:
        yield from batches
        return
    seq = count()
    if owed is not None:
        others = held_out.micro_batches(owed - 1, pin=pin, on_bad=on_bad)
        yield from (replace(other, seq=next(seq)) for other in others)
    for batch in batches:
        yield replace(batch, seq=next(seq))
        if batch.closes_step and due(batch.step + 1):
            others = held_out.micro_batches(batch.step, epoch=batch.epoch, pin=pin, on_bad=on_bad)
            yield from (replace(other, seq=next(seq)) for other in others)
