"""Acceptance counted by hand."""

import pytest

from paceline.decode.evaluate import acceptance
from paceline.records import Completion, RunError


def completion(tokens: int, lengths: tuple[int, ...] = (), accepted: tuple[int, ...] = ()) -> Completion:
    return Completion((5,), tuple(range(10, 10 + tokens)), "length", lengths, accepted)


def test_acceptance_of_two_prompts_by_hand() -> None:
    # B = 4. First prompt: cycles of 3 and 1 tokens. Second: 4, 4 and 2, the last cut by the limit although its three
    # drafts were all right.
    done = [completion(5, (3, 1), (2, 0)), completion(11, (4, 4, 2), (3, 3, 3))]
    result = acceptance(done, block_size=4)
    assert result.prompts == 2
    assert result.cycles == 5
    assert result.tokens == 14
    assert result.tau == pytest.approx((4 / 2 + 10 / 3) / 2)
    assert result.tau_pooled == pytest.approx(14 / 5)
    assert result.per_slot_acceptance == pytest.approx((1, 4 / 5, 4 / 5, 3 / 5))


def test_a_perfect_drafter_is_accepted_in_every_slot_however_answers_end() -> None:
    result = acceptance([completion(9, (4, 4), (3, 3)), completion(3, (2,), (3,))], block_size=4)
    assert result.per_slot_acceptance == (1, 1, 1, 1)


def test_an_answer_of_one_token_has_no_cycle() -> None:
    assert acceptance([completion(1), completion(3, (2,), (1,))], block_size=4).tau == 2
    with pytest.raises(RunError, match="No prompt needed a draft cycle"):
        acceptance([completion(1)], block_size=4)
