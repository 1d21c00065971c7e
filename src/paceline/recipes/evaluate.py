"""`paceline evaluate`: acceptance by true speculative decoding, losslessness and speed on held-out prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.drafter import find_drafter
from paceline.data.prompt_file import Messages, as_prompts, encode_prompts
from paceline.decode.evaluate import Evaluation, acceptance, decode_all, first_difference, measure_speedup
from paceline.decode.generate import generate
from paceline.decode.protocol import Target
from paceline.decode.speculate import speculate
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.records import UserError
from paceline.target.load import describe, load_ends, load_tokenizer
from paceline.target.model import DecodingTarget


def evaluate(
    run: Path,
    prompts: Path | Sequence[Messages],
    *,
    device: str,
    dtype: str,
    max_new_tokens: int,
    rows: int,
    timed_prompts: int,
    untrained_prompts: int,
    console: Console,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Decode the prompts plainly and speculatively, compare, and write RUN/evaluation.json.

    `checkpoint` (latest, best, or steps) takes its weights instead of the finished drafter's; its name is added to the
    file's, RUN/evaluation-step-00001200.json.
    """
    numbers = getattr(torch, dtype)
    found = find_drafter(run, checkpoint)
    meta = found.meta
    asked = as_prompts(prompts)
    facts = describe(meta.target)
    if facts.revision != meta.target_revision:
        raise UserError(
            f"The drafter in {run} was trained for revision {meta.target_revision} of {meta.target}, but revision "
            f"{facts.revision} lies there now. Evaluate with the target it was trained for."
        )
    prompt_ids = encode_prompts(
        load_tokenizer(meta.target), asked, max_new_tokens=max_new_tokens, max_positions=facts.max_positions
    )
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, found.weights()).to(device, numbers)
    target = DecodingTarget(facts, meta.settings.taps, dtype=numbers, device=device)
    ends = load_ends(facts).to(device, numbers)

    def speculative(who: Drafter, what: str, some: Sequence[Sequence[int]]) -> list[Any]:
        with console.progress(what, len(some)) as tick:
            return decode_all(
                lambda: speculate(target, who, ends, some, max_new_tokens=max_new_tokens, rows=rows), len(some), tick
            )

    with console.progress("plain decoding", len(prompt_ids)) as tick:
        plain = decode_all(
            lambda: generate(target, prompt_ids, max_new_tokens=max_new_tokens, rows=rows), len(prompt_ids), tick
        )
    trained = speculative(drafter, "speculative decoding", prompt_ids)
    result = acceptance(trained, meta.settings.block_size)
    difference = first_difference(plain, trained)
    report: dict[str, Any] = {
        "run": str(run),
        "checkpoint": found.checkpoint,
        "train_steps": meta.steps,
        "target": meta.target,
        "prompts": result.prompts,
        "max_new_tokens": max_new_tokens,
        "dtype": dtype,
        "temperature": 0.0,
        "tau_trained": result.tau,
        "tau_pooled": result.tau_pooled,
        "per_slot_acceptance": result.per_slot_acceptance,
        "lossless": difference is None,
        "first_difference": difference,
    }
    if untrained_prompts:
        report |= _untrained(drafter, meta.settings.block_size, prompt_ids[:untrained_prompts], speculative)
    if timed_prompts:
        report |= _speed(target, drafter, ends, prompt_ids[:timed_prompts], max_new_tokens, console)
    name = "evaluation.json" if found.checkpoint is None else f"evaluation-{found.checkpoint}.json"
    (run / name).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _untrained(drafter: Drafter, block_size: int, prompts: Sequence[Any], speculative: Any) -> dict[str, Any]:
    """The same decoding with initial weights: what acceptance is worth without training."""
    weight = drafter.fc.weight
    fresh = Drafter(drafter.settings, drafter.hidden_size).initialise(seed=0).to(weight.device, weight.dtype).eval()
    result: Evaluation = acceptance(speculative(fresh, "untrained drafter", prompts), block_size)
    return {"tau_untrained": result.tau, "untrained_prompts": result.prompts}


def _speed(
    target: Target, drafter: Drafter, ends: FrozenEnds, prompts: Sequence[Any], max_new_tokens: int, console: Console
) -> dict[str, Any]:
    with console.progress("speed, one prompt at a time", len(prompts)) as tick:
        speed = measure_speedup(target, drafter, ends, prompts, max_new_tokens=max_new_tokens, progress=tick)
    return {**speed, "timed_prompts": len(prompts)}
