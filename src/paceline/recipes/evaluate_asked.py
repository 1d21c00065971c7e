"""What `paceline evaluate` asks: which prompts, rendered how; and whether a drafter goes with a target."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.drafter import DrafterMeta
from paceline.config_file import load_settings
from paceline.data.chat_template import chat_template
from paceline.data.conversation import thinking_args
from paceline.data.prompt_file import encode_prompts
from paceline.data.prompt_sets import PromptSet, Source, read_set
from paceline.decode.sampling import Sampling
from paceline.observe.console import Console
from paceline.records import UserError, many
from paceline.target.load import TargetFacts
from paceline.target.model import check_taps


@dataclass(frozen=True, slots=True)
class Asking:
    """How prompts become token ids, and how answers are chosen."""

    max_new_tokens: int
    limit: int | None = None  # prompts, the first of an order drawn by `seed`; None: all
    seed: int = 0
    thinking: Literal["on", "off", "default"] = "default"
    template_args: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts as the target reads them, and everything that decides them."""

    prompts: PromptSet
    ids: list[list[int]]
    described: dict[str, Any]  # of the report


def ask(source: Source, asking: Asking, tokenizer: Any, facts: TargetFacts) -> Questions:
    """Read the prompts and render them with the target's chat template.

    Raises:
        UserError: a prompt cannot be read or leaves no room for its answer, or the template does not go with the
            settings.
    """
    found = read_set(source, limit=asking.limit, seed=asking.seed)
    arguments = {**thinking_args(tokenizer, asking.thinking, asking.template_args), **asking.template_args}
    ids = encode_prompts(
        tokenizer,
        found.prompts,
        max_new_tokens=asking.max_new_tokens,
        max_positions=facts.max_positions,
        template_args=arguments,
    )
    described = {
        "prompt_set": found.name,
        "prompts_sha256": found.sha256,
        "prompts": len(ids),
        "prompts_of": found.of,
        "prompts_seed": found.seed,
        "prompt_ids_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "chat_template": template_hash(tokenizer),
        "thinking": asking.thinking,
        "template_args": arguments,
        "max_new_tokens": asking.max_new_tokens,
        **asdict(asking.sampling),
    }
    return Questions(found, ids, described)


def template_hash(tokenizer: Any) -> str | None:
    """Return the checksum of the chat template, as a dataset's manifest has it; None: there is none."""
    if not tokenizer.chat_template:
        return None
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()


def check_target(run: Path, meta: DrafterMeta, facts: TargetFacts) -> None:
    """Refuse a target that the drafter was not trained for.

    Raises:
        UserError: the first thing that differs: shape, taps, mask token or weights.
    """
    for what, trained, found in (
        ("hidden size", meta.hidden_size, facts.hidden_size),
        ("a vocabulary of", meta.vocab_size, facts.vocab_size),
        ("layers:", meta.num_target_layers, facts.num_layers),
    ):
        if trained != found:
            raise UserError(
                f"The drafter in {run} was trained for a target with {what} {trained:,}, but {facts.name} has "
                f"{found:,}. Evaluate with the target it was trained for."
            )
    check_taps(meta.settings.taps, facts)
    if meta.settings.mask_token_id >= facts.vocab_size:
        raise UserError(
            f"The drafter's mask token must be a row of the target's embedding (0..{facts.vocab_size - 1}), got "
            f"{meta.settings.mask_token_id} in {run}. Restore drafter/drafter.json."
        )
    if facts.revision != meta.target_revision:
        raise UserError(
            f"The drafter in {run} was trained for revision {meta.target_revision} of {meta.target}, but revision "
            f"{facts.revision} lies there now. Evaluate with the target it was trained for."
        )


def trained_tokens(run: Path) -> int | None:
    """Return the most tokens a sample of the run could have; None: the folder has no settings."""
    path = run / "settings.yaml"
    if not path.is_file():
        return None
    settings = load_settings(path)
    return min(settings.data.max_length, settings.train.context_slots)


def tell_beyond(ids: Sequence[Sequence[int]], asking: Asking, trained: int | None, console: Console) -> int | None:
    """Say how many prompts may go, with their answers, beyond what the drafter was trained on; return how many."""
    if trained is None:
        return None
    beyond = sum(len(prompt) + asking.max_new_tokens > trained for prompt in ids)
    if beyond:
        console.line(
            f"  {beyond:,} of {many(len(ids), 'prompt')} may go beyond the {trained:,} tokens the drafter was "
            "trained on\n"
            "  (data.max_length, train.context_slots): see acceptance by context length."
        )
    return beyond
