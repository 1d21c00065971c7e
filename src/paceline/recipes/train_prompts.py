"""The prompts that a run decodes while it trains: looked at before a model is loaded."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.config import EvaluateSettings, RunSettings
from paceline.data.held_out import HeldOut
from paceline.data.prompt_file import encode_prompts
from paceline.data.prompt_sets import read_set
from paceline.observe.console import Console
from paceline.records import UserError, many
from paceline.target.load import TargetFacts, load_tokenizer
from paceline.target.model import DecodingTarget

_ANY = 2**62  # how long prompts are is looked at here


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids that are answered, and where they are from."""

    ids: list[list[int]]
    source: str
    sha256: str  # of the ids and of how long an answer may be


def open_prompts(settings: RunSettings, facts: TargetFacts, held_out: HeldOut | None, console: Console) -> Prompts:
    """Return the prompts of evaluate.prompts, or those of the held-out rows.

    Raises:
        UserError: there is none that leaves room for its answer, or this target cannot be decoded with.
    """
    evaluate = settings.evaluate
    DecodingTarget.check(facts)
    if evaluate.max_new_tokens < 2:
        raise UserError(
            f"evaluate.max_new_tokens must be at least 2, got {evaluate.max_new_tokens}: an answer's first token needs "
            "no drafter."
        )
    if evaluate.prompts is not None:
        ids, source = _of_file(evaluate.prompts, evaluate, settings, facts), evaluate.prompts
    else:
        assert held_out is not None  # or the settings would have been refused
        ids, source = _of_rows(held_out, evaluate, facts, console), str(held_out.dataset.folder)
    return Prompts(ids, source, hashlib.sha256(json.dumps([ids, evaluate.max_new_tokens]).encode()).hexdigest())


def _of_file(source: str, evaluate: EvaluateSettings, settings: RunSettings, facts: TargetFacts) -> list[list[int]]:
    found = read_set(source, limit=evaluate.max_prompts).prompts
    tokenizer = load_tokenizer(facts.name, settings.target.revision)
    ids = encode_prompts(tokenizer, found, max_new_tokens=0, max_positions=_ANY)
    for prompt, tokens in zip(found, ids, strict=True):
        if len(tokens) + evaluate.max_new_tokens > facts.max_positions:
            raise UserError(
                f"{prompt.place} (evaluate.prompts) has {many(len(tokens), 'token')} and evaluate.max_new_tokens is "
                f"{evaluate.max_new_tokens:,}, together more than the target's {facts.max_positions:,} positions. "
                "Shorten one of them."
            )
    return ids


def _of_rows(held_out: HeldOut, evaluate: EvaluateSettings, facts: TargetFacts, console: Console) -> list[list[int]]:
    """Return what stands before the first supervised token of the rows, each text once."""
    room = facts.max_positions - evaluate.max_new_tokens
    fitting: dict[tuple[int, ...], None] = {}
    long = 0
    for prompt in _beginnings(held_out, facts.vocab_size):
        if len(prompt) > room:
            long += 1
        elif len(fitting) < evaluate.max_prompts:
            fitting[prompt] = None
    folder = held_out.dataset.folder
    if not fitting:
        what = f"{long:,} are longer" if long else "none begins with tokens that are not supervised"
        raise UserError(
            f"evaluate.device needs prompts with room for evaluate.max_new_tokens ({evaluate.max_new_tokens:,}) in the "
            f"target's {facts.max_positions:,} positions, but of the {many(held_out.rows, 'row')} of {folder} "
            f"(evaluate.held_out) {what}. Lower it, or name a file in evaluate.prompts."
        )
    if long:
        console.line(f"  left out, without room for evaluate.max_new_tokens: {many(long, 'prompt')} of {folder}")
    return [list(prompt) for prompt in fitting]


def _beginnings(held_out: HeldOut, vocab_size: int) -> Iterator[tuple[int, ...]]:
    for row in sorted(map(int, held_out.cuts.rows_N)):
        ids_S, mask_S = held_out.dataset.row(row)
        prompt = ids_S[: int(np.argmax(mask_S))]
        if len(prompt) and prompt.max() < vocab_size:  # rows beyond it are set aside when they are looked at
            yield tuple(map(int, prompt))
