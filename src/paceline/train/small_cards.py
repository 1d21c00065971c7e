"""The settings that make a drafter's step smaller, in the order of what they cost: the advice to who ran out of memory
and `paceline plan --memory` name the cheapest that do."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from paceline.config import TrainSettings

LEAST_LOGITS_MIB = 64  # of train.logits_mib that is advised: with fewer rows the head's products slow down
# Keys of train and what they become, the cheapest first: docs/how-to/small-cards.md says what each costs.
_ORDER = (("moments", "8bit"), ("recompute", "layers"), ("offload", "moments"))


def small_card_ladders(train: TrainSettings) -> list[list[Mapping[str, str]]]:
    """Return for each setting that may be changed how it is left and what it becomes, by its key in train, the cheapest
    first."""
    # Moments of Muon stay as and where they are.
    may = [(key, value) for key, value in _ORDER if key == "recompute" or train.optimizer == "adamw"]
    return [[{}, {key: value}] for key, value in may if getattr(train, key) != value]


def cheapest_first(ladders: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of a rung each of the ladders, which are ordered by cost: a dearer ladder's next rung
    comes when all combinations of the cheaper ones were there."""
    for chosen in product(*reversed(ladders)):  # the last of them varies fastest: the cheapest
        yield {key: value for rung in reversed(chosen) for key, value in rung.items()}
