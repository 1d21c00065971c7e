"""`paceline plan RUN.yaml --memory 24GiB`: the cheapest settings with which every role fits a card of that size."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import DataSettings, RunSettings
from paceline.config_file import dump_value
from paceline.data.mixture import Coverage
from paceline.data.plan import BucketTable
from paceline.drafter.float8 import check_sizes, product_sizes
from paceline.observe.console import Console
from paceline.pipeline.cards import card_for, usable_of
from paceline.pipeline.fit_search import Changes, Fit, Shape, changed, measuring, search
from paceline.recipes.plan_memory import sizes_of_target, target_folder
from paceline.recipes.plan_rate import expected_rate
from paceline.recipes.target_memory import beyond_estimate, replica_memory
from paceline.records import UserError
from paceline.target.load import describe, load_config
from paceline.train.memory import gib, sizes_for_tiles


@dataclass(frozen=True, slots=True)
class Card:
    """What `--memory` and the option beside it say."""

    memory: int  # bytes
    profile: Path | None  # of the machine whose rates are taken


def plan_fit(
    asked: Card,
    run: RunSettings,
    epoch: Callable[[DataSettings], BucketTable],
    share: Coverage,
    console: Console,
    evaluator: int | None,
) -> dict[str, Any]:
    """Print which settings to change and what is expected of them, and return it.

    `epoch` says what the first epoch looks like, packed rows of which may become shorter; `evaluator` is what that
    needs.

    Raises:
        UserError: nothing fits, and what would is said; or memory is not estimated, and why is said.
    """
    shape, usable = _shape(run, evaluator), usable_of(asked.memory)
    found = search(run, shape, usable)
    if found.most > usable:
        raise UserError(_nothing_fits(found, asked.memory))
    now, beyond = measuring(shape)(run, {}), beyond_estimate(run, _kind(run))
    so_far = " as far as is estimated" if beyond else ""
    console.line(f"  on cards of {gib(asked.memory)}, of which about {gib(usable)} can be used:")
    if beyond:
        console.line(f"  of a target only what it needs at least is counted: {beyond}")
    if found.changes:
        _tell_changes(found.changes, now, usable, so_far, console)
    else:
        console.line(f"  the settings fit as they are{so_far}")
    _tell_needs(found, bool(beyond), console)
    beside = _tell_target(found, shape, usable, so_far, console)
    rate = expected_rate(found.settings, asked.profile, epoch(found.settings.data), share, console)
    return {
        "card": asked.memory,
        "usable": usable,
        "changes": dict(found.changes),
        "overrides": overrides(found.changes),
        "needs": {device: dict(parts) for device, parts in found.needs.items()},
        "needs_now": {device: dict(parts) for device, parts in now.needs.items()},
        "step": found.step.as_dict(),
        "slots": found.slots,
        "target_fits_beside": beside,
        "target_needs_more": beyond,
        "rate": rate,
    }


def overrides(changes: Changes) -> list[str]:
    """Return changes as they are written behind RUN.yaml."""
    return [f"{key}={_plain(value)}" for key, value in changes.items()]


def _plain(value: Any) -> str:
    """Return a value without the quotes that a file has around devices' names, which a shell would take for its own."""
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else dump_value(value)


def _shape(run: RunSettings, evaluator: int | None) -> Shape:
    if rules := sizes_for_tiles(run.drafter, run.train):
        raise UserError(f"plan --memory estimates attention over tiles, for which {rules}. Set it so.")
    if run.train.policy == "eager":
        raise UserError("plan --memory estimates a compiled or captured step, got train.policy eager. Set it to auto.")
    folder = target_folder(run.target)
    if folder is None:
        raise UserError(
            f"plan --memory needs the target's shape, but target.model {run.target.model} is not on this machine. Name "
            "its folder."
        )
    if run.evaluate.device is not None and evaluator is None:
        raise UserError(
            "plan --memory needs to know what the evaluator takes, which is not estimated here (see above). Set "
            "evaluate.device to null to plan without."
        )
    facts = describe(str(folder))
    sizes = sizes_of_target(run.target, Console(json=True))
    assert sizes is not None, "its configuration was read"
    if run.train.fp8 == "on":
        check_sizes(product_sizes(run.drafter, run.train, sizes["hidden_size"]))  # as train does
    return Shape(
        **sizes,
        layers=max(run.drafter.taps) + 1,
        replica=lambda settings: [part.total for part in replica_memory(settings, facts)],
        evaluator=evaluator or 0,
    )


