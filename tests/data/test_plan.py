"""The plan against brute force and against a slow restatement of its rules."""

import hashlib
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from paceline.config import DataSettings
from paceline.data import plan as planning
from paceline.data.plan import Plan, count_batches, optimal_edges, plan, table, width, widths
from paceline.data.plan_order import shuffled
from paceline.records import UserError

LAYOUTS = ["bucketed", "trimmed", "packed"]


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
    edges = optimal_edges(np.bincount(lengths), buckets, align)
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


@pytest.mark.parametrize("layout", ["bucketed", "trimmed"])
@pytest.mark.parametrize("reshuffle", ["samples", "batches"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_rules(lengths: np.ndarray, layout: str, reshuffle: str, epoch: int) -> None:
    data = settings(layout=layout, reshuffle=reshuffle)
    check_rules(plan(lengths, data, seed=1, epoch=epoch), lengths, data)


def slow_plan(lengths: np.ndarray, data: DataSettings, seed: int, epoch: int, window: int) -> list[tuple[int, ...]]:
    """The batches of bucketed and trimmed, told row by row."""
    edges = optimal_edges(np.bincount(lengths), data.buckets, data.align)
    drawn = shuffled(len(lengths), seed, 2**64 - 1, epoch if data.reshuffle == "samples" else 0).tolist()
    out = []
    for low, edge in zip((-1, *edges), edges, strict=False):
        size = max(data.min_batch, min(data.max_batch, data.token_budget // edge))
        rows = [row for row in drawn if low < lengths[row] <= edge]
        if data.layout == "trimmed":
            step = window * size
            parts = [sorted(rows[at : at + step], key=lambda row: lengths[row]) for at in range(0, len(rows), step)]
            rows = [row for part in parts for row in part]
        out += [tuple(rows[at : at + size]) for at in range(0, len(rows), size)]
    return [out[i] for i in shuffled(len(out), seed, 2**64 - 2, epoch)]


@pytest.mark.parametrize("layout", ["bucketed", "trimmed"])
@pytest.mark.parametrize("reshuffle", ["samples", "batches"])
@pytest.mark.parametrize("window", [1, 3, 64])
def test_batches_are_those_of_a_plain_loop(
    lengths: np.ndarray, layout: str, reshuffle: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_WINDOW", window)
    data = settings(layout=layout, reshuffle=reshuffle)
    for epoch in (0, 2):
        assert batches(plan(lengths, data, seed=3, epoch=epoch)) == slow_plan(lengths, data, 3, epoch, window)


def test_trimmed_has_as_many_batches_as_bucketed_and_hardly_any_padding() -> None:
    lengths = np.random.default_rng(5).integers(64, 4000, 20000).astype(np.int32)
    common = {"align": 64, "buckets": 6, "token_budget": 32768, "max_batch": 64}
    shown = {name: table(plan(lengths, settings(layout=name, **common), seed=0, epoch=0), lengths) for name in LAYOUTS}
    assert shown["trimmed"].batches == shown["bucketed"].batches
    assert shown["trimmed"].batch_max == shown["bucketed"].batch_max
    assert shown["bucketed"].padding_share > 0.05
    assert shown["trimmed"].padding_share < 0.02
    assert shown["packed"].padding_share < 0.001
    assert shown["packed"].tokens / (shown["packed"].batches * 32768) > 0.99


def needed(lengths: list[int], data: DataSettings) -> int:
    """The least budget: what one row costs alone."""
    edge = -(-max(lengths) // data.align) * data.align
    rounded = -(-max(lengths) // 32) * 32
    return {"packed": max(lengths), "bucketed": edge, "trimmed": min(edge, rounded)}[data.layout]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    layout=st.sampled_from(LAYOUTS),
    reshuffle=st.sampled_from(["samples", "batches"]),
    budget=st.integers(1, 1200),
    align=st.sampled_from([1, 7, 32, 64]),
    buckets=st.integers(1, 5),
    batch=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    epoch=st.integers(0, 3),
)
@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
def test_any_lengths_make_a_plan_that_holds_every_row_once_or_are_refused(
    lengths: list[int],
    layout: str,
    reshuffle: str,
    budget: int,
    align: int,
    buckets: int,
    batch: tuple[int, int],
    epoch: int,
) -> None:
    data = settings(layout=layout, reshuffle=reshuffle, token_budget=budget, align=align, buckets=buckets)
    data = data.model_copy(update={"min_batch": batch[0], "max_batch": sum(batch)})
    rows = np.array(lengths, dtype=np.int32)
    least = needed(lengths, data)
    if budget < least:
        with pytest.raises(
            UserError, match=rf"data\.token_budget .*got {budget:,} and row .* of {max(lengths)} tokens"
        ):
            plan(rows, data, seed=1, epoch=epoch)
        data = data.model_copy(update={"token_budget": least})  # what the message asks for is enough
    made = plan(rows, data, seed=1, epoch=epoch)
    assert sorted(row for one in batches(made) for row in one) == list(range(len(lengths)))
    assert len(made) == count_batches(rows, data) == len(plan(rows, data, seed=9, epoch=epoch + 1))
    for index, one in enumerate(batches(made)):
        assert one, "no batch is empty"
        mine = [lengths[row] for row in one]
        if layout == "packed":
            assert sum(mine) <= data.token_budget
        else:
            edge = made.edges[made.bucket_M[index]]
            width = edge if layout == "bucketed" else min(edge, -(-max(mine) // 32) * 32)
            assert max(mine) <= width
            assert len(one) <= batch[0] or len(one) * width <= data.token_budget
    shown = table(made, rows)
    assert (shown.samples, shown.tokens, shown.batches) == (len(lengths), sum(lengths), len(made))
    assert 0 <= shown.padding_share < 1


GOLDEN = {
    "bucketed": "62eaedfb45f183bed2fc1f140812e8e6706b166043c01e1561dc751b4dd6b9ed",
    "trimmed": "2726f226588e166359c57a1ec9154ef7e04160a3de8bfefe299d7ee9122216e2",
    "packed": "4c20e6c862a8fc0442dc657613721b9b2ced595ad56119981e3d16fe8bd54b67",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_plan_is_the_same_on_every_machine(layout: str, kind: type) -> None:
    """A changed sum breaks resumed runs: say so in the change log, or find what went wrong."""
    words = np.random.Philox(key=[1, 2]).random_raw(70_000)
    lengths = (2 + words % 500 * (words % 7)).astype(kind)
    data = settings(layout=layout, buckets=6, token_budget=8192, max_batch=16)
    digest = hashlib.sha256()
    for epoch in (0, 1):
        made = plan(lengths, data, seed=11, epoch=epoch)
        digest.update(made.rows_N.astype("<i8").tobytes() + made.offsets.astype("<i8").tobytes())
    assert digest.hexdigest() == GOLDEN[layout]


def test_equal_words_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few:
        def __init__(self, key: object, counter: object) -> None:
            pass

        def random_raw(self, count: int) -> np.ndarray:
            return np.arange(count, dtype=np.uint64) * np.uint64(7) % np.uint64(5)

    monkeypatch.setattr(np.random, "Philox", Few)
    want = sorted(range(1000), key=lambda i: i * 7 % 5)
    assert shuffled(1000, 0, 0, 0).tolist() == want


@pytest.mark.parametrize(
    "changes",
    [
        {"edges": (200,)},
        {"edges": (8, 64, 200, 400)},
        {"edges": (8, 64, 200, 400), "layout": "bucketed", "token_budget": 400},
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_order_depends_on_seed_and_epoch_alone(lengths: np.ndarray, layout: str) -> None:
    data = settings(layout=layout)
    first = batches(plan(lengths, data, seed=1, epoch=2))
    assert first == batches(plan(lengths.copy(), data, seed=1, epoch=2))
    for seed, epoch in ((1, 3), (2, 2)):
        other = batches(plan(lengths, data, seed=seed, epoch=epoch))
        assert other != first
        assert set(map(frozenset, other)) != set(map(frozenset, first)), "who is together changes"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reshuffled_batches_keep_their_members(lengths: np.ndarray, layout: str) -> None:
    data = settings(reshuffle="batches", layout=layout)
    epochs = [batches(plan(lengths, data, seed=1, epoch=epoch)) for epoch in range(3)]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_is_the_same_everywhere() -> None:
    """Philox words are fixed for good (Random123), so these may be written down; a change breaks resumed runs."""
    lengths = np.array([5, 30, 6, 31, 7, 29, 8, 3])
    made = plan(lengths, settings(layout="bucketed", edges=(8, 32), token_budget=64), seed=7, epoch=1)
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
    for layout in LAYOUTS:
        with pytest.raises(UserError, match=r"must hold tokens, got none in row 1 \(data\.dataset\)"):
            plan(np.array([4, 0, 3]), settings(layout=layout), seed=0, epoch=0)
    with pytest.raises(UserError, match="from 1 up, got 0"):
        plan(np.array([4]), settings(edges=(0, 8)), seed=0, epoch=0)


@pytest.mark.parametrize("layout", ["bucketed", "trimmed"])
def test_table_counts_what_is_there(lengths: np.ndarray, layout: str) -> None:
    data = settings(edges=(8, 64, 104, 200, 400), layout=layout, token_budget=400)
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
        rounded = [min(line.high - 1, -(-int(lengths[rows].max()) // 32) * 32) for rows in mine]
        wide = rounded if layout == "trimmed" else [line.high - 1] * len(mine)
        cells = sum(len(rows) * width for rows, width in zip(mine, wide, strict=True))
        tokens = sum(int(lengths[rows].sum()) for rows in mine)
        assert line.padding_share == pytest.approx(1 - tokens / cells if mine else 0)
        real, padded = real + tokens, padded + cells
    assert shown.buckets[-1].samples == 0
    assert (shown.samples, shown.tokens, shown.batches) == (500, real, len(made))
    assert shown.batch_avg == pytest.approx(500 / len(made))
    assert shown.padding_share == pytest.approx(1 - real / padded)
    assert shown.as_dict()["buckets"][0]["low"] == 0


def test_table_of_packed_batches(lengths: np.ndarray) -> None:
    made = plan(lengths, settings(layout="packed"), seed=1, epoch=0)
    shown = table(made, lengths)
    loads = [int(lengths[list(one)].sum()) for one in batches(made)]
    sizes = [len(one) for one in batches(made)]
    assert shown.padding_share == pytest.approx(1 - sum(loads) / sum(-(-load // 32) * 32 for load in loads))
    assert (shown.batches, shown.batch_min, shown.batch_max) == (len(loads), min(sizes), max(sizes))
    assert shown.as_dict()["buckets"] == ()


def test_planning_needs_no_torch() -> None:
    code = "import sys, paceline.data.plan as p; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
def test_one_run_is_as_wide_as_among_many(layout: str) -> None:
    rng = np.random.default_rng(5)
    edges = (1000,) if layout == "packed" else (30, 64, 90)
    runs = [rng.integers(low, high + 1, rng.integers(1, 9)) for low, high in [(1, 30), (31, 64), (65, 90)] * 20]
    offsets = np.cumsum([0, *map(len, runs)])
    many = widths(layout, edges, np.concatenate(runs).astype(np.int8), offsets)
    assert [width(layout, edges, run.tolist()) for run in runs] == many.tolist()
