"""Several datasets as one: rows numbered through, and which of them an epoch holds. Free of torch.

A weight is how many passes over its dataset an epoch takes. A dataset's passes, each in an order of its own, make an
endless stream, and epoch e takes its places floor(e*w*N) up to floor((e+1)*w*N): 0.5 takes one half of the rows and
then the other, 2 takes every row twice with anchors of its own for either pass.

Shapes: N rows of all datasets, R rows of an epoch, L lengths from 0 up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from paceline.config import DataSettings
from paceline.data.arrays import histogram, long_array, pick
from paceline.data.plan import BucketTable, Plan, check_lengths, count_batches, optimal_edges, plan, shuffled, table
from paceline.data.store import CompletionDataset, open_dataset
from paceline.records import UserError

_PASSES = 2**64 - 3  # second word of the Philox key, see plan.py


@dataclass(frozen=True, slots=True, eq=False)
class EpochRows:
    """What an epoch holds: rows, numbered through all datasets, and which pass over its dataset each belongs to."""

    rows_R: Int[np.ndarray, " R"]
    passes_R: Int[np.ndarray, " R"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the positions that may be anchors are drawn."""

    candidates: int  # of all rows
    epoch_share: float  # of an epoch's candidates
    run_share: float  # of all candidates, expected at the end of the run


