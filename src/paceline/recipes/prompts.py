"""Prompts without end: questions that reasoning-gym's seeded generators make up, unique, train and held-out apart."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import count as count_up

from paceline.records import UserError

GENERATORS = ("gsm_symbolic", "chain_sum", "simple_equations", "leg_counting")
# Question i of seed s is drawn from seed s + i, so neighbouring seeds give the same questions shifted by one.
SEED_STRIDE = 1_000_000
MAX_REPEATS = 1_000  # so many known questions in a row, and the generator has nothing new


def reasoning_prompts(
    count: int, seed: int, generators: tuple[str, ...] = GENERATORS, exclude: Set[str] = frozenset()
) -> list[str]:
    """`count` different questions, taken from each generator in turn; none of them is in `exclude`."""
    if count < 0 or seed < 0 or not generators:
        raise UserError(f"prompts need a count and a seed from 0 and a generator: got {count}, {seed}, {generators}")
    streams = {name: _questions(name, seed) for name in generators}
    taken = set(exclude)
    prompts: list[str] = []
    while len(prompts) < count:
        name = generators[len(prompts) % len(generators)]
        prompts.append(_next_new(name, streams[name], taken))
    return prompts


def split_prompts(train: int, held_out: int, seed: int) -> tuple[list[str], list[str]]:
    """Training and held-out prompts from two seeds; no prompt is in both, and equal arguments give equal lists."""
    training = reasoning_prompts(train, 2 * seed)
    return training, reasoning_prompts(held_out, 2 * seed + 1, exclude=frozenset(training))


def _next_new(name: str, questions: Iterator[str], taken: set[str]) -> str:
    """The next question that is not yet in `taken`, where it is noted."""
    for _ in range(MAX_REPEATS):
        question = next(questions)
        if question not in taken:
            taken.add(question)
            return question
    raise UserError(f"the generator {name} ran out of new questions: ask for fewer prompts or more generators")


def _questions(name: str, seed: int) -> Iterator[str]:
    """The generator's questions for `seed`, made one by one."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(
            f"prompts need the Python package {error.name}: install it with `pip install 'paceline[demo]'`"
        ) from error
    try:
        dataset = reasoning_gym.create_dataset(name, size=SEED_STRIDE, seed=seed * SEED_STRIDE)
    except ValueError as error:
        raise UserError(f"reasoning-gym has no usable generator {name!r} ({error}): name another") from error
    return (dataset[index]["question"] for index in count_up())
