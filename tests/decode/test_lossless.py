"""First differences of two decodings, and which of them rounding explains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.decode.lossless import differences, first_place, near_tie_bound, next_logits
from paceline.records import Completion
from paceline.target.load import TargetFacts
from paceline.target.model import DecodingTarget


def answer(*tokens: int, prompt: tuple[int, ...] = (5, 6)) -> Completion:
    return Completion(prompt, tokens, "length", (1,), (0,))


@pytest.mark.parametrize(
    ("other", "expected"),
    [((10, 11, 12), None), ((10, 99, 12), 1), ((10, 11), 2), ((10, 11, 12, 13), 3), ((9,), 0), ((), 0)],
)
def test_the_first_place(other: tuple[int, ...], expected: int | None) -> None:
    assert first_place((10, 11, 12), other) == expected
    assert first_place(other, (10, 11, 12)) == expected


@pytest.fixture
def target(tiny: TargetFacts) -> Callable[[torch.dtype], DecodingTarget]:
    return lambda dtype: DecodingTarget(tiny, (0, 2), dtype=dtype, device="cpu")


def test_what_the_target_plainly_thinks(target: Any, tiny: TargetFacts) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    ids = [5, 6, 7, 40, 41]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(next_logits(target(torch.float32), ids), expected)


def test_a_difference_is_examined_where_the_answers_part(target: Any) -> None:
    model = target(torch.float32)
    plain = [answer(7, 8, 9), answer(7, 8, 9), answer(7)]
    other = [answer(7, 8, 9), answer(7, 30, 2), answer(7, 8)]
    parted, longer = differences(model, plain, other)
    logits = next_logits(model, [5, 6, 7])
    assert (parted.prompt, parted.place) == (1, 1)
    assert parted.gap == pytest.approx(abs(logits[8] - logits[30]).item())
    assert parted.bound == 0
    assert (longer.prompt, longer.place, longer.gap) == (2, 1, None)
    assert not parted.near_tie
    assert not longer.near_tie


def test_bfloat16_allows_what_rounding_explains(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(128, dtype=torch.bfloat16)
    logits[20] = 20.0  # whose last place in bfloat16 is 2^-3
    logits[[8, 30, 31]] = torch.tensor([10.0, 9.5, 9.4375], dtype=torch.bfloat16)
    monkeypatch.setattr("paceline.decode.lossless.next_logits", lambda target, ids: logits)
    near, far = differences(target(torch.bfloat16), [answer(7, 8), answer(7, 8)], [answer(7, 30), answer(7, 31)])
    assert (near.gap, near.bound, near.near_tie) == (0.5, 0.5, True)
    assert (far.gap, far.bound, far.near_tie) == (0.5625, 0.5, False)


def test_float32_allows_nothing_not_even_equal_logits(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.decode.lossless.next_logits", lambda target, ids: torch.zeros(128))
    (found,) = differences(target(torch.float32), [answer(7, 8)], [answer(7, 30)])
    assert (found.gap, found.bound, found.near_tie) == (0, 0, False)


@pytest.mark.parametrize(("largest", "unit"), [(1.0, 2**-7), (1.99, 2**-7), (-2.0, 2**-6), (40.0, 2**-2)])
def test_the_bound_is_four_units_in_the_last_place(largest: float, unit: float) -> None:
    logits = torch.tensor([0.1, largest], dtype=torch.bfloat16)
    following = torch.tensor([abs(largest)], dtype=torch.bfloat16).view(torch.int16) + 1
    assert (following.view(torch.bfloat16) - abs(logits[1])).item() == unit, "what the format itself does"
    assert near_tie_bound(logits) == 4 * unit