class Mixture:
    """Datasets with weights. Reading rows from several threads at once is safe: nothing in it changes."""

    def __init__(self, datasets: Sequence[CompletionDataset], weights: Sequence[float] | None = None) -> None:
        """Number the rows through; no row is read."""
        self.datasets = tuple(datasets)
        # As written in decimal: 0.3 is three tenths, not the nearest binary fraction.
        self.weights = tuple(Fraction(repr(float(weight))) for weight in weights or [1.0] * len(self.datasets))
        self.whole = all(weight.denominator == 1 for weight in self.weights)
        self.first_rows = np.cumsum([0, *map(len, self.datasets)])

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @property
    def lengths(self) -> Int[np.ndarray, " N"]:
        """Tokens of each row, put together anew from the mapped files."""
        return _joined([dataset.lengths for dataset in self.datasets])

    @property
    def candidates(self) -> Int[np.ndarray, " N"]:
        """How many positions of each row may be anchors, put together anew as well."""
        return _joined([dataset.candidates for dataset in self.datasets])

    def row(self, index: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return a row's ids, which may be a view of the file, and its loss mask."""
        dataset, row = self.find(index)
        return dataset.row(row)

    def find(self, index: int) -> tuple[CompletionDataset, int]:
        """Return the dataset of a row and its number there."""
        if len(self.datasets) == 1:
            return self.datasets[0], index
        place = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        return self.datasets[place], index - int(self.first_rows[place])

    def largest_ids(self, rows: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Return the largest id that the dataset of each row holds by its manifest."""
        last = np.array([dataset.manifest.largest_id for dataset in self.datasets], dtype=np.int64)
        return last[np.searchsorted(self.first_rows, rows, side="right") - 1]

    def where(self, index: int) -> str:
        """Return a row's place for a message."""
        dataset, row = self.find(index)
        return f"row {row:,} of {dataset.folder}"

    def edges(self, settings: DataSettings) -> tuple[int, ...]:
        """Return the bucket edges of every epoch: the hand-written ones, or the best for the rows at their weights.

        Raises:
            UserError: see plan.
        """
        edges, several, lengths_N = settings.edges, len(self.datasets) > 1, self.lengths
        if settings.layout != "packed" and not edges and len(self):
            counts_L: Int[np.ndarray, " L"] | Float[np.ndarray, " L"] = histogram(lengths_N)
            if several:  # not whole multiples of all denominators: with long decimals they exceed 64 bits
                counts_L = np.zeros(len(counts_L))
                for dataset, weight in zip(self.datasets, self.weights, strict=True):
                    own_L = histogram(dataset.lengths)
                    counts_L[: len(own_L)] += own_L * float(weight)
            edges = optimal_edges(counts_L, settings.buckets, settings.align)
        return check_lengths(lengths_N, settings, edges, where=self.where if several else "row {:,}".format)

    def rows_of_epoch(self, epoch: int) -> list[int]:
        """Return how many rows of each dataset an epoch holds."""
        ends = (_places(len(d), weight, epoch) for d, weight in zip(self.datasets, self.weights, strict=True))
        return [end - place for place, end in ends]

    def epoch_rows(self, seed: int, epoch: int) -> EpochRows:
        """Return the rows of an epoch in an order that is no order to train in: a plan draws that.

        Raises:
            UserError: the weights are so small that the epoch would hold none.
        """
        held, done = sum(self.rows_of_epoch(epoch)), 0
        rows_R, turns = long_array(held), []
        for index, (dataset, weight) in enumerate(zip(self.datasets, self.weights, strict=True)):
            count, first = len(dataset), np.int32(self.first_rows[index])
            place, end = _places(count, weight, epoch)
            while place < end:
                turn, start = divmod(place, count)
                stop = min(count, start + end - place)
                whole = stop - start == count  # then the order of the pass does not matter
                mine_r = rows_R[done : done + stop - start]
                if whole:
                    mine_r[:] = 1
                    mine_r[0] = first
                    np.cumsum(mine_r, dtype=np.int32, out=mine_r)
                else:
                    np.add(shuffled(count, seed, _PASSES, turn, index)[start:stop], first, out=mine_r)
                turns.append((turn, stop - start))
                place, done = place + stop - start, done + stop - start
        if not held and len(self):
            raise UserError(
                f"data.weights must give every epoch a row, got {[float(weight) for weight in self.weights]}, and "
                f"epoch {epoch} would hold none of the {len(self):,} rows. Raise them."
            )
        return EpochRows(rows_R, _passes(turns))


def _passes(turns: Sequence[tuple[int, int]]) -> Int[np.ndarray, " R"]:
    """Return the passes that so many rows each belong to; where it is one pass, all rows share its number."""
    numbers = np.array([turn for turn, _ in turns], dtype=np.int32)
    sizes = [size for _, size in turns]
    if len(set(numbers.tolist())) == 1:
        return np.broadcast_to(numbers[0], sum(sizes))
    return np.repeat(numbers, sizes)


def _joined(parts: Sequence[Int[np.ndarray, " _"]]) -> Int[np.ndarray, " N"]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _places(count: int, weight: Fraction, epoch: int) -> tuple[int, int]:
    """Return where an epoch begins in the stream of a dataset's passes, and where it ends."""
    return floor(epoch * weight * count), floor((epoch + 1) * weight * count)


def open_mixture(settings: DataSettings) -> Mixture:
    """Return the datasets of data.dataset at the weights of data.weights.

    Raises:
        UserError: a folder holds no dataset, or a damaged one.
    """
    return Mixture([open_dataset(Path(folder)) for folder in settings.folders], settings.weights)


def plan_epoch(
    mixture: Mixture, settings: DataSettings, *, seed: int, epoch: int, edges: tuple[int, ...]
) -> tuple[Plan, EpochRows]:
    """Return an epoch's batches, whose rows are places in the epoch's rows, and these; `edges` are the mixture's.

    Raises:
        UserError: see plan and epoch_rows.
    """
    held = mixture.epoch_rows(seed, epoch)
    return plan(pick(mixture.lengths, held.rows_R), settings, seed=seed, epoch=epoch, edges=edges), held


def first_table(mixture: Mixture, settings: DataSettings, *, seed: int) -> BucketTable:
    """Return what the first epoch looks like.

    Raises:
        UserError: see plan and epoch_rows.
    """
    made, held = plan_epoch(mixture, settings, seed=seed, epoch=0, edges=mixture.edges(settings))
    return table(made, pick(mixture.lengths, held.rows_R))


def batches_of_epochs(mixture: Mixture, settings: DataSettings, *, seed: int, epochs: int) -> list[int]:
    """Return how many batches each epoch has.

    Raises:
        UserError: see plan and epoch_rows.
    """
    edges = mixture.edges(settings)
    counts, lengths_N = [], mixture.lengths
    for epoch in range(1 if mixture.whole else epochs):
        rows_R = mixture.epoch_rows(seed, epoch).rows_R
        counts.append(count_batches(pick(lengths_N, rows_R), settings, edges))
    return counts * epochs if mixture.whole else counts


def coverage(mixture: Mixture, *, anchors_per_sample: int, epochs: int) -> Coverage:
    """Return the share of anchor candidates that an epoch draws, and that the whole run does.

    A row of n candidates draws k of them in a pass, so a candidate is never drawn in p passes with chance (1 - k/n)^p.
    """
    candidates, drawn, candidates_drawn, hit = 0, 0.0, 0.0, 0.0
    for dataset, weight in zip(mixture.datasets, mixture.weights, strict=True):
        counts = histogram(dataset.candidates)
        sizes = np.flatnonzero(counts[1:]) + 1
        held, taken = counts[sizes] * sizes, counts[sizes] * np.minimum(sizes, anchors_per_sample)
        missed = (1 - taken / held) ** float(weight * epochs)
        candidates += int(held.sum())
        candidates_drawn += float(weight) * held.sum()
        drawn += float(weight) * taken.sum()
        hit += float((held * (1 - missed)).sum())
    return Coverage(candidates, drawn / max(candidates_drawn, 1e-9), hit / max(candidates, 1))
