"""`paceline evaluate`: acceptance by true speculative decoding, losslessness and speed on held-out prompts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.drafter import find_drafter, weights_sha256
from paceline.checkpoint.folder import write_whole
from paceline.data.prompt_sets import Source
from paceline.decode.breakdown import by_category, by_context
from paceline.decode.evaluate import acceptance, measure_speedup
from paceline.decode.lossless import differences
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.evaluate_against import compare, load_other, per_prompt
from paceline.recipes.evaluate_asked import Asking, ask, check_target, tell_beyond, trained_tokens
from paceline.recipes.evaluate_decoding import Decoding, load_both
from paceline.records import Completion, UserError
from paceline.runtime.devices import device_name
from paceline.target.load import describe, load_tokenizer


def evaluate(
    run: Path,
    prompts: Source,
    asking: Asking,
    *,
    device: str,
    dtype: str,
    rows: int,
    timed_prompts: int,
    untrained_prompts: int,
    console: Console,
    against: Path | None = None,
    moved_to: str | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Decode the prompts plainly and speculatively, compare, and write RUN/evaluation.json.

    `against` is another run's folder or its evaluation; `moved_to` is where the target lies now. `checkpoint` (latest,
    best, or steps) takes its weights instead of the finished drafter's; its name is added to the file's,
    RUN/evaluation-step-00001200.json. What is returned is what the file holds, without the table of prompts.
    """
    # 1. What is asked. The weights are read at once: a run that goes on removes old checkpoints.
    found = find_drafter(run, checkpoint)
    place = _free_place(run / found.evaluation)
    weights, meta = found.weights(), found.meta
    checksum = weights_sha256(weights)
    facts = describe(moved_to or meta.target)
    check_target(run, meta, facts)
    questions = ask(prompts, asking, load_tokenizer(facts.name), facts)
    described = {**questions.described, "target": facts.name, "target_revision": facts.revision, "dtype": dtype}
    described["device"] = device_name(device)
    other = load_other(against, described) if against else None
    trained_on = trained_tokens(run)
    beyond = tell_beyond(questions.ids, asking, trained_on, console)

    # 2. Both models decode.
    decoding = load_both(meta, weights, facts, asking, rows, dtype, device, console)
    del weights  # which may be gigabytes
    plain = decoding.plainly(questions.ids)
    trained = decoding.speculatively(questions.ids)

    # 3. What came of it.
    report: dict[str, Any] = {
        "run": str(run),
        "checkpoint": found.checkpoint,
        "drafter_sha256": checksum,
        "train_steps": meta.steps,
        **described,
        **_accepted(trained, meta.settings.block_size, questions.prompts.categories),
        "trained_tokens": trained_on,
        "prompts_beyond": beyond,
        **_lossless(decoding, plain, trained),
    }
    if untrained_prompts:
        report |= _untrained(decoding, questions.ids[:untrained_prompts])
    if timed_prompts:
        report |= _speed(decoding, questions.ids[:timed_prompts])
    if other:
        report["against"] = compare(other, trained)
    _save(place, report, per_prompt(trained, [prompt.key for prompt in questions.prompts.prompts]))
    return report


def _free_place(path: Path) -> Path:
    """Return where the result goes, before anything is decoded for it.

    Raises:
        UserError: it cannot be written there.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"The result goes to {path}, which cannot be written. Make room for it there.")
    return path


def _accepted(done: Sequence[Completion], block_size: int, categories: Sequence[str | None]) -> dict[str, Any]:
    result = acceptance(done, block_size)
    return {
        "tau_trained": result.tau,  # per request
        "tau_pooled": result.tau_pooled,
        "cycles": result.cycles,
        "per_slot_acceptance": result.per_slot_acceptance,
        "by_context": by_context(done),
        "by_category": by_category(done, categories),
    }


def _lossless(decoding: Decoding, plain: Sequence[Completion], done: Sequence[Completion]) -> dict[str, Any]:
    if decoding.asking.sampling.temperature > 0 and decoding.dtype != "float32":
        # A draw falls at the edge of two tokens whatever their logits, so no gap tells rounding from a mistake.
        unknown = ("lossless", "first_difference", "near_ties", "mismatches", "largest_gap", "near_tie_bound")
        return dict.fromkeys(unknown)
    with decoding.console.progress("compare with plain decoding") as tick:
        found = differences(decoding.target, plain, done, tick)
    wrong = [one for one in found if not one.near_tie]
    # The nearest to being a mistake: a gap says something beside the bound of its own place only.
    gaps = [(one.gap, one.bound) for one in found if one.gap is not None]
    gap, bound = max(gaps, key=lambda pair: pair[0] - pair[1], default=(None, None))
    return {
        "lossless": not wrong,
        "first_difference": (wrong[0].prompt, wrong[0].place) if wrong else None,
        "near_ties": len(found) - len(wrong),
        "mismatches": len(wrong),
        "largest_gap": gap,
        "near_tie_bound": bound,
    }


def _untrained(decoding: Decoding, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The same decoding with initial weights: what acceptance is worth without training."""
    drafter = decoding.drafter
    weight = drafter.fc.weight
    fresh = Drafter(drafter.settings, drafter.hidden_size).initialise(seed=0).to(weight.device, weight.dtype).eval()
    done = decoding.speculatively(prompts, fresh, "untrained drafter")
    result = acceptance(done, drafter.settings.block_size)
    return {"tau_untrained": result.tau, "untrained_prompts": result.prompts}


def _speed(decoding: Decoding, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    with decoding.console.progress("speed, one prompt at a time", len(prompts)) as tick:
        speed = measure_speedup(
            decoding.target,
            decoding.drafter,
            decoding.ends,
            prompts,
            max_new_tokens=decoding.asking.max_new_tokens,
            sampling=decoding.asking.sampling,
            progress=tick,
        )
    return {**speed, "timed_prompts": len(prompts)}


def _save(path: Path, report: dict[str, Any], prompts: dict[str, list[Any]]) -> None:
    """Write a report, and what each prompt gave, a column a line."""
    columns = ",\n".join(f"    {json.dumps(name)}: {json.dumps(column)}" for name, column in prompts.items())
    whole = json.dumps(report, indent=2)[:-2]
    write_whole(path, f'{whole},\n  "per_prompt": {{\n{columns}\n  }}\n}}\n')
