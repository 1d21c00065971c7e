"""Acceptance by context length and category, against plain loops and counts by hand."""

import random
from collections import defaultdict
from statistics import fmean
from typing import Any

import pytest
import torch

from paceline.config import DrafterSettings
from paceline.decode.breakdown import anchors, by_category, by_context
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter
from paceline.records import Completion
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget


def done(prompt: int, lengths: tuple[int, ...]) -> Completion:
    return Completion((5,) * prompt, (6,) * (1 + sum(lengths)), "length", lengths, lengths)


def test_bins_by_hand() -> None:
    # Anchors of the first: 60, 63, 64, 68. The second has none: its answer was the first token alone.
    found = by_context([done(60, (3, 1, 4, 2)), done(9, ()), done(127, (2, 2)), done(1000, (1,))])
    assert found == [
        {"from": 0, "to": 63, "cycles": 2, "tau": 2},
        {"from": 64, "to": 127, "cycles": 3, "tau": pytest.approx(8 / 3)},
        {"from": 128, "to": 255, "cycles": 1, "tau": 2},
        {"from": 512, "to": 1023, "cycles": 1, "tau": 1},
    ]


def test_bins_hold_every_cycle_once() -> None:
    rng = random.Random(0)
    completions = [
        done(rng.randrange(1, 3000), tuple(rng.randrange(1, 9) for _ in range(rng.randrange(40)))) for _ in range(60)
    ]
    expected = defaultdict(list)
    for one in completions:
        position = len(one.prompt_ids)
        for length in one.acceptance_lengths:
            low = next(low for low in [2**e for e in range(12, 5, -1)] + [0] if position >= low)
            expected[low].append(length)
            position += length
    found = by_context(completions)
    assert [one["from"] for one in found] == sorted(expected)
    assert {one["from"]: (one["cycles"], one["tau"]) for one in found} == {
        low: (len(lengths), pytest.approx(fmean(lengths))) for low, lengths in expected.items()
    }


def test_anchors_are_where_the_engine_drafts(
    monkeypatch: pytest.MonkeyPatch, tiny: TargetFacts, shape: DrafterSettings
) -> None:
    """The positions of the blocks that the drafter itself is given."""
    seen: list[int] = []
    whole = Drafter.forward

    def watched(self: Drafter, embeds: Any, positions_GQ: torch.Tensor, *rest: Any) -> Any:
        seen.extend(positions_GQ[:, 0].tolist())
        return whole(self, embeds, positions_GQ, *rest)

    monkeypatch.setattr(Drafter, "forward", watched)
    target = DecodingTarget(tiny, shape.taps, dtype=torch.float32, device="cpu")
    ends = load_ends(tiny).to("cpu", torch.float32)
    drafter = Drafter(shape, tiny.hidden_size).initialise(0).eval()
    ((_, completion),) = speculate(target, drafter, ends, [[5, 6, 7]], max_new_tokens=20, rows=1)
    assert list(anchors(completion))[: len(completion.acceptance_lengths)] == seen
    assert len(seen) > 3


def test_categories_by_hand() -> None:
    completions = [done(4, (3, 1)), done(4, (4,)), done(4, (2, 2, 2)), done(4, ())]
    assert by_category(completions, ["math", "code", "math", None]) == [
        {"category": "math", "prompts": 2, "cycles": 5, "tau": 2, "tau_pooled": 2},
        {"category": "code", "prompts": 1, "cycles": 1, "tau": 4, "tau_pooled": 4},
        {"category": "(none)", "prompts": 1, "cycles": 0, "tau": None, "tau_pooled": None},
    ]
    pooled = by_category([done(4, (4, 4, 4)), done(4, (1,))], ["a", "a"])
    assert (pooled[0]["tau"], pooled[0]["tau_pooled"]) == (2.5, 3.25)
    assert by_category(completions, [None] * 4) == []
