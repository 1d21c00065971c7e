"""Several datasets as one: rows numbered through, and which of them an epoch holds. Free of torch.

A weight is how many passes over its dataset an epoch takes. A dataset's passes, each in an order of its own, make an
endless stream, and epoch e takes its places floor(e*w*N) up to floor((e+1)*w*N): 0.5 takes one half of the rows and
then the other, 2 takes every row twice with anchors of its own for either pass. Rows without anchors are numbered with
the others and taken by none (set_aside.py).

Shapes: N rows of all datasets, R rows of an epoch, L lengths from 0 up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import floor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from paceline.config import DataSettings
from paceline.data.arrays import PIECE, histogram, joined, long_array
from paceline.data.plan import BucketTable, Plan, check_lengths, count_batches, optimal_edges, plan, table
from paceline.data.plan_order import shuffled_parts
from paceline.data.set_aside import BadRow, check_anchors, fault_without_anchors, without_anchors
from paceline.data.store import CompletionDataset, open_dataset
from paceline.records import UserError, many

_PASSES = 2**64 - 3  # second word of the Philox key, see plan.py


class Stretch(NamedTuple):
    """Rows that an epoch takes from one pass over a dataset: all of them, whose order does not matter, or these.

    None of them is left out.
    """

    dataset: int
    turn: int  # which pass it is
    size: int
    rows_n: Int[np.ndarray, " n"] | None  # numbered in the dataset; None: all that are not left out


class EpochRows:
    """What an epoch holds: stretches one behind the other, in an order that is no order to train in.

    Places count through all of them, rows through all datasets.
    """

    def __init__(self, mixture: "Mixture", stretches: Sequence[Stretch]) -> None:
        """Keep the stretches; what is told of a place is worked out when it is asked for."""
        self._mixture = mixture
        self._stretches = stretches
        self._ends = np.cumsum([stretch.size for stretch in stretches], dtype=np.int64)
        self._turns = np.array([stretch.turn for stretch in stretches])
        self._turns = self._turns.astype(np.min_scalar_type(-1 - self._turns.max(initial=0)))
        self.one_pass = len(set(self._turns.tolist())) == 1

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def lengths(self) -> Int[np.ndarray, " R"]:
        """Return the tokens of each place, put together anew."""

        def parts() -> Iterator[Int[np.ndarray, " n"]]:
            for stretch in self._stretches:
                dataset = self._mixture.datasets[stretch.dataset]
                if stretch.rows_n is None:
                    yield from _without(dataset.length_parts(), self._mixture.left_out[stretch.dataset])
                    continue
                lengths_N = joined(dataset.length_parts)
                for at in range(0, stretch.size, PIECE):
                    yield lengths_N[stretch.rows_n[at : at + PIECE]]

        return joined(parts)

    def candidates(self, places_n: Int[np.ndarray, " n"], most: int) -> Int[np.ndarray, " n"]:
        """Return how many anchors these places draw, `most` at most.

        They are read from the files a piece at a time: whoever has lengths and rows at hand, as cutting has, holds no
        third array of all rows.
        """
        stretch_n, rows_n = self._found(places_n)
        counts_n = np.empty(len(places_n), dtype=np.int64)
        for index in np.flatnonzero(np.bincount(stretch_n)).tolist():
            mine_n = stretch_n == index
            dataset = self._mixture.datasets[self._stretches[index].dataset]
            counts_n[mine_n] = np.minimum(dataset.candidates_of(rows_n[mine_n]), most)
        return counts_n

    def rows(self, places_R: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
        """Turn places into rows, in their own array."""
        firsts = self._mixture.first_rows[[stretch.dataset for stretch in self._stretches]]
        for at in range(0, len(places_R), PIECE):
            stretch_n, rows_n = self._found(places_R[at : at + PIECE])
            places_R[at : at + PIECE] = rows_n + firsts[stretch_n]
        return places_R

    def passes(self, places_R: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
        """Return which pass over its dataset each place belongs to; where it is one pass, all share its number."""
        if self.one_pass:
            return np.broadcast_to(self._turns[0], len(places_R))
        passes_R = long_array(len(places_R), self._turns.dtype)
        for at in range(0, len(places_R), PIECE):
            places_n = places_R[at : at + PIECE]
            passes_R[at : at + PIECE] = self._turns[np.searchsorted(self._ends, places_n, side="right")]
        return passes_R

    def _found(self, places_n: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return the stretch of each place and its row, numbered in its dataset."""
        stretch_n = np.searchsorted(self._ends, places_n, side="right")
        rows_n = places_n - (self._ends - [stretch.size for stretch in self._stretches])[stretch_n]
        for index, stretch in enumerate(self._stretches):
            left_n = self._mixture.left_out[stretch.dataset]
            if stretch.rows_n is not None:
                mine_n = stretch_n == index
                rows_n[mine_n] = stretch.rows_n[rows_n[mine_n]]
            elif len(left_n):  # each comes behind as many that are left out as lie before it
                mine_n = stretch_n == index
                rows_n[mine_n] += np.searchsorted(left_n - np.arange(len(left_n)), rows_n[mine_n], side="right")
        return stretch_n, rows_n


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the positions that may be anchors are drawn."""

    candidates: int  # of all rows
    epoch_share: float  # of an epoch's candidates
    run_share: float  # of all candidates, expected at the end of the run


class Mixture:
    """Datasets with weights. Reading rows from several threads at once is safe: nothing in it changes."""

    def __init__(
        self,
        datasets: Sequence[CompletionDataset],
        weights: Sequence[float] | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        """Number the rows through; no row is read. `vocab_size` is the target's, where that is known."""
        self.datasets = tuple(datasets)
        # As written in decimal: 0.3 is three tenths, not the nearest binary fraction.
        self.weights = tuple(Fraction(repr(float(weight))) for weight in weights or [1.0] * len(self.datasets))
        self.whole = all(weight.denominator == 1 for weight in self.weights)
        self.first_rows = np.cumsum([0, *map(len, self.datasets)])
        self.left_out = tuple(map(without_anchors, self.datasets))
        largest = [dataset.manifest.largest_id for dataset in self.datasets]
        self.last_ids = tuple(min(last, _largest_of(vocab_size)) for last in largest)

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @property
    def lengths(self) -> Int[np.ndarray, " N"]:
        """Tokens of each row, put together anew from the mapped files, in as few bytes as the longest needs.

        A row that is left out has none here.
        """
        lengths_N = joined(lambda: chain.from_iterable(dataset.length_parts() for dataset in self.datasets))
        self._mark(lengths_N, 0)
        return lengths_N

    @property
    def candidates(self) -> Int[np.ndarray, " N"]:
        """How many positions of each row may be anchors, put together anew as well."""
        return joined(lambda: chain.from_iterable(dataset.candidate_parts() for dataset in self.datasets))

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
        """Return the largest id that a row may hold: its dataset's by the manifest, or the target's if that is less."""
        last = np.array(self.last_ids, dtype=np.int64)
        return last[np.searchsorted(self.first_rows, rows, side="right") - 1]

    def candidates_of(self, rows: Sequence[int]) -> Int[np.ndarray, " n"]:
        """Return how many positions of these rows may be anchors, as they were counted."""
        rows_n = np.array(rows, dtype=np.int64)
        place_n = np.searchsorted(self.first_rows, rows_n, side="right") - 1
        counts_n = np.empty(len(rows_n), dtype=np.int64)
        for place in np.flatnonzero(np.bincount(place_n)).tolist():
            mine_n = place_n == place
            counts_n[mine_n] = self.datasets[place].candidates_of(rows_n[mine_n] - self.first_rows[place])
        return counts_n

    def bad_rows(self) -> Iterator[tuple[CompletionDataset, BadRow]]:
        """Yield each row that is left out with its dataset, and what is wrong with it."""
        for dataset, left_n in zip(self.datasets, self.left_out, strict=True):
            for row in left_n.tolist():
                yield dataset, fault_without_anchors(dataset, row)

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
        if settings.layout != "packed" and not edges and lengths_N.any():
            counts_L: Int[np.ndarray, " L"] | Float[np.ndarray, " L"] = histogram(lengths_N)
            if several:  # not whole multiples of all denominators: with long decimals they exceed 64 bits
                counts_L = np.zeros(len(counts_L))
                for first, behind, weight in zip(self.first_rows, self.first_rows[1:], self.weights, strict=False):
                    own_L = histogram(lengths_N[first:behind])
                    counts_L[: len(own_L)] += own_L * float(weight)
            counts_L[0] = 0  # rows that are left out
            edges = optimal_edges(counts_L, settings.buckets, settings.align)
        self._mark(lengths_N, 1)  # which fits anywhere
        return check_lengths(lengths_N, settings, edges, where=self.where if several else "row {:,}".format)

    def _mark(self, lengths_N: Int[np.ndarray, " N"], length: int) -> None:
        """Give the rows that are left out a length."""
        for first, left_n in zip(self.first_rows, self.left_out, strict=False):
            lengths_N[left_n + first] = length

    def rows_of_epoch(self, epoch: int) -> list[int]:
        """Return how many rows of each dataset an epoch takes, those that are left out among them."""
        ends = (_places(len(d), weight, epoch) for d, weight in zip(self.datasets, self.weights, strict=True))
        return [end - place for place, end in ends]

    def epoch_rows(self, seed: int, epoch: int) -> EpochRows:
        """Return the rows of an epoch in an order that is no order to train in: a plan draws that.

        Raises:
            UserError: the weights are so small that the epoch would hold none.
        """
        stretches = []
        for index, (dataset, weight) in enumerate(zip(self.datasets, self.weights, strict=True)):
            count = len(dataset)
            place, end = _places(count, weight, epoch)
            while place < end:
                turn, start = divmod(place, count)
                stop = min(count, start + end - place)
                rows_n, size = None, count - len(self.left_out[index])
                if stop - start < count:
                    rows_n = _kept(_part_of_pass(count, seed, turn, index, start, stop), self.left_out[index])
                    size = len(rows_n)
                place += stop - start
                if size:
                    stretches.append(Stretch(index, turn, size, rows_n))
        if not stretches and len(self):
            raise UserError(
                f"data.weights must give every epoch a row, got {[float(weight) for weight in self.weights]}, and "
                f"epoch {epoch} would hold none of the {many(len(self), 'row')}. Raise them."
            )
        return EpochRows(self, stretches)


