"""The least costly change of a run's settings with which every device of its roles is a card of so much memory.

Costs are ordered: a dearer change is made only where no combination of cheaper ones would do. All combinations are
tried in that order, so the first that fits is the cheapest there is.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from paceline.config import RunSettings, TrainSettings
from paceline.drafter.attention import TILE
from paceline.pipeline.slots import slots_bytes
from paceline.train.memory import StepMemory, anchor_unit, step_memory
from paceline.train.small_cards import LEAST_LOGITS_MIB, cheapest_first, small_card_ladders

Changes = Mapping[str, Any]  # settings by key

_LEAST_CREDIT_GIB = 1 / 16
_MOST_CARDS = 8  # of a replica


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory depends on beside the settings."""

    hidden_size: int
    vocab_size: int
    tied: bool
    layers: int  # of the target up to the deepest tap
    replica: Callable[[RunSettings], Sequence[int]]  # bytes of each device of a target replica
    evaluator: int = 0  # bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings, what they change, and what each role needs of each device, in bytes."""

    changes: Changes
    settings: RunSettings
    needs: Mapping[str, Mapping[str, int]]
    step: StepMemory
    slots: int

    @property
    def most(self) -> int:
        """Bytes of the device that needs most."""
        return max(sum(parts.values()) for parts in self.needs.values())


def search(run: RunSettings, shape: Shape, usable: int) -> Fit:
    """Return the cheapest settings with which no device needs more than `usable` bytes, or where none do so, those
    with which the device that needs most needs least."""
    measure = measuring(shape)
    least: Fit | None = None
    for changes in candidates(run, shape):
        found = measure(changed(run, changes), changes)
        better = least is None or found.most < least.most
        if (better or found.most <= usable) and _is_valid(found.settings):
            if found.most <= usable:
                return found
            least = found
    assert least is not None, "the settings as they are can be had"
    return least


def candidates(run: RunSettings, shape: Shape) -> Iterator[Changes]:
    """Yield all combinations of changes, the cheapest first; none at all is the first one."""
    yield from cheapest_first(ladders(run, shape))


def ladders(run: RunSettings, shape: Shape) -> list[list[Changes]]:
    """Return what may be changed, the cheapest first, and for each what it may become, as it is first."""
    small: list[list[Changes]] = [
        [{f"train.{key}": value for key, value in rung.items()} for rung in ladder]
        for ladder in small_card_ladders(run.train)
    ]
    return [
        _logits(run.train),
        _credit(run.pipeline.credit_gib),
        [{}] if run.target.features == "fp8" else [{}, {"target.features": "fp8"}],
        *small,
        _micro_batches(run),
        _places(run, shape),
    ]


def changed(run: RunSettings, changes: Changes) -> RunSettings:
    """Return the settings with changes; whether they may be had is not looked at."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    parts = {name: getattr(run, name).model_copy(update=values) for name, values in sections.items()}
    return run.model_copy(update=parts) if parts else run


def measuring(shape: Shape) -> Callable[[RunSettings, Changes], Fit]:
    """Return what says how much settings need of each device."""
    sizes: dict[str, Any] = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size, "tied": shape.tied}

    @cache
    def step_of(train: TrainSettings, drafter: Any) -> StepMemory:
        return step_memory(drafter, train, **sizes)

    replicas: dict[tuple[int, int], Sequence[int]] = {}

    def measure(run: RunSettings, changes: Changes) -> Fit:
        step, slots = step_of(run.train, run.drafter), slots_bytes(run, shape.hidden_size)
        key = run.train.context_slots, run.target.devices_per_replica
        if key not in replicas:
            replicas[key] = shape.replica(run)
        needs: dict[str, dict[str, int]] = {}
        for rank, device in enumerate(run.pipeline.drafters):
            needs.setdefault(device, {})[f"drafter rank {rank}"] = step.total + slots
        for index, devices in enumerate(run.replicas):
            for device, size in zip(devices, replicas[key], strict=True):
                own = needs.setdefault(device, {})
                own[f"target replica {index}"] = own.get(f"target replica {index}", 0) + size
        if run.evaluate.device is not None:
            needs.setdefault(run.evaluate.device, {})["evaluator"] = shape.evaluator
        return Fit(changes, run, needs, step, slots)

    return measure


def _is_valid(run: RunSettings) -> bool:
    try:
        RunSettings.model_validate(run.model_dump())
    except ValidationError:  # some go with others only
        return False
    return True


def _logits(train: TrainSettings) -> list[Changes]:
    return [{}, *({"train.logits_mib": mib} for mib in _halves(train.logits_mib, LEAST_LOGITS_MIB))]


def _credit(now: float) -> list[Changes]:
    """Return less and less that may wait; a rank has two slots at least."""
    return [{}, *({"pipeline.credit_gib": value} for value in _halves(now, _LEAST_CREDIT_GIB))]


def _halves(now: Any, least: Any) -> list[Any]:
    """Return half of a number, half of that and so on, down to the least there may be."""
    found = []
    while now > least:
        now = max(now // 2 if isinstance(now, int) else now / 2, least)
        found.append(now)
    return found


def _micro_batches(run: RunSettings) -> list[Changes]:
    """Return smaller micro-batches, of which a step has more: a step's samples are those of its plan batches, which the
    loader cuts; only packed ones are micro-batches themselves, so a step then takes more of them."""
    train, data = run.train, run.data
    unit = anchor_unit(run.drafter, train)
    least_A = min(train.anchor_slots, _up(train.anchors_per_sample, unit))
    least_C = min(train.context_slots, _up(data.max_length, TILE))  # no sample may be longer
    rungs: list[Changes] = [{}]
    A, C = train.anchor_slots, train.context_slots
    while (least_A, least_C) != (A, C):
        A, C = max(_up(A // 2, unit), least_A), max(_up(C // 2, TILE), least_C)
        rung = {"train.anchor_slots": A, "train.context_slots": C}
        if data.layout == "packed" and data.token_budget > C:
            rung |= {
                "data.token_budget": C,
                "train.batches_per_step": math.ceil(train.batches_per_step * data.token_budget / C),
            }
        now = {"train.anchor_slots": train.anchor_slots, "train.context_slots": train.context_slots}
        rungs.append({key: value for key, value in rung.items() if now.get(key) != value})
    return rungs


def _up(number: int, unit: int) -> int:
    return max(-(-number // unit), 1) * unit


def _places(run: RunSettings, shape: Shape) -> list[Changes]:
    """Return roles as they are placed, and then each on cards of its own, a replica on more and more of them."""
    replicas, ranks, each = len(run.replicas), len(run.pipeline.drafters), run.target.devices_per_replica
    devices = run.devices
    first = each + 1 if len({*devices}) == len(devices) else each  # else somebody shares a card
    rungs: list[Changes] = [{}]
    for cards in range(first, min(_MOST_CARDS, shape.layers) + 1):
        names = [f"cuda:{at}" for at in range(replicas * cards + ranks + 1)]
        rung: dict[str, Any] = {
            "pipeline.targets": tuple(names[: replicas * cards]),
            "pipeline.drafters": tuple(names[replicas * cards : -1]),
        }
        rung |= {"target.devices_per_replica": cards} if cards != each else {}
        rung |= {"evaluate.device": names[-1]} if run.evaluate.device is not None else {}
        rungs.append(rung)
    return rungs
