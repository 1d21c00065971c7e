"""Micro-batches against a slow restatement of the cutting rule and of the block geometry."""

from collections.abc import Callable
from dataclasses import fields, replace
from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import blocks
from paceline.config import DataSettings, TrainSettings
from paceline.data.loader import count_steps, cut_batches, largest_micro_batch, micro_batches, schedule
from paceline.data.mixture import Mixture
from paceline.data.plan import plan
from paceline.data.set_aside import BadRow, SetAside
from paceline.data.store import CompletionDataset, open_dataset
from paceline.records import BlockSet, RunError, StepReport, TokenBatch, UserError

BLOCK = 4
DATA = DataSettings(dataset="d", align=8, buckets=3, token_budget=200, max_batch=6)
LAYOUTS = {
    "bucketed": DATA.model_copy(update={"layout": "bucketed"}),
    "trimmed": DATA,
    "packed": DATA.model_copy(update={"layout": "packed", "token_budget": 64}),
}


def train(**changes: Any) -> TrainSettings:
    small = {"epochs": 2, "context_slots": 64, "anchor_slots": 12, "anchors_per_sample": 5, "batches_per_step": 3}
    return TrainSettings(**{**small, "seed": 4, **changes})


@pytest.fixture
def rows() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(10, 99, rng.integers(4, 60)).tolist(), int(rng.integers(1, 3))) for _ in range(70)]


@pytest.fixture
def dataset(make_dataset: Callable[..., CompletionDataset], rows: list[tuple[list[int], int]]) -> Mixture:
    return Mixture([make_dataset(rows)])


@pytest.fixture
def three(make_dataset: Callable[..., CompletionDataset], rows: list[tuple[list[int], int]]) -> Mixture:
    """One whole pass, two thirds of one, and two and a half."""
    parts = [make_dataset(part, f"part{i}") for i, part in enumerate((rows[:30], rows[30:63], rows[63:]))]
    return Mixture(parts, [1.0, 0.7, 2.5])


def expected_groups(
    dataset: Mixture, settings: TrainSettings, data: DataSettings = DATA
) -> list[tuple[int, int, bool, list[int]]]:
    """(epoch, step, closes, rows) of each micro-batch, from the rule as it is told to people."""
    out: list[tuple[int, int, bool, list[int]]] = []
    step = -1
    for epoch in range(settings.epochs):
        order = plan(dataset.lengths, data, seed=settings.seed, epoch=epoch)
        for index in range(len(order)):
            if index % settings.batches_per_step == 0:
                step += 1
                if step == settings.max_steps:
                    return out
            group: list[int] = []
            for row in order.batch(index).tolist():
                wide = [*group, row]
                tokens = sum(int(dataset.lengths[r]) for r in wide)
                anchors = sum(min(int(dataset.candidates[r]), settings.anchors_per_sample) for r in wide)
                if tokens > settings.context_slots or anchors > settings.anchor_slots:
                    out.append((epoch, step, False, group))
                    wide = [row]
                group = wide
            last = index % settings.batches_per_step == settings.batches_per_step - 1 or index == len(order) - 1
            out.append((epoch, step, last, group))
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batches_per_step": 1},
        {"batches_per_step": 4},
        {"batches_per_step": 7},
        {"anchor_slots": 5},
        {"context_slots": 1000, "anchor_slots": 1000},
        {"max_steps": 4},
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cutting_rule(dataset: Mixture, layout: str, changes: dict[str, Any]) -> None:
    settings, data = train(**changes), LAYOUTS[layout]
    got = list(micro_batches(dataset, data, settings, BLOCK))
    want = expected_groups(dataset, settings, data)
    assert [(b.epoch, b.step, b.closes_step, list(b.samples)) for b in got] == want
    assert [b.seq for b in got] == list(range(len(want)))
    for batch in got:
        assert batch.num_tokens <= settings.context_slots
        assert len(batch.blocks.anchor_K) <= settings.anchor_slots
    assert count_steps(dataset, data, settings) == 1 + got[-1].step == sum(b.closes_step for b in got)