def _kind(run: RunSettings) -> str:
    folder = target_folder(run.target)
    assert folder is not None, "its shape was read"
    return str(load_config(folder).model_type)


def _nothing_fits(least: Fit, memory: int) -> str:
    device, parts = max(least.needs.items(), key=lambda one: sum(one[1].values()))
    whom = ", ".join(f"{who} {gib(size)}" for who, size in parts.items())
    changes = f"with {', '.join(overrides(least.changes))}" if least.changes else "with the settings as they are"
    return (
        f"--memory must leave room for every role, but no settings fit cards of {gib(memory)}: at least, {changes}, "
        f"{device} needs {gib(least.most)} ({whom}), that is a card of {card_for(least.most)}. Use such cards, or "
        f"{_lowers(max(parts, key=lambda who: parts[who]), least.settings)}."
    )


def _lowers(who: str, run: RunSettings) -> str:
    """Return what makes a role smaller beside what the search has tried."""
    if who.startswith("drafter"):
        return "lower drafter.layers, drafter.intermediate_size or train.anchors_per_sample"
    if who == "evaluator":
        return "set evaluate.device to another one, or to null"
    halves = "set target.fp8 to on, or " if run.target.fp8 == "off" and run.target.fast == "auto" else ""
    return f"{halves}take a smaller target, or taps of earlier layers (drafter.taps)"


def _tell_changes(changes: Changes, now: Fit, usable: int, so_far: str, console: Console) -> None:
    over = {device: sum(parts.values()) for device, parts in now.needs.items() if sum(parts.values()) > usable}
    needs = " and ".join(f"{device} needs {gib(size)}" for device, size in over.items())
    console.line(f"  as it is {needs}. The least costly changes that fit{so_far}, for RUN.yaml:")
    sections: dict[str, list[str]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"  {name}: {dump_value(value)}")
    for section, lines in sections.items():
        for line in (f"{section}:", *lines):
            console.line(f"    {line}")
    console.line(f"  or behind it: {shlex.join(overrides(changes))}")


def _tell_needs(found: Fit, more: bool, console: Console) -> None:
    """Print the parts of each device; `more` says that a target needs more than is counted."""
    for device, parts in found.needs.items():
        short = more and any(who.startswith("target replica") for who in parts)
        console.line(f"  {device} then needs {'at least' if short else 'about'} {gib(sum(parts.values()))}:")
        rows: list[tuple[str, int]] = []
        for who, size in parts.items():
            if who.startswith("drafter rank"):
                rows += [*found.step.parts().items(), ("slots for features", found.slots)]
            else:
                rows.append((who, size))
        console.table("", ("part", "GiB"), [(name, f"{size / 2**30:.2f}") for name, size in rows])
    if found.step.host:
        console.line(f"  each drafter rank keeps {gib(found.step.host)} of moments in host memory (train.offload)")


def _tell_target(found: Fit, shape: Shape, usable: int, so_far: str, console: Console) -> bool:
    """Return whether a target replica and a drafter rank fit one card with the settings that were found."""
    run = found.settings
    alone = changed(run, {"target.devices_per_replica": 1})
    both = found.step.total + found.slots + sum(shape.replica(alone))
    cards, each = len({*run.devices}), run.target.devices_per_replica
    if both <= usable:
        console.line(f"  the target fits on the drafter's card{so_far}")
    else:
        a_replica = f"{each} cards for each target replica (target.devices_per_replica)" if each > 1 else "one card"
        console.line(
            f"  the target does not fit on the drafter's card: together they need {gib(both)}; {cards} cards in all, "
            f"{a_replica}{'' if each > 1 else ' for each target replica'}"
        )
    return both <= usable
