"""Held-out completions as micro-batches, which come into the stream behind the steps after which they are looked at.

They are the same each time: the first rows of the dataset, planned as an epoch of training data is, with anchors that
depend on the row alone. Not even on train.seed, so that losses of several runs on the same rows can be compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
from jaxtyping import Int

from paceline.config import DataSettings, EvaluateSettings, TrainSettings
from paceline.data import loader
from paceline.data.loader import EpochCuts, Run, build, cut_plan
from paceline.data.mixture import Mixture
from paceline.data.plan import check_lengths, plan
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
        return self._build(largest, seq=0, epoch=0, step=0, pin=False)

    def micro_batches(self, after: TokenBatch, *, pin: bool = False) -> Iterator[TokenBatch]:
        """Yield all of them, of the step that `after` closes; their `seq` count from 0.

        Raises:
            RunError: a row holds an id that the dataset has not.
        """
        for seq, run in enumerate(self.cuts.runs(0)):
            yield self._build(run, seq=seq, epoch=after.epoch, step=after.step, pin=pin)

    def _build(self, run: Run, *, seq: int, epoch: int, step: int, pin: bool) -> TokenBatch:
        cut = self.cuts.cut(run, seq=seq, epoch=epoch, first_step=step, batches_per_step=self.cuts.batches)
        batch = build(self.mixture, cut, self.train, self.block_size, pin=pin)
        return replace(batch, samples=tuple(self.first_row + row for row in cut.rows), held_out=True)


def open_held_out(
    evaluate: EvaluateSettings, data: DataSettings, train: TrainSettings, block_size: int, *, first_row: int
) -> HeldOut | None:
    """Return the held-out rows of evaluate.held_out, or None without one. `first_row`: see HeldOut.

    Raises:
        UserError: the folder holds no dataset, none with rows, or one with a row that no micro-batch has room for.
    """
    if evaluate.held_out is None:
        return None
    dataset = open_dataset(Path(evaluate.held_out))
    if not len(dataset):
        raise UserError(f"Dataset {dataset.folder} (evaluate.held_out) has no rows. Prepare one that has.")
    mixture, train = Mixture([dataset]), train.model_copy(update={"seed": _SEED})
    loader.check_lengths(mixture, train, key="evaluate.held_out")
    lengths_N = dataset.lengths[: evaluate.max_rows]
    # data.edges were written by hand for the training rows, and may end before the longest of these.
    settings = data.model_copy(update={"dataset": evaluate.held_out, "weights": None, "edges": None})
    edges = check_lengths(lengths_N, settings, None, where=mixture.where)
    made = plan(lengths_N, settings, seed=_SEED, epoch=0, edges=edges)
    anchors_N = np.minimum(dataset.candidates[: evaluate.max_rows], train.anchors_per_sample)

    def told(first: int, behind: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        places_n = made.rows_N[first:behind]
        return lengths_N[places_n], anchors_N[places_n]

    first_pass_N = np.broadcast_to(np.int8(0), len(lengths_N))
    cuts = EpochCuts(made.rows_N, first_pass_N, *cut_plan(made, told, train), len(made), made.layout, made.edges)
    return HeldOut(mixture, cuts, first_row, train, block_size)


def with_held_out(
    batches: Iterator[TokenBatch], held_out: HeldOut | None, due: Callable[[int], bool], *, pin: bool = False
) -> Iterator[TokenBatch]:
    """Pass the run's micro-batches on, and after each step that `due` says, given how many are done, all held-out ones.

    `seq` is numbered anew, through both.
    """
    if held_out is None:
        yield from batches
        return
    seq = count()
    for batch in batches:
        yield replace(batch, seq=next(seq))
        if batch.closes_step and due(batch.step + 1):
            yield from (replace(other, seq=next(seq)) for other in held_out.micro_batches(batch, pin=pin))