def test_the_cases_above_meet_the_rule(dataset: Mixture) -> None:
    """Each limit cuts somewhere, and epochs end with full and with smaller steps."""
    count = len(plan(dataset.lengths, DATA, seed=4, epoch=0))
    assert {count % n > 0 for n in (3, 4, 7)} == {True, False}
    by_tokens = expected_groups(dataset, train(anchor_slots=1000))
    by_anchors = expected_groups(dataset, train(context_slots=1000))
    neither = expected_groups(dataset, train(anchor_slots=1000, context_slots=1000))
    assert len(by_tokens) > len(neither) < len(by_anchors)


def cut_batch(lengths: list[int], anchors: list[int], train: TrainSettings) -> list[tuple[int, int]]:
    """One batch, row by row."""
    parts = []
    start = tokens = drawn = 0
    for i, (length, count) in enumerate(zip(lengths, anchors, strict=True)):
        if i > start and (tokens + length > train.context_slots or drawn + count > train.anchor_slots):
            parts.append((start, i))
            start, tokens, drawn = i, 0, 0
        tokens += length
        drawn += count
    return [*parts, (start, len(lengths))]


def cut_together(
    lengths: np.ndarray, anchors: np.ndarray, offsets: np.ndarray, train: TrainSettings
) -> list[tuple[int, int]]:
    """All batches as the loader cuts them."""
    pieces = cut_batches(lambda first, behind: (lengths[first:behind], anchors[first:behind]), offsets, train)
    ends = np.concatenate(list(pieces)).tolist()
    return list(zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize(
    ("lengths", "anchors", "want"),
    [
        ([32, 32, 1], [1, 1, 1], [(0, 2), (2, 3)]),
        ([32, 33], [1, 1], [(0, 1), (1, 2)]),
        ([9, 9, 9], [6, 6, 1], [(0, 2), (2, 3)]),
        ([64, 64], [12, 12], [(0, 1), (1, 2)]),
        ([1], [1], [(0, 1)]),
        ([64, 1], [0, 0], [(0, 1), (1, 2)]),
    ],
)
def test_full_slots_are_used(lengths: list[int], anchors: list[int], want: list[tuple[int, int]]) -> None:
    settings = train(anchors_per_sample=12)
    assert cut_batch(lengths, anchors, settings) == want
    assert cut_together(np.array(lengths), np.array(anchors), np.array([0, len(lengths)]), settings) == want


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 64), st.integers(0, 12)), min_size=1, max_size=12), min_size=1, max_size=12
    )
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_all_batches_are_cut_at_once_as_each_alone(batches: list[list[tuple[int, int]]]) -> None:
    limits = train(anchors_per_sample=12)
    offsets = np.cumsum([0, *map(len, batches)])
    lengths, anchors = np.array([row for batch in batches for row in batch], dtype=np.int32).T
    want = [
        (int(offset) + start, int(offset) + end)
        for offset, batch in zip(offsets, batches, strict=False)
        for start, end in cut_batch([length for length, _ in batch], [count for _, count in batch], limits)
    ]
    assert cut_together(lengths, anchors, offsets, limits) == want


