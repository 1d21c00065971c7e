"""Micro-batches against a slow restatement of the cutting rule and of the block geometry."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline import blocks
from paceline.config import DataSettings, TrainSettings
from paceline.data.loader import count_steps, cut_batch, largest_micro_batch, micro_batches
from paceline.data.plan import plan
from paceline.data.store import CompletionDataset
from paceline.records import TokenBatch, UserError

BLOCK = 4
DATA = DataSettings(dataset="d", align=8, buckets=3, token_budget=200, max_batch=6)


def train(**changes: Any) -> TrainSettings:
    small = {"epochs": 2, "context_slots": 64, "anchor_slots": 12, "anchors_per_sample": 5, "batches_per_step": 3}
    return TrainSettings(**{**small, "seed": 4, **changes})


@pytest.fixture
def rows() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(10, 99, rng.integers(4, 60)).tolist(), int(rng.integers(1, 3))) for _ in range(70)]


@pytest.fixture
def dataset(make_dataset: Callable[..., CompletionDataset], rows: list[tuple[list[int], int]]) -> CompletionDataset:
    return make_dataset(rows)


def expected_groups(
    dataset: CompletionDataset, settings: TrainSettings, data: DataSettings = DATA
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
def test_the_cutting_rule(dataset: CompletionDataset, changes: dict[str, Any]) -> None:
    settings = train(**changes)
    got = list(micro_batches(dataset, DATA, settings, BLOCK))
    want = expected_groups(dataset, settings)
    assert [(b.epoch, b.step, b.closes_step, list(b.samples)) for b in got] == want
    assert [b.seq for b in got] == list(range(len(want)))
    for batch in got:
        assert batch.num_tokens <= settings.context_slots
        assert len(batch.blocks.anchor_K) <= settings.anchor_slots
    batches_per_epoch = len(plan(dataset.lengths, DATA, seed=settings.seed, epoch=0))
    assert count_steps(batches_per_epoch, settings) == 1 + got[-1].step == sum(b.closes_step for b in got)


def test_the_cases_above_meet_the_rule(dataset: CompletionDataset) -> None:
    """Each limit cuts somewhere, and epochs end with full and with smaller steps."""
    count = len(plan(dataset.lengths, DATA, seed=4, epoch=0))
    assert {count % n > 0 for n in (3, 4, 7)} == {True, False}
    by_tokens = expected_groups(dataset, train(anchor_slots=1000))
    by_anchors = expected_groups(dataset, train(context_slots=1000))
    neither = expected_groups(dataset, train(anchor_slots=1000, context_slots=1000))
    assert len(by_tokens) > len(neither) < len(by_anchors)


@pytest.mark.parametrize(
    ("lengths", "anchors", "want"),
    [
        ([32, 32, 1], [1, 1, 1], [(0, 2), (2, 3)]),
        ([32, 33], [1, 1], [(0, 1), (1, 2)]),
        ([9, 9, 9], [6, 6, 1], [(0, 2), (2, 3)]),
        ([64, 64], [12, 12], [(0, 1), (1, 2)]),
        ([1], [1], [(0, 1)]),
    ],
)
def test_full_slots_are_used(lengths: list[int], anchors: list[int], want: list[tuple[int, int]]) -> None:
    parts = cut_batch(lengths, anchors, train(anchors_per_sample=12))
    assert [(part.start, part.stop) for part in parts] == want


def test_samples_lie_end_to_end(dataset: CompletionDataset, rows: list[tuple[list[int], int]]) -> None:
    for batch in micro_batches(dataset, DATA, train(epochs=1), BLOCK):
        assert batch.input_ids.shape == (len(batch.samples), max(batch.lengths))
        flat: list[int] = []
        want = []
        for i, row in enumerate(batch.samples):
            ids, prompt = rows[row]
            assert batch.lengths[i] == len(ids)
            assert batch.input_ids[i].tolist() == ids + [0] * (max(batch.lengths) - len(ids))
            candidates = np.arange(prompt, len(ids) - 1)
            for a in blocks.sample_anchors(candidates, 5, seed=4, epoch=batch.epoch, sample=row).tolist():
                labels = [ids[a + k] if k and a + k < len(ids) else 0 for k in range(BLOCK)]
                valid = [k > 0 and a + k < len(ids) for k in range(BLOCK)]
                want.append((len(flat), len(flat) + a, a, ids[a], labels, valid))
            flat += ids
        got = batch.blocks
        fields = (got.start_K, got.anchor_K, got.position_K, got.token_K, got.labels_KB, got.valid_KB)
        assert list(zip(*(field.tolist() for field in fields), strict=True)) == want
        assert got.anchor_K.tolist() == sorted(got.anchor_K.tolist())
        assert [flat[a] for a in got.anchor_K] == got.token_K.tolist()
        assert {field.dtype for field in fields} == {torch.int64, torch.bool}


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


def test_blocks_do_not_depend_on_the_layout(dataset: CompletionDataset) -> None:
    other = DATA.model_copy(update={"buckets": 1, "token_budget": 60})
    one = anchors_of(list(micro_batches(dataset, DATA, train(), BLOCK)))
    two = anchors_of(list(micro_batches(dataset, other, train(context_slots=500, anchor_slots=99), BLOCK)))
    assert one == two
    assert set(one) == {(epoch, row) for epoch in range(2) for row in range(70)}
    assert any(one[0, row] != one[1, row] for row in range(70))


def test_too_long_a_sample_is_refused_before_anything_is_yielded(dataset: CompletionDataset) -> None:
    longest = int(dataset.lengths.max())
    with pytest.raises(UserError, match=rf"train\.context_slots \(40\).*{dataset.folder}.*{longest} tokens"):
        micro_batches(dataset, DATA, train(context_slots=40), BLOCK)
    with pytest.raises(UserError, match=r"train\.context_slots"):
        largest_micro_batch(dataset, DATA, train(context_slots=40), BLOCK)


def test_largest_micro_batch(dataset: CompletionDataset) -> None:
    settings = train(max_steps=1)
    largest = largest_micro_batch(dataset, DATA, settings, BLOCK)
    every = list(micro_batches(dataset, DATA, train(epochs=1), BLOCK))
    assert largest.input_ids.numel() == max(batch.input_ids.numel() for batch in every)


@pytest.mark.parametrize(
    ("batches", "changes", "steps"),
    [(6, {}, 4), (7, {}, 6), (1, {}, 2), (7, {"max_steps": 5}, 5), (7, {"max_steps": 50}, 6)],
)
def test_count_steps(batches: int, changes: dict[str, Any], steps: int) -> None:
    assert count_steps(batches, train(**changes)) == steps
