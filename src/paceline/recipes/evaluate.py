"""`paceline evaluate`: acceptance by true speculative decoding, losslessness and speed on held-out prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.drafter import find_drafter
from paceline.checkpoint.folder import write_whole
from paceline.data.prompt_sets import Source
from paceline.decode.breakdown import by_category, by_context
from paceline.decode.evaluate import Evaluation, acceptance, decode_all, measure_speedup
from paceline.decode.generate import generate
from paceline.decode.lossless import differences
from paceline.decode.protocol import Target
from paceline.decode.sampling import Sampling
from paceline.decode.speculate import speculate
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.evaluate_against import NAME, compare, load_other, per_prompt
from paceline.recipes.evaluate_asked import Asking, ask, check_target, tell_beyond, trained_tokens
from paceline.records import Completion
from paceline.target.load import describe, load_ends, load_tokenizer
from paceline.target.model import DecodingTarget


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
    # 1. What is asked.
    numbers = getattr(torch, dtype)
    found = find_drafter(run, checkpoint)
    meta = found.meta
    facts = describe(moved_to or meta.target)
    check_target(run, meta, facts)
    questions = ask(prompts, asking, load_tokenizer(facts.name), facts)
    prompt_ids, new = questions.ids, asking.max_new_tokens
    described = {**questions.described, "target": facts.name, "target_revision": facts.revision, "dtype": dtype}
    other = load_other(against, described) if against else None
    trained_on = trained_tokens(run)
    beyond = tell_beyond(prompt_ids, asking, trained_on, console)

    # 2. Both models decode.
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, found.weights()).to(device, numbers)
    target = DecodingTarget(facts, meta.settings.taps, dtype=numbers, device=device)
    ends = load_ends(facts).to(device, numbers)

    how: dict[str, Any] = {"max_new_tokens": new, "rows": rows, "sampling": asking.sampling}

    def speculative(who: Drafter, what: str, some: Sequence[Sequence[int]]) -> list[Completion]:
        with console.progress(what, len(some)) as tick:
            return decode_all(lambda: speculate(target, who, ends, some, **how), len(some), tick)

    with console.progress("plain decoding", len(prompt_ids)) as tick:
        plain = decode_all(lambda: generate(target, prompt_ids, **how), len(prompt_ids), tick)
    trained = speculative(drafter, "speculative decoding", prompt_ids)

    # 3. What came of it.
    report: dict[str, Any] = {
        "run": str(run),
        "checkpoint": found.checkpoint,
        "train_steps": meta.steps,
        **described,
        **_accepted(trained, meta.settings.block_size, questions.prompts.categories),
        "trained_tokens": trained_on,
        "prompts_beyond": beyond,
        **_lossless(target, plain, trained, asking.sampling, dtype, console),
    }
    if untrained_prompts:
        report |= _untrained(drafter, meta.settings.block_size, prompt_ids[:untrained_prompts], speculative)
    if timed_prompts:
        report |= _speed(target, drafter, ends, prompt_ids[:timed_prompts], asking, console)
    if other:
        report["against"] = compare(other, trained)
    name = NAME if found.checkpoint is None else f"evaluation-{found.checkpoint}.json"
    _save(run / name, report, per_prompt(trained, [prompt.key for prompt in questions.prompts.prompts]))
    return report


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


def _lossless(
    target: Target,
    plain: Sequence[Completion],
    done: Sequence[Completion],
    sampling: Sampling,
    dtype: str,
    console: Console,
) -> dict[str, Any]:
    if sampling.temperature > 0 and dtype != "float32":
        # A draw falls at the edge of two tokens whatever their logits, so no gap tells rounding from a mistake.
        unknown = ("lossless", "first_difference", "near_ties", "mismatches", "largest_gap", "near_tie_bound")
        return dict.fromkeys(unknown)
    with console.progress("compare with plain decoding") as tick:
        found = differences(target, plain, done, tick)
    wrong = [one for one in found if not one.near_tie]
    gaps = [one.gap for one in found if one.gap is not None]
    return {
        "lossless": not wrong,
        "first_difference": (wrong[0].prompt, wrong[0].place) if wrong else None,
        "near_ties": len(found) - len(wrong),
        "mismatches": len(wrong),
        "largest_gap": max(gaps, default=None),
        "near_tie_bound": max((one.bound for one in found), default=None),
    }


def _untrained(drafter: Drafter, block_size: int, prompts: Sequence[Any], speculative: Any) -> dict[str, Any]:
    """The same decoding with initial weights: what acceptance is worth without training."""
    weight = drafter.fc.weight
    fresh = Drafter(drafter.settings, drafter.hidden_size).initialise(seed=0).to(weight.device, weight.dtype).eval()
    result: Evaluation = acceptance(speculative(fresh, "untrained drafter", prompts), block_size)
    return {"tau_untrained": result.tau, "untrained_prompts": result.prompts}


def _speed(
    target: Target, drafter: Drafter, ends: FrozenEnds, prompts: Sequence[Any], asking: Asking, console: Console
) -> dict[str, Any]:
    new, sampling = asking.max_new_tokens, asking.sampling
    with console.progress("speed, one prompt at a time", len(prompts)) as tick:
        speed = measure_speedup(target, drafter, ends, prompts, max_new_tokens=new, sampling=sampling, progress=tick)
    return {**speed, "timed_prompts": len(prompts)}


def _save(path: Path, report: dict[str, Any], prompts: dict[str, list[Any]]) -> None:
    """Write a report, and what each prompt gave, a column a line."""
    columns = ",\n".join(f"    {json.dumps(name)}: {json.dumps(column)}" for name, column in prompts.items())
    whole = json.dumps(report, indent=2)[:-2]
    write_whole(path, f'{whole},\n  "per_prompt": {{\n{columns}\n  }}\n}}\n')