def expected_width(batch: TokenBatch, made_edges: tuple[int, ...], layout: str) -> int:
    longest = max(batch.lengths)
    edge = min(edge for edge in made_edges if edge >= longest)
    rounded = -(-longest // 32) * 32
    total = -(-sum(batch.lengths) // 32) * 32
    return {"bucketed": edge, "trimmed": min(edge, rounded), "packed": total}[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_lie_end_to_end(dataset: Mixture, rows: list[tuple[list[int], int]], layout: str) -> None:
    edges = plan(dataset.lengths, LAYOUTS[layout], seed=4, epoch=0).edges
    shared = 0
    for batch in micro_batches(dataset, LAYOUTS[layout], train(epochs=1), BLOCK):
        width = expected_width(batch, edges, layout)
        assert batch.input_ids.shape == ((1 if layout == "packed" else len(batch.samples)), width)
        shared += batch.packed
        assert batch.packed == (layout == "packed" and len(batch.samples) > 1)
        flat: list[int] = []
        padded: list[int] = []
        want = []
        for i, row in enumerate(batch.samples):
            ids, prompt = rows[row]
            assert batch.lengths[i] == len(ids)
            padded += ids + [0] * (width - len(ids)) * (layout != "packed")
            candidates = np.arange(prompt, len(ids) - 1)
            for a in blocks.sample_anchors(candidates, 5, seed=4, epoch=batch.epoch, sample=row).tolist():
                labels = [ids[a + k] if k and a + k < len(ids) else 0 for k in range(BLOCK)]
                valid = [k > 0 and a + k < len(ids) for k in range(BLOCK)]
                want.append((len(flat), len(flat) + a, a, ids[a], labels, valid))
            flat += ids
        assert batch.input_ids.flatten().tolist() == padded + [0] * (batch.input_ids.numel() - len(padded))
        assert batch.input_ids.flatten()[batch.places_T].tolist() == flat
        got = batch.blocks
        fields = (got.start_K, got.anchor_K, got.position_K, got.token_K, got.labels_KB, got.valid_KB)
        assert list(zip(*(field.tolist() for field in fields), strict=True)) == want
        assert got.anchor_K.tolist() == sorted(got.anchor_K.tolist())
        assert [flat[a] for a in got.anchor_K] == got.token_K.tolist()
        assert {field.dtype for field in fields} == {torch.int64, torch.bool}
        assert batch.input_ids.dtype == batch.places_T.dtype == torch.int64
    assert bool(shared) == (layout == "packed")


def anchors_of(batches: list[TokenBatch]) -> dict[tuple[int, int], list[int]]:
    """Anchor positions of each (epoch, row)."""
    out: dict[tuple[int, int], list[int]] = {}
    for batch in batches:
        start = 0
        for row, length in zip(batch.samples, batch.lengths, strict=True):
            mine = batch.blocks.start_K == start
            out[batch.epoch, row] = batch.blocks.position_K[mine].tolist()
            start += length
    return out


def test_blocks_do_not_depend_on_the_layout(dataset: Mixture) -> None:
    one = anchors_of(list(micro_batches(dataset, DATA, train(), BLOCK)))
    other = DATA.model_copy(update={"buckets": 1, "token_budget": 64})
    for data in (other, *LAYOUTS.values()):
        assert anchors_of(list(micro_batches(dataset, data, train(context_slots=500, anchor_slots=99), BLOCK))) == one
    assert set(one) == {(epoch, row) for epoch in range(2) for row in range(70)}
    assert any(one[0, row] != one[1, row] for row in range(70))


def test_too_long_a_sample_is_refused_before_anything_is_yielded(dataset: Mixture) -> None:
    longest = int(dataset.lengths.max())
    with pytest.raises(
        UserError, match=rf"train\.context_slots \(40\).*{dataset.datasets[0].folder}.*{longest} tokens"
    ):
        micro_batches(dataset, DATA, train(context_slots=40), BLOCK)
    with pytest.raises(UserError, match=r"train\.context_slots"):
        largest_micro_batch(dataset, DATA, train(context_slots=40), BLOCK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_largest_micro_batch(dataset: Mixture, layout: str) -> None:
    data = LAYOUTS[layout]
    largest = largest_micro_batch(dataset, data, train(max_steps=1), BLOCK)
    every = list(micro_batches(dataset, data, train(epochs=1), BLOCK))
    assert largest.input_ids.numel() == max(batch.input_ids.numel() for batch in every)
    assert any(same(largest, replace(batch, seq=0)) for batch in every)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 6),
        ({"batches_per_step": 7}, 2),
        ({"batches_per_step": 6}, 4),
        ({"max_steps": 5}, 5),
        ({"max_steps": 50}, 6),
    ],
)
def test_count_steps(make_dataset: Callable[..., CompletionDataset], changes: dict[str, Any], steps: int) -> None:
    seven = Mixture([make_dataset([([5, 6, 7], 1)] * 14)])
    data = DATA.model_copy(update={"max_batch": 2})
    assert count_steps(seven, data, train(**changes)) == steps


def same(one: TokenBatch, two: TokenBatch) -> bool:
    plain = ("seq", "epoch", "step", "closes_step", "samples", "lengths")
    tensors = [(one.input_ids, two.input_ids), (one.places_T, two.places_T)]
    tensors += [(getattr(one.blocks, f.name), getattr(two.blocks, f.name)) for f in fields(BlockSet)]
    return all(getattr(one, name) == getattr(two, name) for name in plain) and all(
        torch.equal(a, b) for a, b in tensors
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["dataset", "three"])
def test_a_stream_that_starts_later_is_the_rest_of_the_whole_one(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, layout: str, source: str
) -> None:
    mixture, data = request.getfixturevalue(source), LAYOUTS[layout]
    settings = train(epochs=3, batches_per_step=2)
    whole = list(micro_batches(mixture, data, settings, BLOCK))
    steps = count_steps(mixture, data, settings)
    assert steps == whole[-1].step + 1 == len({batch.step for batch in whole})
    read: list[int] = []
    row = Mixture.row
    monkeypatch.setattr(Mixture, "row", lambda self, index: read.append(index) or row(self, index))
    firsts = [
        batch.step
        for batch, before in zip(whole, [None, *whole], strict=False)
        if before is None or (before.epoch != batch.epoch)
    ]
    for first in {0, 1, *firsts, firsts[1] - 1, firsts[2] + 1, steps - 1, steps, steps + 5}:
        rest = [batch for batch in whole if batch.step >= first]
        read.clear()
        got = list(micro_batches(mixture, data, settings, BLOCK, first_step=first))
        assert len(got) == len(rest)
        assert all(same(a, replace(b, seq=seq)) for seq, (a, b) in enumerate(zip(got, rest, strict=True)))
        assert read == [index for batch in rest for index in batch.samples], "no row that was skipped is read"
    shorter = settings.model_copy(update={"max_steps": steps - 2})
    got = list(micro_batches(mixture, data, shorter, BLOCK, first_step=1))
    assert {batch.step for batch in got} == set(range(1, steps - 2))
    assert count_steps(mixture, data, shorter) == steps - 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_several_datasets_bring_their_own_tokens_and_a_draw_for_each_pass(
    three: Mixture, rows: list[tuple[list[int], int]], layout: str
) -> None:
    settings = train(epochs=4)
    seen: dict[tuple[int, int], int] = {}
    cuts = schedule(three, LAYOUTS[layout], settings)
    for cut, batch in zip(cuts, micro_batches(three, LAYOUTS[layout], settings, BLOCK), strict=True):
        assert cut.rows == batch.samples
        flat = batch.input_ids.flatten()[batch.places_T].tolist()
        start = 0
        for index, turn, length in zip(cut.rows, cut.passes, batch.lengths, strict=True):
            ids, prompt = rows[index]
            assert flat[start : start + length] == ids
            drawn = blocks.sample_anchors(np.arange(prompt, len(ids) - 1), 5, seed=4, epoch=turn, sample=index)
            assert batch.blocks.anchor_K[batch.blocks.start_K == start].tolist() == (start + drawn).tolist()
            seen[index, turn] = seen.get((index, turn), 0) + 1
            start += length
    assert set(seen.values()) == {1}, "no pass takes a row twice"
    assert {turn for index, turn in seen if index >= 63} == set(range(10))


@pytest.mark.parametrize("wrong", [-1, 100, 2**31 - 1])
def test_too_many_rows_with_ids_that_the_dataset_has_not_end_the_run(
    make_dataset: Callable[..., CompletionDataset], wrong: int
) -> None:
    good, bad = make_dataset([([5, 99, 7], 1)]), make_dataset([([5, 6, 7], 1), ([5, 6, wrong, 7], 1)], "bad")
    bad.manifest = replace(bad.manifest, largest_id=50)
    said = rf"1\.00% .*data\.bad_rows.* 1 of the 2 of .*bad are, row 1 because it holds the id {wrong:,}, .* 0\.\.50:"
    with pytest.raises(RunError, match=rf"{said} the dataset is damaged.*`paceline prepare .*bad --verify`"):
        list(micro_batches(Mixture([good, bad]), DATA, train(), BLOCK))
    only = [batch.samples for batch in micro_batches(Mixture([good, make_dataset([([5], 1)], "c")]), DATA, train(), 4)]
    assert only, "an id that only one of the datasets has is none too many"


def test_an_id_that_only_another_dataset_of_the_micro_batch_has_is_told(
    make_dataset: Callable[..., CompletionDataset],
) -> None:
    large, small = make_dataset([([5, 99, 7], 1)] * 4), make_dataset([([5, 6, 7], 1), ([5, 60, 7], 1)], "small")
    small.manifest = replace(small.manifest, largest_id=50)
    with pytest.raises(RunError, match=r"of .*small are, row 1 because it holds the id 60, .* 0\.\.50:"):
        list(micro_batches(Mixture([large, small]), DATA, train(), BLOCK))


def poisoned(make_dataset: Callable[..., CompletionDataset], rows: list[tuple[list[int], int]]) -> Mixture:
    """The rows as one dataset with row 3's first id beyond the vocabulary and row 8's second below 0."""
    changed = [(list(ids), prompt) for ids, prompt in rows]
    changed[3][0][0], changed[8][0][1] = VOCABULARY, -5
    return Mixture([make_dataset(changed, "poisoned")], vocab_size=VOCABULARY)


VOCABULARY = 2000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_turns_out_to_be_bad_stays_as_long_as_it_is_and_changes_no_other(
    dataset: Mixture, rows: list[tuple[list[int], int]], make_dataset: Callable[..., CompletionDataset], layout: str
) -> None:
    told: list[BadRow] = []
    data, settings = LAYOUTS[layout].model_copy(update={"bad_rows": 0.05}), train()
    aside = SetAside(data.bad_rows, on_row=told.append)
    mixture = poisoned(make_dataset, rows)
    assert mixture.datasets[0].manifest.largest_id == VOCABULARY, "the writer says what is in it"
    whole = list(micro_batches(dataset, data, settings, BLOCK))
    found = list(micro_batches(mixture, data, settings, BLOCK, set_aside=aside))
    assert len(whole) == len(found)
    for one, other in zip(whole, found, strict=True):
        assert one.samples == other.samples and one.lengths == other.lengths and one.step == other.step  # noqa: PT018
        flat, changed = (b.input_ids.flatten()[b.places_T] for b in (one, other))
        ends = np.cumsum(one.lengths)
        anchors, wanted = other.blocks, one.blocks
        stays = torch.ones(len(wanted.anchor_K), dtype=torch.bool)
        for row, end, length in zip(one.samples, ends.tolist(), one.lengths, strict=True):
            if row in (3, 8):
                flat[end - length : end] = 0
                stays &= (wanted.anchor_K < end - length) | (wanted.anchor_K >= end)
        assert torch.equal(flat, changed)
        for field in fields(BlockSet):
            assert torch.equal(getattr(wanted, field.name)[stays], getattr(anchors, field.name))
    assert [(bad.dataset, bad.row, bad.reason) for bad in sorted(told, key=lambda bad: bad.row)] == [
        (mixture.datasets[0].folder, row, "out of vocabulary") for row in (3, 8)
    ]
    assert len(aside) == 2


def test_a_micro_batch_of_nothing_but_bad_rows_has_no_blocks(
    rows: list[tuple[list[int], int]], make_dataset: Callable[..., CompletionDataset]
) -> None:
    data = DATA.model_copy(update={"max_batch": 1, "bad_rows": 0.05})
    found = list(micro_batches(poisoned(make_dataset, rows), data, train(epochs=1), BLOCK))
    bare = {batch.samples: batch for batch in found if not len(batch.blocks.anchor_K)}
    assert bare.keys() == {(3,), (8,)}
    for row, batch in ((3, bare[3,]), (8, bare[8,])):
        assert batch.blocks.labels_KB.shape == (0, BLOCK)
        assert batch.lengths == (len(rows[row][0]),)
        assert not batch.input_ids.any()
    counts = {
        "blocks": 0,
        "anchor_slots": 12,
        "tokens": 9,
        "padded_tokens": 9,
        "visible": 0,
        "lr": 0.1,
        "grad_norm": 0.0,
        "applied": True,
    }
    assert isnan(StepReport(0, 0, 0.0, 0.0, (0,) * 3, (0,) * 3, **counts).loss)


def test_a_row_that_is_known_is_counted_and_not_told_again(
    rows: list[tuple[list[int], int]], make_dataset: Callable[..., CompletionDataset]
) -> None:
    told: list[BadRow] = []
    mixture = poisoned(make_dataset, rows)
    known = [(mixture.datasets[0].fingerprint, 8)]
    data = DATA.model_copy(update={"bad_rows": 0.05})
    aside = SetAside(0.05, on_row=told.append, known=known)
    list(micro_batches(mixture, data, train(), BLOCK, set_aside=aside))
    assert [bad.row for bad in told] == [3]
    assert len(aside) == 2
    tight = SetAside(1.5 / len(rows), known=known)
    with pytest.raises(RunError, match=r"2 of the 70 .* are, row 3 because it holds the id 2,000"):
        list(micro_batches(mixture, data, train(), BLOCK, set_aside=tight))


def test_another_mask_than_the_one_that_was_counted_is_set_aside(
    make_dataset: Callable[..., CompletionDataset],
) -> None:
    """More anchors than the cut has made room for would not fit; none at all would teach nothing."""
    told: list[BadRow] = []
    folder = make_dataset([([5, 6, 7, 8, 9], 1)] * 3 + [([5, 6, 7, 8, 9], 2)]).folder
    path = folder / "data-00000-of-00001.arrow"
    before, after = (np.array(values, np.int32).tobytes() for values in ([3, 3, 3, 2], [3, 1, 3, 2]))
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, after))
    mixture = Mixture([open_dataset(folder)])
    aside = SetAside(0.5, on_row=told.append)
    made = list(micro_batches(mixture, DATA, train(epochs=1), BLOCK, set_aside=aside))
    assert [(bad.row, bad.reason) for bad in told] == [(1, "another loss mask")]
    assert "for 3 anchors, and its dataset counted 1" in told[0].detail
    assert sum(len(batch.blocks.anchor_K) for batch in made) == 3 + 3 + 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight", [1.0, 2.0, 0.6])
