"""Which rows an epoch of several datasets holds, against a stream of passes that is written out."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, count, islice
from math import floor

import numpy as np
import pytest

from paceline.blocks import anchor_candidates, sample_anchors
from paceline.config import DataSettings
from paceline.data.mixture import EpochRows, Mixture, batches_of_epochs, coverage, first_table, open_mixture, plan_epoch
from paceline.data.plan import optimal_edges, plan, table
from paceline.data.plan_order import shuffled
from paceline.data.store import CompletionDataset
from paceline.records import UserError

Make = Callable[..., CompletionDataset]
DATA = DataSettings(dataset="d", align=8, buckets=3, token_budget=200, max_batch=4)


def rows_of(number: int, longest: int = 50, seed: int = 0) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(4, 90, rng.integers(3, longest)).tolist(), 1) for _ in range(number)]


def stream(size: int, seed: int, index: int, first: int) -> "list[tuple[int, int]]":
    """The passes over a dataset one behind the other, twenty of them: (row, pass)."""
    passes = ((turn, shuffled(size, seed, 2**64 - 3, turn, index).tolist()) for turn in count())
    return [(first + row, turn) for turn, order in islice(passes, 20) for row in order]


def rows_and_passes(held: EpochRows) -> tuple[list[int], list[int]]:
    """The rows of all places of an epoch and their passes."""
    places = np.arange(len(held), dtype=np.int32)
    passes = held.passes(places).tolist()
    rows = held.rows(places)
    assert rows is places, "turned in their own array"
    return rows.tolist(), passes


@pytest.mark.parametrize(
    "weights",
    [None, (1.0, 1.0, 1.0), (2.0, 1.0, 3.0), (0.5, 1.0, 2.5), (0.3, 0.1, 0.7), (1 / 3, 1.25, 0.999)],
)
@pytest.mark.parametrize("seed", [0, 7])
def test_an_epoch_is_its_piece_of_each_stream(make_dataset: Make, weights: tuple[float, ...] | None, seed: int) -> None:
    sizes = (10, 7, 13)
    mixture = Mixture([make_dataset(rows_of(n), f"d{n}") for n in sizes], weights)
    assert mixture.whole == all(weight % 1 == 0 for weight in weights or ())
    taken: Counter[int] = Counter()
    for epoch in range(6):
        want: Counter[tuple[int, int]] = Counter()
        first = 0
        for index, size in enumerate(sizes):
            weight = Fraction(str(weights[index])) if weights else 1  # what a person wrote
            start, end = floor(epoch * weight * size), floor((epoch + 1) * weight * size)
            want.update(stream(size, seed, index, first)[start:end])
            first += size
        held = mixture.epoch_rows(seed, epoch)
        rows, passes = rows_and_passes(held)
        assert Counter(zip(rows, passes, strict=True)) == want
        assert held.lengths().tolist() == mixture.lengths[rows].tolist()
        places = np.random.default_rng(epoch).permutation(len(held)).astype(np.int32)
        drawn = np.minimum(mixture.candidates[rows], 20)[places]
        assert held.candidates(places, 20).tolist() == drawn.tolist()
        assert held.lengths().dtype == np.int8, "no row is longer than 127"
        taken.update(rows)
    for low, high in ((0, 10), (10, 17), (17, 30)):
        counts = [taken[row] for row in range(low, high)]
        assert max(counts) - min(counts) <= 1, "over epochs every row of a dataset is taken equally often"


def test_halves_are_the_two_halves_of_a_pass(make_dataset: Make) -> None:
    mixture = Mixture([make_dataset(rows_of(11))], [0.5])
    (one, first), (two, second) = (rows_and_passes(mixture.epoch_rows(3, epoch)) for epoch in (0, 1))
    assert (len(one), len(two)) == (5, 6)
    assert sorted([*one, *two]) == list(range(11))
    assert {*first, *second} == {0}


def test_broken_passes_of_many_rows_meet_without_a_gap(make_dataset: Make) -> None:
    """More rows than a drawn order comes in parts."""
    mixture = Mixture([make_dataset(rows_of(2), "small"), make_dataset(rows_of(400), "large")], [1.0, 0.3])
    want = stream(400, 3, 1, 2)
    for epoch in range(8):
        rows, passes = rows_and_passes(mixture.epoch_rows(3, epoch))
        mine = [pair for pair in zip(rows, passes, strict=True) if pair[0] >= 2]
        assert mine == want[epoch * 120 : (epoch + 1) * 120]


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
def test_one_dataset_is_planned_as_if_there_were_no_mixture(make_dataset: Make, layout: str) -> None:
    data = DATA.model_copy(update={"layout": layout})
    dataset = make_dataset(rows_of(60))
    mixture = Mixture([dataset])
    for epoch in (0, 2):
        made, held = plan_epoch(mixture, data, seed=5, epoch=epoch, edges=mixture.edges(data))
        want = plan(dataset.lengths, data, seed=5, epoch=epoch)
        assert set(held.passes(made.rows_N).tolist()) == {epoch}
        assert held.rows(made.rows_N).tolist() == want.rows_N.tolist()
        assert made.offsets.tolist() == want.offsets.tolist()
        assert made.edges == want.edges
    assert first_table(mixture, data, seed=5) == table(plan(dataset.lengths, data, seed=5, epoch=0), dataset.lengths)


def test_rows_are_those_of_the_datasets_one_behind_the_other(make_dataset: Make) -> None:
    parts = [rows_of(3, seed=1), rows_of(5, seed=2)]
    mixture = Mixture([make_dataset(part, f"part{i}") for i, part in enumerate(parts)])
    every = [*parts[0], *parts[1]]
    assert len(mixture) == 8
    assert mixture.lengths.tolist() == [len(ids) for ids, _ in every]
    for index, (ids, prompt) in enumerate(every):
        got, mask = mixture.row(index)
        assert got.tolist() == ids
        assert mask.tolist() == [place >= prompt for place in range(len(ids))]
        assert mixture.candidates[index] == len(anchor_candidates(mask))
    assert mixture.where(2).endswith("row 2 of " + str(mixture.datasets[0].folder))
    assert mixture.where(3).endswith("row 0 of " + str(mixture.datasets[1].folder))


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
@pytest.mark.parametrize("weights", [(1.0, 2.0), (0.4, 1.3)])
def test_batches_are_counted_without_a_plan(make_dataset: Make, layout: str, weights: tuple[float, float]) -> None:
    data = DATA.model_copy(update={"layout": layout, "token_budget": 64})
    mixture = Mixture([make_dataset(rows_of(30), "a"), make_dataset(rows_of(21, 20), "b")], weights)
    edges = mixture.edges(data)
    want = [len(plan_epoch(mixture, data, seed=1, epoch=epoch, edges=edges)[0]) for epoch in range(5)]
    assert batches_of_epochs(mixture, data, seed=1, epochs=5) == want
    assert len(set(want)) > 1 or mixture.whole


def test_edges_are_the_best_for_the_rows_at_their_weights(make_dataset: Make) -> None:
    short, long = make_dataset([([5] * n, 1) for n in range(3, 40)], "short"), make_dataset([([5] * 50, 1)] * 9, "long")
    data = DATA.model_copy(update={"buckets": 2, "align": 1})
    for weights, times in (((1.0, 1.0), (1, 1)), ((0.1, 2.5), (1, 25)), ((3.0, 1.0), (3, 1))):
        lengths = np.concatenate([np.repeat(short.lengths, times[0]), np.repeat(long.lengths, times[1])])
        assert Mixture([short, long], weights).edges(data) == optimal_edges(np.bincount(lengths), 2, 1)


@pytest.mark.parametrize(
    "weights", [(1 / 3, 1.0), (0.33333333333, 1.0), (0.7071067811865476, 0.1), (1e-9, 0.123456789012345), (0.1, 0.2)]
)
def test_edges_are_the_best_whatever_decimals_weights_have(make_dataset: Make, weights: tuple[float, float]) -> None:
    datasets = [make_dataset(rows_of(300, longest, seed=3), f"d{longest}") for longest in (30, 90)]
    edges = Mixture(datasets, weights).edges(DATA)

    def padded(choice: tuple[int, ...]) -> Fraction:
        rows = ((length, Fraction(w)) for d, w in zip(datasets, weights, strict=True) for length in d.lengths.tolist())
        return sum((min(edge for edge in choice if edge >= length) * weight for length, weight in rows), Fraction(0))

    possible = range(8, 97, 8)
    longest = max(int(d.lengths.max()) for d in datasets)
    choices = [c for k in (1, 2, 3) for c in combinations(possible, k) if c[-1] >= longest]
    assert float(padded(edges)) == pytest.approx(float(min(map(padded, choices))), rel=1e-12)


def test_a_single_dataset_has_the_edges_of_its_rows_whatever_its_weight(make_dataset: Make) -> None:
    dataset = make_dataset(rows_of(60))
    want = optimal_edges(np.bincount(dataset.lengths), DATA.buckets, DATA.align)
    for weight in (1.0, 3.0, 0.1234567890123456):
        assert Mixture([dataset], [weight]).edges(DATA) == want


def test_what_cannot_be_is_refused(make_dataset: Make) -> None:
    small = Mixture([make_dataset(rows_of(3))], [0.1])
    with pytest.raises(UserError, match=r"data\.weights must give every epoch a row, got \[0\.1\], .*epoch 0 .*3 rows"):
        batches_of_epochs(small, DATA, seed=0, epochs=2)
    with pytest.raises(UserError, match=r"Dataset d \(data\.dataset\) has no rows"):
        first_table(Mixture([make_dataset([], "none")]), DATA, seed=0)
    two = Mixture([make_dataset(rows_of(3), "one"), make_dataset([([5] * 300, 1)], "two")])
    with pytest.raises(UserError, match=r"data\.token_budget must hold .*got 200 and row 0 of .*two of 300 tokens"):
        first_table(two, DATA, seed=0)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 2.0)])
def test_coverage_is_what_the_draws_come_to(make_dataset: Make, weights: tuple[float, float]) -> None:
    mixture = Mixture([make_dataset(rows_of(40), "a"), make_dataset(rows_of(25, 12), "b")], weights)
    told = coverage(mixture, anchors_per_sample=6, epochs=4)
    hit: set[tuple[int, int]] = set()
    drawn = possible = 0
    for epoch in range(4):
        held = mixture.epoch_rows(2, epoch)
        for row, turn in zip(*rows_and_passes(held), strict=True):
            candidates = anchor_candidates(mixture.row(row)[1])
            got = sample_anchors(candidates, 6, seed=2, epoch=turn, sample=row)
            hit |= {(row, anchor) for anchor in got.tolist()}
            drawn, possible = drawn + len(got), possible + len(candidates)
    assert told.candidates == int(mixture.candidates.sum())
    assert told.epoch_share == pytest.approx(drawn / possible, abs=0.02)
    assert told.run_share == pytest.approx(len(hit) / told.candidates, abs=0.03)


def test_coverage_of_nothing_and_of_all(make_dataset: Make) -> None:
    none = coverage(Mixture([make_dataset([([5], 1)])]), anchors_per_sample=6, epochs=4)
    assert (none.candidates, none.epoch_share, none.run_share) == (0, 0.0, 0.0)
    every = coverage(Mixture([make_dataset(rows_of(9), "b")]), anchors_per_sample=99, epochs=1)
    assert (every.epoch_share, every.run_share) == (1.0, 1.0)


def test_folders_of_the_settings_are_opened(make_dataset: Make) -> None:
    folders = [str(make_dataset(rows_of(n), f"d{n}").folder) for n in (4, 6)]
    mixture = open_mixture(DataSettings(dataset=tuple(folders), weights=(1, 0.5)))
    assert [str(dataset.folder) for dataset in mixture.datasets] == folders
    assert mixture.weights == (1, Fraction(1, 2))
    assert len(open_mixture(DataSettings(dataset=folders[0]))) == 4


def test_mixing_needs_no_torch() -> None:
    code = "import sys, paceline.data.mixture; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
