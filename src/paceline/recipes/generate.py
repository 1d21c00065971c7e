"""`paceline generate`: prompts in, the target's own completions out, token ids kept."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from paceline.data.prompt_file import Messages, Prompt, as_prompts, encode_prompts
from paceline.decode.generate import generate
from paceline.observe.console import Console
from paceline.records import Completion, UserError
from paceline.target.load import TargetFacts, describe, load_tokenizer
from paceline.target.model import DecodingTarget


def generate_completions(
    prompts: Path | Sequence[Messages],
    out: Path,
    *,
    model: str,
    revision: str | None,
    device: str,
    dtype: str,
    max_new_tokens: int,
    rows: int,
    console: Console,
) -> dict[str, Any]:
    """Write one JSON line a prompt to `out`, in the prompts' order, and return a summary."""
    if out.is_dir():
        raise UserError(f"{out} is a folder, and completions go to a file. Choose another --out.")
    asked = as_prompts(prompts)
    facts = describe(model, revision)
    tokenizer = load_tokenizer(model, revision)
    prompt_ids = encode_prompts(tokenizer, asked, max_new_tokens=max_new_tokens, max_positions=facts.max_positions)
    with _file_for(out) as file:  # what cannot be written is known before anything is generated
        done = _generate(facts, prompt_ids, device, dtype, max_new_tokens, rows, console)
        for i, prompt in enumerate(asked):
            row = _row(tokenizer, prompt, done[i])
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return {
        "completions": str(out),
        "prompts": len(prompt_ids),
        "tokens_generated": sum(len(c.token_ids) for c in done.values()),
        "stopped": sum(c.finish == "stop" for c in done.values()),
        "cut_at_max_new_tokens": sum(c.finish == "length" for c in done.values()),
    }


def _generate(
    facts: TargetFacts,
    prompt_ids: list[list[int]],
    device: str,
    dtype: str,
    max_new_tokens: int,
    rows: int,
    console: Console,
) -> dict[int, Completion]:
    target = DecodingTarget(facts, (), dtype=getattr(torch, dtype), device=device)
    done: dict[int, Completion] = {}
    tokens = 0
    with console.progress("generate", len(prompt_ids)) as tick:
        for index, completion in generate(target, prompt_ids, max_new_tokens=max_new_tokens, rows=rows):
            done[index] = completion
            tokens += len(completion.token_ids)
            tick(len(done), note=f"{tokens:,} tokens")
    return done


def _row(tokenizer: Any, prompt: Prompt, completion: Completion) -> dict[str, Any]:
    return {
        "messages": [*prompt.messages, {"role": "assistant", "content": tokenizer.decode(completion.token_ids)}],
        **({"tools": prompt.tools} if prompt.tools else {}),
        "prompt_ids": completion.prompt_ids,
        "completion_ids": completion.token_ids,
        "finish": completion.finish,
    }


@contextmanager
def _file_for(out: Path) -> Iterator[TextIO]:
    """Yield a file that becomes `out` when the block ends well."""
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = aside.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} (--out) cannot be written: {error.strerror}. Choose another place.") from None
    try:
        with file:
            yield file
        aside.rename(out)
    finally:
        aside.unlink(missing_ok=True)
