"""Speculative decoding gives the target's own greedy output, whatever the drafter proposes."""

import random

import pytest
import torch

from paceline.config import DrafterSettings
from paceline.decode import draft
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter
from paceline.records import Completion
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget

NEW = 30


@pytest.fixture(scope="module")
def target(tiny: TargetFacts, shape: DrafterSettings) -> DecodingTarget:
    return DecodingTarget(tiny, shape.taps, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 128, (n,), generator=generator).tolist() for n in (5, 2, 9, 3, 7)]


def _speculate(target, tiny, shape, prompts, rows, new=NEW):
    drafter = Drafter(shape, tiny.hidden_size).initialise(0).double()
    ends = load_ends(tiny).to("cpu", torch.float64)
    return dict(speculate(target, drafter, ends, prompts, max_new_tokens=new, rows=rows))


@pytest.fixture
def half_right(monkeypatch: pytest.MonkeyPatch, target: DecodingTarget, prompts: list[list[int]]) -> dict:
    """Replace the drafter's proposals by the target's own continuation with random mistakes."""
    plain = dict(generate(target, prompts, max_new_tokens=NEW + 8, rows=8))
    chance = random.Random(0)

    def propose(self, anchor_ids_R, anchors_R, sizes_R, reach):
        rows = []
        for token, anchor in zip(anchor_ids_R.tolist(), anchors_R.tolist(), strict=True):
            fits = [
                whole
                for index, prompt in enumerate(prompts)
                if (whole := [*prompt, *plain[index].token_ids])[anchor : anchor + 1] == [token]
            ]
            future = chance.choice(fits)[anchor + 1 :][:3] if fits else []
            future += [9] * (3 - len(future))
            rows.append([t if chance.random() < 0.8 else 11 for t in future])
        return torch.tensor(rows)

    monkeypatch.setattr(draft.DraftSession, "propose", propose)
    return plain


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_an_untrained_drafter_loses_nothing(tiny, shape, target, prompts, rows: int) -> None:
    plain = dict(generate(target, prompts, max_new_tokens=NEW, rows=rows))
    for index, completion in _speculate(target, tiny, shape, prompts, rows).items():
        assert completion.token_ids == plain[index].token_ids
        assert sum(completion.acceptance_lengths) == len(completion.token_ids) - 1


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("new", [NEW, 2, 1])
def test_partly_right_drafts_lose_nothing_and_save_cycles(
    tiny, shape, target, prompts, half_right: dict[int, Completion], rows: int, new: int
) -> None:
    done = _speculate(target, tiny, shape, prompts, rows, new)
    for index, completion in done.items():
        assert completion.token_ids == half_right[index].token_ids[:new]
        assert sum(completion.acceptance_lengths) == len(completion.token_ids) - 1
        assert all(1 <= length <= shape.block_size for length in completion.acceptance_lengths)
    if new == NEW and rows == 1:
        assert max(max(c.acceptance_lengths) for c in done.values()) == shape.block_size


def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(
    tiny, shape, target, prompts, half_right: dict[int, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = half_right[0].token_ids[5]
    monkeypatch.setattr(target, "stop_ids", (*tiny.eos_ids, stop))
    done = _speculate(target, tiny, shape, prompts, 8)
    for index, completion in done.items():
        whole = half_right[index].token_ids[:NEW]
        cut = whole.index(stop) + 1 if stop in whole else NEW
        assert completion.token_ids == whole[:cut]


def test_a_cycle_yields_its_accepted_drafts_and_the_bonus_unless_the_answer_ends(
    tiny, shape, target, prompts, half_right: dict[int, Completion]
) -> None:
    cut = 0
    for new in range(6, 16):
        for completion in _speculate(target, tiny, shape, prompts, 2, new).values():
            pairs = list(zip(completion.acceptance_lengths, completion.accepted_drafts, strict=True))
            assert all(produced == accepted + 1 for produced, accepted in pairs[:-1])
            produced, accepted = pairs[-1]
            assert produced in (accepted, accepted + 1)
            cut += produced == accepted
    assert cut > 0
