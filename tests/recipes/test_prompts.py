"""Prompts are repeatable, unique and evenly mixed, and no held-out prompt was trained on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count

import pytest

from paceline.recipes import prompts
from paceline.recipes.prompts import GENERATORS, reasoning_prompts, split_prompts
from paceline.records import UserError


@pytest.fixture(autouse=True)
def _needs_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")


def numbered(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Replaces the generators by numbers: seed s counts from s * step on, so that small steps overlap."""

    def questions(name: str, seed: int) -> Iterator[str]:
        return (f"{name} {number}" for number in count(seed * step))

    monkeypatch.setattr(prompts, "_questions", questions)


def test_generators_take_turns() -> None:
    import reasoning_gym

    mixed = reasoning_prompts(22, seed=3)
    assert len(set(mixed)) == 22
    for place, name in enumerate(GENERATORS):
        dataset = reasoning_gym.create_dataset(name, size=8, seed=3 * prompts.SEED_STRIDE)
        known = {dataset[index]["question"] for index in range(8)}
        assert set(mixed[place :: len(GENERATORS)]) <= known


def test_equal_seeds_give_equal_prompts_and_neighbours_do_not() -> None:
    first = reasoning_prompts(200, seed=0)
    assert reasoning_prompts(200, seed=0) == first
    assert reasoning_prompts(120, seed=0) == first[:120]
    # reasoning-gym itself shifts by one question from seed to seed
    assert len(set(first) & set(reasoning_prompts(200, seed=1))) < 10


def test_split_shares_no_prompt_and_repeats() -> None:
    train, held_out = split_prompts(240, 48, seed=0)
    assert (len(train), len(held_out)) == (240, 48)
    assert len(set(train + held_out)) == 288
    assert split_prompts(240, 48, seed=0) == (train, held_out)


def test_held_out_prompts_that_were_trained_on_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(monkeypatch, step=2)  # held-out starts two questions later, inside the training range
    train, held_out = split_prompts(16, 8, seed=0)
    assert train[::4] == [f"gsm_symbolic {number}" for number in range(4)]
    assert held_out[::4] == [f"gsm_symbolic {number}" for number in (4, 5)]
    assert not set(train) & set(held_out)


def test_a_generator_without_new_questions_ends_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_questions", lambda name, seed: (str(number % 3) for number in count()))
    with pytest.raises(UserError, match="chain_sum ran out of new questions"):
        reasoning_prompts(4, seed=0, generators=("chain_sum",))


def test_bad_arguments() -> None:
    assert reasoning_prompts(0, seed=0) == []
    with pytest.raises(UserError, match="no usable generator 'chain_sums'"):
        reasoning_prompts(1, seed=0, generators=("chain_sums",))
    with pytest.raises(UserError, match="prompts need a count"):
        reasoning_prompts(-1, seed=0)
    with pytest.raises(UserError, match="prompts need a count"):
        reasoning_prompts(1, seed=0, generators=())


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning_gym: install it with `pip install 'paceline\[demo\]'`"):
        split_prompts(1, 1, seed=0)
