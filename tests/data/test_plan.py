"""The plan against brute force and against a slow restatement of its rules."""

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paceline.config import DataSettings
from paceline.data.plan import Plan, optimal_edges, plan, table
from paceline.records import UserError


def settings(**changes: Any) -> DataSettings:
    return DataSettings(**{"dataset": "d", "align": 8, "buckets": 4, "token_budget": 256, "max_batch": 8, **changes})


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(3).integers(2, 200, 500)


def padded_tokens(lengths: np.ndarray, edges: tuple[int, ...]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths.tolist())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("buckets", [1, 2, 3, 5])
def test_edges_are_as_good_as_every_choice_there_is(seed: int, buckets: int) -> None:
    rng = np.random.default_rng(seed)
    align = int(rng.integers(1, 6))
    lengths = rng.integers(1, 12 * align, rng.integers(1, 60))
    edges = optimal_edges(lengths, buckets, align)
    possible = range(align, align * 13, align)
    choices = (c for k in range(1, buckets + 1) for c in itertools.combinations(possible, k) if c[-1] >= lengths.max())
    assert len(edges) <= buckets
    assert all(edge % align == 0 for edge in edges)
    assert padded_tokens(lengths, edges) == min(padded_tokens(lengths, choice) for choice in choices)


def check_rules(made: Plan, lengths: np.ndarray, data: DataSettings) -> None:
    assert sorted(made.rows_N.tolist()) == list(range(len(lengths))), "every row once"
    full = dict.fromkeys(range(len(made.edges)), 0)
    for index in range(len(made)):
        rows, bucket = made.batch(index), int(made.bucket_M[index])
        low = made.edges[bucket - 1] if bucket else 0
        assert all(low < lengths[row] <= made.edges[bucket] for row in rows)
        want = min(max(data.token_budget // made.edges[bucket], data.min_batch), data.max_batch)
        assert 1 <= len(rows) <= want
        full[bucket] += len(rows) < want
    assert max(full.values()) <= 1, "one partial batch a bucket at most"


@pytest.mark.parametrize("reshuffle", ["samples", "batches"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_rules(lengths: np.ndarray, reshuffle: str, epoch: int) -> None:
    data = settings(reshuffle=reshuffle)
    check_rules(plan(lengths, data, seed=1, epoch=epoch), lengths, data)


@pytest.mark.parametrize(
    "changes",
    [
        {"edges": (200,)},
        {"edges": (8, 64, 200, 400)},
        {"token_budget": 1},
        {"min_batch": 3, "max_batch": 3},
        {"buckets": 100, "align": 1},
    ],
)
def test_rules_with_other_settings(lengths: np.ndarray, changes: dict[str, Any]) -> None:
    data = settings(**changes)
    made = plan(lengths, data, seed=1, epoch=0)
    check_rules(made, lengths, data)
    if data.edges:
        assert made.edges == data.edges


def batches(made: Plan) -> list[tuple[int, ...]]:
    return [tuple(made.batch(i).tolist()) for i in range(len(made))]


def test_order_depends_on_seed_and_epoch_alone(lengths: np.ndarray) -> None:
    first = batches(plan(lengths, settings(), seed=1, epoch=2))
    assert first == batches(plan(lengths.copy(), settings(), seed=1, epoch=2))
    for seed, epoch in ((1, 3), (2, 2)):
        other = batches(plan(lengths, settings(), seed=seed, epoch=epoch))
        assert other != first
        assert set(map(frozenset, other)) != set(map(frozenset, first)), "who is together changes"


def test_reshuffled_batches_keep_their_members(lengths: np.ndarray) -> None:
    data = settings(reshuffle="batches")
    epochs = [batches(plan(lengths, data, seed=1, epoch=epoch)) for epoch in range(3)]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_is_the_same_everywhere() -> None:
    """Philox words are fixed for good (Random123), so these may be written down; a change breaks resumed runs."""
    lengths = np.array([5, 30, 6, 31, 7, 29, 8, 3])
    made = plan(lengths, settings(edges=(8, 32), token_budget=64), seed=7, epoch=1)
    assert batches(made) == [(4, 2, 0, 6, 7), (1,), (5, 3)]


def test_batches_of_all_buckets_are_mixed(lengths: np.ndarray) -> None:
    made = plan(lengths, settings(), seed=1, epoch=0)
    assert 0 < made.bucket_M.mean() < len(made.edges) - 1
    assert np.count_nonzero(np.diff(made.bucket_M)) > len(made) / 3


def test_row_beyond_the_last_edge_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.edges .*64 .*row 1 of 90 tokens"):
        plan(np.array([10, 90, 20]), settings(edges=(32, 64)), seed=0, epoch=0)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match="has no rows"):
        plan(np.array([], dtype=np.int64), settings(), seed=0, epoch=0)
    with pytest.raises(UserError, match="from 1 up, got 0"):
        plan(np.array([4]), settings(edges=(0, 8)), seed=0, epoch=0)


def test_table_counts_what_is_there(lengths: np.ndarray) -> None:
    data = settings(edges=(8, 64, 104, 200, 400))
    made = plan(lengths, data, seed=1, epoch=0)
    shown = table(made, lengths)
    real, padded = 0, 0
    for k, line in enumerate(shown.buckets):
        mine = [made.batch(i) for i in range(len(made)) if made.bucket_M[i] == k]
        sizes = [len(rows) for rows in mine]
        assert (line.low, line.high) == ((0, 9, 65, 105, 201)[k], (9, 65, 105, 201, 401)[k])
        assert (line.samples, line.batches) == (sum(sizes), len(sizes))
        assert line.samples == sum(line.low <= length < line.high for length in lengths)
        assert (line.batch_min, line.batch_max) == (min(sizes, default=0), max(sizes, default=0))
        assert line.batch_share == pytest.approx(len(sizes) / len(made))
        cells = sum(len(rows) * int(lengths[rows].max()) for rows in mine)
        tokens = sum(int(lengths[rows].sum()) for rows in mine)
        assert line.padding_share == pytest.approx(1 - tokens / cells if mine else 0)
        real, padded = real + tokens, padded + cells
    assert shown.buckets[-1].samples == 0
    assert (shown.samples, shown.tokens, shown.batches) == (500, real, len(made))
    assert shown.batch_avg == pytest.approx(500 / len(made))
    assert shown.padding_share == pytest.approx(1 - real / padded)
    assert shown.as_dict()["buckets"][0]["low"] == 0


def test_planning_needs_no_torch() -> None:
    code = "import sys, paceline.data.plan as p; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
