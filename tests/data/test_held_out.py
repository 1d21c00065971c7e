"""Held-out micro-batches come behind the steps that are due, whole and the same each time, and change nothing else."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import blocks
from paceline.config import DataSettings, EvaluateSettings, TrainSettings
from paceline.data.held_out import HeldOut, open_held_out, with_held_out
from paceline.data.loader import count_steps, micro_batches
from paceline.data.mixture import Mixture
from paceline.data.store import CompletionDataset
from paceline.records import BlockSet, TokenBatch, UserError

BLOCK, FIRST_ROW, MOST = 4, 30, 23
DATA = DataSettings(dataset="d", align=8, buckets=3, token_budget=150, max_batch=6)
LAYOUTS = {
    "bucketed": DATA.model_copy(update={"layout": "bucketed"}),
    "trimmed": DATA,
    "packed": DATA.model_copy(update={"layout": "packed", "token_budget": 64}),
}
Rows = list[tuple[list[int], int]]


def train(**changes: Any) -> TrainSettings:
    small = {"epochs": 2, "context_slots": 64, "anchor_slots": 12, "anchors_per_sample": 5, "batches_per_step": 2}
    return TrainSettings(**{**small, "seed": 4, **changes})


def draw_rows(seed: int, count: int) -> Rows:
    rng = np.random.default_rng(seed)
    return [(rng.integers(10, 99, rng.integers(4, 60)).tolist(), int(rng.integers(1, 3))) for _ in range(count)]


@pytest.fixture
def mixture(make_dataset: Callable[..., CompletionDataset]) -> Mixture:
    return Mixture([make_dataset(draw_rows(1, FIRST_ROW))])


@pytest.fixture
def rows() -> Rows:
    return draw_rows(2, 40)


@pytest.fixture
def held(make_dataset: Callable[..., CompletionDataset], rows: Rows) -> CompletionDataset:
    return make_dataset(rows, "held")


def opened(
    held: CompletionDataset, data: DataSettings = DATA, settings: TrainSettings | None = None, rows: int = MOST
) -> HeldOut:
    evaluate = EvaluateSettings(held_out=str(held.folder), max_rows=rows)
    made = open_held_out(evaluate, data, settings or train(), BLOCK, first_row=FIRST_ROW)
    assert made is not None
    return made


def plain(batch: TokenBatch) -> list[object]:
    """Everything in a micro-batch, to be compared."""
    tensors = [batch.input_ids, batch.places_T, *(getattr(batch.blocks, field.name) for field in fields(BlockSet))]
    values = [batch.seq, batch.epoch, batch.step, batch.closes_step, batch.samples, batch.lengths, batch.held_out]
    return [*values, *(tensor.tolist() for tensor in tensors)]


def expected_row(ids: list[int], prompt: int, row: int, start: int) -> list[tuple[object, ...]]:
    """The blocks of a held-out row that begins at flat slot `start`, from the rule as it is told to people."""
    found: list[tuple[object, ...]] = []
    for a in blocks.sample_anchors(np.arange(prompt, len(ids) - 1), 5, seed=0, epoch=0, sample=row).tolist():
        labels = [ids[a + k] if k and a + k < len(ids) else 0 for k in range(BLOCK)]
        valid = [k > 0 and a + k < len(ids) for k in range(BLOCK)]
        found.append((start, start + a, a, ids[a], labels, valid))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_comes_once_with_its_tokens_and_the_same_blocks(
    held: CompletionDataset, rows: Rows, layout: str
) -> None:
    data = LAYOUTS[layout]
    made = opened(held, data)
    seen: list[int] = []
    group = list(made.micro_batches(7, epoch=1))
    assert [batch.closes_step for batch in group] == [False] * (len(group) - 1) + [True]
    assert {(batch.step, batch.epoch, batch.held_out) for batch in group} == {(7, 1, True)}
    for batch in group:
        flat, want = [], []
        for sample in batch.samples:
            ids, prompt = rows[sample - FIRST_ROW]
            want += expected_row(ids, prompt, sample - FIRST_ROW, len(flat))
            flat += ids
        assert batch.input_ids.flatten()[batch.places_T].tolist() == flat
        got = batch.blocks
        columns = (got.start_K, got.anchor_K, got.position_K, got.token_K, got.labels_KB, got.valid_KB)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == want
        assert batch.num_tokens <= 64
        assert len(want) <= 12
        assert batch.input_ids.numel() <= data.token_budget, "never more than a batch of training may have"
        assert (len(batch.input_ids) == 1) if layout == "packed" else (len(batch.input_ids) == len(batch.samples))
        seen += batch.samples
    assert sorted(seen) == list(range(FIRST_ROW, FIRST_ROW + MOST)), "the first rows, behind those of training"
    assert made.rows == MOST
    assert made.largest().input_ids.numel() == max(batch.input_ids.numel() for batch in group)
    assert len(group) > 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_come_behind_the_steps_that_are_due_and_nothing_else_moves(
    held: CompletionDataset, mixture: Mixture, layout: str
) -> None:
    data, settings = LAYOUTS[layout], train(max_steps=11)
    made, total = opened(held, data), count_steps(mixture, data, settings)
    assert total == 11, "the end is due although it is no third step"
    evaluate = EvaluateSettings(held_out="held", every_steps=3)
    whole = list(with_held_out(micro_batches(mixture, data, settings, BLOCK), made, lambda n: evaluate.due(n, total)))
    want: list[TokenBatch] = []
    for batch in micro_batches(mixture, data, settings, BLOCK):
        want.append(replace(batch, seq=len(want)))
        if batch.closes_step and (batch.step + 1 in range(3, total, 3) or batch.step + 1 == total):
            want += [
                replace(other, seq=len(want) + other.seq) for other in made.micro_batches(batch.step, epoch=batch.epoch)
            ]
    assert [plain(batch) for batch in whole] == [plain(batch) for batch in want]
    assert sum(batch.held_out and batch.closes_step for batch in whole) == -(-total // 3)

    for first in (1, 3, 4, total - 1, total):  # a run that goes on after so many steps, looked at already where due
        rest = [batch for batch in whole if batch.step >= first]
        stream = micro_batches(mixture, data, settings, BLOCK, first_step=first)
        got = with_held_out(stream, made, lambda n: evaluate.due(n, total))
        for place, (one, other) in enumerate(zip(got, rest, strict=True)):
            assert plain(one) == plain(replace(other, seq=place))

    for owed in (3, total):  # and one that broke before it looked
        rest = [batch for batch in whole if batch.step >= owed - batch.held_out]
        stream = micro_batches(mixture, data, settings, BLOCK, first_step=owed)
        got = with_held_out(stream, made, lambda n: evaluate.due(n, total), owed=owed)
        for place, (one, other) in enumerate(zip(got, rest, strict=True)):
            assert plain(one) == plain(replace(other, seq=place, epoch=one.epoch if other.step < owed else other.epoch))


def test_without_held_out_rows_the_stream_is_as_it_was(mixture: Mixture) -> None:
    nothing = open_held_out(EvaluateSettings(), DATA, train(), BLOCK, first_row=FIRST_ROW)
    assert nothing is None
    assert not EvaluateSettings().due(200, 200)
    stream = list(micro_batches(mixture, DATA, train(), BLOCK))
    same = list(with_held_out(iter(stream), nothing, lambda steps: True))
    assert all(one is other for one, other in zip(stream, same, strict=True))


def test_runs_with_other_seeds_and_other_data_look_at_the_same_blocks(
    held: CompletionDataset,
) -> None:
    evaluate = EvaluateSettings(held_out=str(held.folder), max_rows=MOST)
    one, other = opened(held), open_held_out(evaluate, DATA, train(seed=9), BLOCK, first_row=5)
    assert other is not None
    for left, right in zip(one.micro_batches(4), other.micro_batches(4), strict=True):
        assert plain(replace(left, samples=())) == plain(replace(right, samples=()))
        assert [row - FIRST_ROW for row in left.samples] == [row - 5 for row in right.samples]
        assert torch.equal(left.input_ids, right.input_ids)


def test_all_rows_where_there_are_fewer_and_edges_of_their_own(held: CompletionDataset) -> None:
    short = DATA.model_copy(update={"edges": (8,), "weights": (2.0,)})  # hand-written for the training rows
    assert opened(held, short, rows=999).rows == 40


def test_what_does_not_fit_is_refused(
    held: CompletionDataset, make_dataset: Callable[..., CompletionDataset], rows: Rows
) -> None:
    longest = max(len(ids) for ids, _ in rows)
    with pytest.raises(
        UserError, match=rf"context_slots \(40\), got row .*held \(evaluate.held_out\) with {longest} t"
    ):
        opened(held, settings=train(context_slots=40))
    with pytest.raises(UserError, match=rf"token_budget must hold .* row \d+ of {held.folder} of \d+ tokens"):
        opened(held, DATA.model_copy(update={"token_budget": 32}))
    with pytest.raises(UserError, match=r"none \(evaluate\.held_out\) has no rows"):
        opened(make_dataset([], "none"))
    with pytest.raises(UserError, match="nowhere"):
        open_held_out(EvaluateSettings(held_out="nowhere"), DATA, train(), BLOCK, first_row=0)