def test_rows_without_anchors_are_in_no_epoch(
    rows: list[tuple[list[int], int]], make_dataset: Callable[..., CompletionDataset], layout: str, weight: float
) -> None:
    """A whole pass is that of the dataset without them: all anchors are drawn, whatever number a row has."""
    dirty = [*rows[:20], ([], 0), *rows[20:50], ([7] * 55, 55), *rows[50:], ([5, 6], 1)]
    data, settings = LAYOUTS[layout], train(anchors_per_sample=60, anchor_slots=70)
    mixture = Mixture([make_dataset(dirty, "dirty")], [weight])
    without = Mixture([make_dataset(rows, "clean")], [weight])
    assert [left.tolist() for left in mixture.left_out] == [[20, 51, 72]]
    assert mixture.edges(data) == without.edges(data)
    few = Mixture([make_dataset([([5, 6, 7], 1), ([], 0)] * 3, "few"), make_dataset([([7] * 20, 1)], "more")])
    assert few.edges(DATA) == (8, 24), "no bucket is for rows that are left out"
    found = list(micro_batches(mixture, data, settings, BLOCK))
    assert not {20, 51, 72} & {row for batch in found for row in batch.samples}
    if weight == 0.6:  # passes are broken elsewhere
        assert {row for batch in found for row in batch.samples} == {*range(73)} - {20, 51, 72}
        return
    clean = list(micro_batches(without, data, settings, BLOCK))
    assert len(clean) == len(found)
    for one, other in zip(clean, found, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.places_T, other.places_T)
        assert all(torch.equal(getattr(one.blocks, f.name), getattr(other.blocks, f.name)) for f in fields(BlockSet))


