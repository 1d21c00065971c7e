"""What `paceline train --resume` goes on from, and what it refuses to go on with."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.checkpoint import store
from paceline.checkpoint.best import Best, By
from paceline.checkpoint.folder import free_bytes
from paceline.checkpoint.store import Saved
from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.records import UserError, many
from paceline.target.load import TargetFacts
from paceline.train.memory import step_memory

# What may be another when a run goes on: how it is carried out, but not what it computes beyond rounding; which updates
# are rejected from now on; and where target and datasets lie, because their fingerprints are compared, and those of
# the prompts.
_TRAIN = ("train.policy", "train.log_every", "train.logits_mib", "train.recompute", "train.offload")
_DATA = ("data.prefetch", "data.bad_rows")
_EVALUATE = tuple(f"evaluate.{key}" for key in ("every_steps", "device", "tau_every_steps", "rows", "disagreement"))
_HOW = ("run_dir", "target.fast", "pipeline.", "checkpoint.", "guard.", "observe.", *_EVALUATE, *_DATA, *_TRAIN)
_PROMPTS = ("evaluate.prompts", "evaluate.max_prompts", "evaluate.max_new_tokens")
_WHERE = ("data.dataset", "target.model", "target.revision", "evaluate.held_out", *_PROMPTS)


def find_start(run: Path, facts: dict[str, Any], *, previous: bool, console: Console) -> Saved | None:
    """Return the checkpoint to go on from, or None where the run was ended before its first.

    Raises:
        UserError: a checkpoint is damaged, or the run was another one.
    """
    start = store.newest(run, previous=previous, tell=console.line)
    if start is None:
        console.line(f"  {run} was ended before its first checkpoint: it starts from the beginning")
        return None
    _check_same(start, facts)
    changed = [name for name, number in facts["versions"].items() if start.state["versions"].get(name) != number]
    if changed:
        was = ", ".join(f"{name} {start.state['versions'].get(name)}" for name in changed)
        console.line(f"  the checkpoint was made with {was}: what follows may differ in rounding")
    console.line(f"  going on after step {start.steps:,} of {facts['total_steps']:,}")
    return start


def best_so_far(run: Path, start: Saved | None, by: By | None, console: Console) -> Best:
    """Return the best state as of the checkpoint to go on from, and let the pointers agree with it.

    What nothing measures any more (`by` is None) stays the best by what it was.
    """
    if start is not None:
        store.point_latest(run, start.steps)
    before = (start.state.get("best") if start else None) or {}
    by = by or ("tau" if "tau" in before else "loss")
    best, what = Best(**before, by=by), {"loss": "held-out loss", "tau": "true acceptance"}
    if before and best.steps is None:
        console.line(
            f"  the best checkpoint, after step {before['steps']:,}, was chosen by another measure: the "
            f"next {what[by]} counts as the best, and that one is kept no longer than others are"
        )
    if store.point_best(run, best.steps) or best.steps is None:
        return best
    console.line(f"  the best checkpoint, after step {best.steps:,}, is gone: the next {what[by]} counts as the best")
    return Best(by=by)


def _check_same(start: Saved, facts: dict[str, Any]) -> None:
    try:
        before = RunSettings.model_validate(start.state["settings"])
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            f"Checkpoint {start.folder} was made by another version of paceline, whose setting {key} this one does not "
            "take. Go on with that version."
        ) from None
    was, now = _leaves(before), _leaves(RunSettings.model_validate(facts["settings"]))
    changed = [f"{key} was {was[key]!r} and is {now[key]!r}" for key in now if was[key] != now[key]]
    if changed:
        raise UserError(
            f"Going on from {start.folder} keeps what is learnt the same, but {', '.join(changed)}. Put that back, or "
            "start anew in another run_dir."
        )
    for key, what, remedy in (
        ("target_revision", "the target", "target.model"),
        ("datasets", "the data", "data.dataset"),
        ("held_out", "the held-out data", "evaluate.held_out"),
        ("prompts", "the prompts and their answers' limit", "evaluate.prompts, max_prompts and max_new_tokens"),
        ("total_steps", "the number of steps", "data and train"),
    ):
        either = key == "prompts" and None in (start.state.get(key), facts[key])  # evaluate.device was null, or is
        if start.state.get(key) != facts[key] and not either:
            raise UserError(
                f"Going on from {start.folder} needs {what} as before, {_short(start.state.get(key))}, got "
                f"{_short(facts[key])}. Put {remedy} back, or start anew in another run_dir."
            )


def _leaves(settings: RunSettings) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in settings:
        inside = {f"{name}.{key}": leaf for key, leaf in value} if isinstance(value, BaseModel) else {name: value}
        tree |= {key: leaf for key, leaf in inside.items() if not key.startswith(_HOW + _WHERE)}
    return tree


def _short(value: object) -> str:
    return " ".join(str(item)[:12] for item in value) if isinstance(value, list) else f"{value}"[:16]


def check_room(run: Path, settings: RunSettings, facts: TargetFacts) -> None:
    """Refuse to start where the checkpoints that the settings keep and the drafter have no room.

    Raises:
        UserError: the disk has less than they need beside what the run has written already.
    """
    one, keep = state_bytes(settings, facts), settings.checkpoint.keep
    by = settings.evaluate.best_by
    best = {"tau": 2, "loss": 1, None: 0}[by]
    there = sum(path.stat().st_size for path in store.folder_of(run).glob("step-*/*"))
    needed, free = (keep + best + 2) * one - there, free_bytes(run)  # the drafter is less than one
    if free < needed:
        the_best = {
            "tau": " the best one, one that may be (evaluate.device),",
            "loss": " the best one (evaluate.held_out),",
            None: "",
        }[by]
        raise UserError(
            f"{run} (run_dir) needs {_gib(needed)} for {many(keep, 'checkpoint')} (checkpoint.keep),{the_best} "
            "one more "
            f"while it is written, and the drafter, but its disk has {_gib(free)} free. Make room, or choose "
            "another place."
        )


def state_bytes(settings: RunSettings, facts: TargetFacts) -> int:
    """Return what the tensors of a checkpoint take."""
    return step_memory(
        settings.drafter, settings.train, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, tied=False
    ).saved


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
