"""`paceline evaluate --against`: the difference of two drafters' acceptance on the same prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.checkpoint.drafter import evaluation_name
from paceline.data.messages import short
from paceline.decode.compare import paired_bootstrap
from paceline.records import Completion, RunError, UserError, many

# What must be equal for a comparison to mean something, and what it is called in a message.
_SAME = {
    "prompt_ids_sha256": "prompts",
    "target_revision": "target revisions",
    "max_new_tokens": "--max-new-tokens",
    "dtype": "--dtype",
    "temperature": "temperatures",
    "top_k": "top_k",
    "top_p": "top_p",
}
# What can be behind prompts whose ids differ.
_BEHIND = ("prompt_set", "prompts_sha256", "prompts", "prompts_seed", "chat_template", "thinking", "template_args")


@dataclass(frozen=True, slots=True)
class Other:
    """An earlier evaluation."""

    path: Path
    report: dict[str, Any]
    taus: list[float | None]  # of each prompt; None: its answer had no draft cycle


def per_prompt(completions: Sequence[Completion], keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return what is kept of each prompt, as columns."""
    return {
        "key": list(keys),
        "prompt_tokens": [len(completion.prompt_ids) for completion in completions],
        "tokens": [len(completion.token_ids) for completion in completions],
        "finish": [completion.finish for completion in completions],
        "cycles": [len(completion.acceptance_lengths) for completion in completions],
        "cycle_tokens": [sum(completion.acceptance_lengths) for completion in completions],
    }


def load_other(place: Path, described: dict[str, Any]) -> Other:
    """Return the evaluation of a run's folder, or that of a file, if it is one of the same prompts and settings.

    Raises:
        UserError: there is none, it cannot be read, or something that decides the result differs.
    """
    path = place / evaluation_name(None) if place.is_dir() else place
    if not path.is_file():
        raise UserError(
            f"--against needs an evaluation, and there is no {path}. Run `paceline evaluate` for it first, on the same "
            "prompts."
        )
    try:
        tree = json.loads(path.read_text())
        differ = [key for key in _SAME if tree[key] != described[key]]
        behind = [key for key in _BEHIND if tree[key] != described[key]]
        taus = [] if differ else _taus(tree["per_prompt"], described["prompts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} (--against) is no evaluation that can be compared ({type(error).__name__}: {error}). Evaluate "
            "that run again."
        ) from None
    if differ:
        raise UserError(_other_settings(path, tree, described, differ, behind))
    return Other(path, tree, taus)


def compare(other: Other, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the paired difference of the acceptance lengths, with intervals.

    Raises:
        RunError: no prompt had a draft cycle with both drafters.
    """
    own = [_tau(len(done.acceptance_lengths), sum(done.acceptance_lengths)) for done in completions]
    both = [(a, b) for a, b in zip(own, other.taus, strict=True) if a is not None and b is not None]
    if not both:
        raise RunError(f"No prompt had a draft cycle here and in {other.path}: there is nothing to compare.")
    own_P, other_P = np.array(both).T
    left_out = sum((a is None) != (b is None) for a, b in zip(own, other.taus, strict=True))
    return {"evaluation": str(other.path), "left_out": left_out, **paired_bootstrap(own_P, other_P)}


def _taus(rows: dict[str, Any], prompts: int) -> list[float | None]:
    """Return each prompt's acceptance length out of an evaluation's table.

    Raises:
        ValueError, KeyError, TypeError: it is no table of so many prompts.
    """
    cycles, tokens = rows["cycles"], rows["cycle_tokens"]
    for name, column in (("cycles", cycles), ("cycle_tokens", tokens)):
        if not isinstance(column, list) or not all(type(count) is int and 0 <= count < 1 << 53 for count in column):
            raise ValueError(f"{name} is no list of counts")
        if len(column) != prompts:
            raise ValueError(f"{name} has {many(len(column), 'row')} for {many(prompts, 'prompt')}")
    return [_tau(*counts) for counts in zip(cycles, tokens, strict=True)]


def _tau(cycles: int, tokens: int) -> float | None:
    return tokens / cycles if cycles else None


def _other_settings(
    path: Path, tree: dict[str, Any], described: dict[str, Any], differ: list[str], behind: list[str]
) -> str:
    key = differ[0]
    if key == "prompt_ids_sha256" and behind:
        cause = behind[0]
        what = f"prompts differ: {cause} is {_shown(described[cause])} here and {_shown(tree[cause])} there"
    else:
        what = f"{_SAME[key]} differ: {_shown(described[key])} here and {_shown(tree[key])} there"
    return f"A comparison needs the same prompts and settings, but with {path} (--against) the {what}. Make them equal."


def _shown(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else short(value) if len(text) > 60 else text