def test_rows_of_datasets_with_unequal_vocabularies_are_read_once(
    make_dataset: Callable[..., CompletionDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = Mixture([make_dataset([([5, 99, 7], 1)] * 9), make_dataset([([5, 6, 7], 1)] * 9, "small")])
    read: list[int] = []
    row = Mixture.row
    monkeypatch.setattr(Mixture, "row", lambda self, index: read.append(index) or row(self, index))
    made = list(micro_batches(mixture, DATA, train(epochs=1), BLOCK))
    assert any({*batch.samples} & {*range(9)} and {*batch.samples} & {*range(9, 18)} for batch in made)
    assert sorted(read) == list(range(18))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_completions_of_one_prompt_stay_whole_and_apart(
    make_dataset: Callable[..., CompletionDataset], layout: str
) -> None:
    """Samples that begin alike are samples like others: each has its tokens once, behind one another."""
    rng = np.random.default_rng(6)
    prompt = rng.integers(10, 99, 12).tolist()
    rows = [(prompt + rng.integers(10, 99, rng.integers(3, 20)).tolist(), 12) for _ in range(20)]
    seen = []
    for batch in micro_batches(Mixture([make_dataset(rows)]), LAYOUTS[layout], train(epochs=1), BLOCK):
        flat = batch.input_ids.flatten()[batch.places_T]
        parts = torch.split(flat, list(batch.lengths))
        assert [part.tolist() for part in parts] == [rows[row][0] for row in batch.samples]
        seen += batch.samples
    assert sorted(seen) == list(range(20))
