"""Geometry against element-wise statements of the rules."""

import math

import numpy as np
import pytest
import torch

from paceline import blocks


def test_slot_weights_are_those_of_the_paper() -> None:
    weights = blocks.slot_weights(16, blocks.default_gamma(16))
    assert weights[0] == 0
    assert [round(float(w), 3) for w in weights[1:5]] == [1.0, 0.867, 0.751, 0.651]
    assert float(weights.sum()) == pytest.approx(6.631, abs=1e-3)
    assert [blocks.default_gamma(b) for b in (8, 10, 16)] == [4, 5, 7]
    assert float(blocks.slot_weights(8, 4.0)[7]) == pytest.approx(math.exp(-6 / 4))


def test_candidates_are_supervised_and_followed_by_a_supervised_token() -> None:
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1], dtype=bool)
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert blocks.anchor_candidates(mask).tolist() == expected == [2, 3, 9]
    assert blocks.anchor_candidates(np.array([True])).tolist() == []


def test_anchors_are_a_sorted_subset_that_depends_on_seed_epoch_and_sample_alone() -> None:
    candidates = np.arange(10, 60)
    drawn = blocks.sample_anchors(candidates, 8, seed=1, epoch=2, sample=3)
    assert len(set(drawn.tolist())) == 8
    assert set(drawn) <= set(candidates)
    assert sorted(drawn) == drawn.tolist()
    assert np.array_equal(drawn, blocks.sample_anchors(candidates, 8, seed=1, epoch=2, sample=3))
    for other in ({"seed": 2}, {"epoch": 3}, {"sample": 4}):
        changed = {"seed": 1, "epoch": 2, "sample": 3} | other
        assert not np.array_equal(drawn, blocks.sample_anchors(candidates, 8, **changed))
    assert blocks.sample_anchors(candidates, 99, seed=0, epoch=0, sample=0).tolist() == candidates.tolist()


def test_every_candidate_is_drawn_equally_often() -> None:
    counts = np.zeros(20)
    for epoch in range(2000):
        counts[blocks.sample_anchors(np.arange(20), 5, seed=0, epoch=epoch, sample=0)] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05  # 5 standard deviations


@pytest.mark.parametrize("words", [1, 2, 5, 2**64 - 1])
def test_the_draw_takes_the_smallest_words_and_of_equal_ones_the_first(
    monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """The rule as it was first written down, a stable sort, with few words so that many are equal."""
    raw = np.random.Philox

    class Few:
        def __init__(self, key: list[int], counter: list[int]) -> None:
            self.stream = raw(key=key, counter=counter)

        def random_raw(self, size: int) -> np.ndarray:
            return self.stream.random_raw(size) % np.uint64(words)

    monkeypatch.setattr(np.random, "Philox", Few)
    for sample in range(40):
        candidates = np.flatnonzero(np.arange(90 + sample) % 7)
        drawn = Few([5, sample], [0, 0, 0, 3]).random_raw(len(candidates))
        for count in (1, 8, len(candidates) - 1, len(candidates), 500):
            want = np.sort(candidates[np.argsort(drawn, kind="stable")[:count]])
            got = blocks.sample_anchors(candidates, count, seed=5, epoch=3, sample=sample)
            assert got.tolist() == want.tolist()


def test_labels_sit_at_anchor_plus_slot_and_end_with_the_sample() -> None:
    ids = np.arange(100, 112)
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=bool)
    anchors, B = np.array([2, 4, 9]), 5
    more = np.array([7, 8, 9])  # of a sample that follows
    ends = np.full(3, len(ids))
    labels, valid = blocks.block_labels(np.append(ids, more), np.append(mask, more > 0), anchors, ends, B)
    alone = blocks.block_labels(ids, mask, anchors, ends, B)
    assert np.array_equal(alone[0], labels)
    assert np.array_equal(alone[1], valid)
    for row, anchor in enumerate(anchors.tolist()):
        for slot in range(B):
            place = anchor + slot
            has_loss = slot > 0 and place < len(ids) and bool(mask[place])
            assert bool(valid[row, slot]) == has_loss
            assert int(labels[row, slot]) == (int(ids[place]) if has_loss else 0)


def test_mask_shows_the_context_before_the_anchor_and_the_own_block_only() -> None:
    start = torch.tensor([[0, 0, 5], [2, 4, 4]])
    anchor = torch.tensor([[2, 4, 9], [3, 4, 8]])
    G, A, B, C = 2, 3, 4, 10
    present = torch.ones(G, A, B, dtype=torch.bool)
    present[1, 2, 3] = False
    mask = blocks.block_mask(start, anchor, present, C)
    assert mask.shape == (G, A * B, C + A * B)
    for g in range(G):
        for query in range(A * B):
            a = query // B
            for key in range(C + A * B):
                if key < C:
                    seen = start[g, a] <= key < anchor[g, a]
                else:
                    b, slot = divmod(key - C, B)
                    seen = a == b and present[g, b, slot]
                assert bool(mask[g, query, key]) == bool(seen), (g, query, key)


def test_inputs_and_positions_of_a_block() -> None:
    ids = blocks.block_ids(torch.tensor([7, 9]), mask_token_id=3, block_size=4)
    assert ids.tolist() == [[7, 3, 3, 3], [9, 3, 3, 3]]
    assert blocks.block_positions(torch.tensor([5, 0]), 4).tolist() == [[5, 6, 7, 8], [0, 1, 2, 3]]


def test_context_positions_start_anew_with_each_sample() -> None:
    assert blocks.context_positions((3, 1, 2)).tolist() == [0, 1, 2, 0, 0, 1]


def test_leading_matches_stop_at_the_first_miss() -> None:
    matches = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert blocks.leading_matches(matches).tolist() == [2, 0, 4]