def _part_of_pass(count: int, seed: int, turn: int, index: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
    """Return which rows come from `start` up to `stop` in a pass over a dataset."""
    rows_n, before = long_array(stop - start), 0
    for part_n in shuffled_parts(count, seed, _PASSES, turn, index):
        first, behind = max(before, start), min(before + len(part_n), stop)
        if first < behind:
            rows_n[first - start : behind - start] = part_n[first - before : behind - before]
        before += len(part_n)
    return rows_n


def _kept(rows_n: Int[np.ndarray, " n"], left_n: Int[np.ndarray, " l"]) -> Int[np.ndarray, " k"]:
    """Return the rows that are not among those left out, in their order and in their own array."""
    if not len(left_n):
        return rows_n
    kept = 0
    for at in range(0, len(rows_n), PIECE):
        part_n = rows_n[at : at + PIECE]
        found_n = np.minimum(np.searchsorted(left_n, part_n), len(left_n) - 1)
        part_n = part_n[left_n[found_n] != part_n]
        rows_n[kept : kept + len(part_n)] = part_n
        kept += len(part_n)
    return rows_n[:kept]


def _without(parts: Iterator[Int[np.ndarray, " n"]], left_n: Int[np.ndarray, " l"]) -> Iterator[Int[np.ndarray, " n"]]:
    """Yield what parts tell of a dataset's rows, without those that are left out."""
    first = 0
    for part_n in parts:
        start, stop = np.searchsorted(left_n, [first, first + len(part_n)])
        yield np.delete(part_n, left_n[start:stop] - first) if start < stop else part_n
        first += len(part_n)


def _places(count: int, weight: Fraction, epoch: int) -> tuple[int, int]:
    """Return where an epoch begins in the stream of a dataset's passes, and where it ends."""
    return floor(epoch * weight * count), floor((epoch + 1) * weight * count)


def _largest_of(vocab_size: int | None) -> int:
    """Return the largest id of a vocabulary; any number that an id can be where it is not known."""
    return 2**31 - 1 if vocab_size is None else vocab_size - 1


def open_mixture(settings: DataSettings, *, vocab_size: int | None = None) -> Mixture:
    """Return the datasets of data.dataset at the weights of data.weights.

    Raises:
        UserError: a folder holds no dataset, or a damaged one, or more than data.bad_rows of its rows bring no anchor.
    """
    datasets = [open_dataset(Path(folder)) for folder in settings.folders]
    mixture = Mixture(datasets, settings.weights, vocab_size=vocab_size)
    for dataset, left_n in zip(mixture.datasets, mixture.left_out, strict=True):
        check_anchors(dataset, left_n, settings.bad_rows)
    return mixture


def plan_epoch(
    mixture: Mixture, settings: DataSettings, *, seed: int, epoch: int, edges: tuple[int, ...]
) -> tuple[Plan, EpochRows]:
    """Return an epoch's batches, whose rows are places in the epoch, and what is there; `edges` are the mixture's.

    Raises:
        UserError: see plan and epoch_rows.
    """
    held = mixture.epoch_rows(seed, epoch)
    return plan(held.lengths(), settings, seed=seed, epoch=epoch, edges=edges), held


def first_table(mixture: Mixture, settings: DataSettings, *, seed: int) -> BucketTable:
    """Return what the first epoch looks like.

    Raises:
        UserError: see plan and epoch_rows.
    """
    made, held = plan_epoch(mixture, settings, seed=seed, epoch=0, edges=mixture.edges(settings))
    return table(made, held.lengths())


def batches_of_epochs(mixture: Mixture, settings: DataSettings, *, seed: int, epochs: int) -> list[int]:
    """Return how many batches each epoch has.

    Raises:
        UserError: see plan and epoch_rows.
    """
    edges = mixture.edges(settings)
    counts = []
    for epoch in range(1 if mixture.whole else epochs):
        counts.append(count_batches(mixture.epoch_rows(seed, epoch).lengths(), settings, edges))
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
