"""Prompts from a JSONL file: one object a line, {"prompt": text} or {"messages": [...]}, as messages.py reads them.

Every prompt remembers its file and line, so that whatever is wrong with it later can be found.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data import chat
from paceline.data.messages import BadRow, Message, is_conversation, read_conversation
from paceline.records import UserError

Messages = list[Message]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages that end with what the model is to answer."""

    messages: Messages
    place: str  # file:line
    tools: list[dict[str, Any]] | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Return each line's prompt; blank lines are left out.

    Raises:
        UserError: the file or a line is not as it should be; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"There is no prompt file {path}. Give a JSONL file, one prompt a line.") from None
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line} is not UTF-8 (byte 0x{wrong:02x}). Convert the file to UTF-8.") from None
    except OSError as error:
        raise UserError(f"Prompt file {path} cannot be read: {error.strerror}. Give a JSONL file.") from None
    # Not splitlines(): it also splits at U+2028 and the like, which may stand inside a JSON string.
    lines = enumerate(text.split("\n"), 1)
    prompts = [_prompt(line, f"{path}:{at}") for at, line in lines if line.strip()]
    if not prompts:
        raise UserError(f"Prompt file {path} holds no prompt. Write one JSON object a line.")
    return prompts


def as_prompts(source: Path | Sequence[Messages]) -> list[Prompt]:
    """Return the prompts of a file, or those that a program made up."""
    if isinstance(source, Path):
        return read_prompts(source)
    return [Prompt(messages, f"prompt {at}") for at, messages in enumerate(source, 1)]


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], *, max_new_tokens: int, max_positions: int
) -> list[list[int]]:
    """Return the ids after which the target answers each prompt.

    Raises:
        UserError: a prompt is malformed, has no tokens, or leaves no room for its answer; the message names its place.
    """
    encoded = []
    for prompt in prompts:
        try:
            ids = chat.prompt_ids(tokenizer, prompt.messages, prompt.tools)
        except BadRow as error:
            raise UserError(f"{prompt.place}: {error}") from None
        if not ids:
            raise UserError(f"{prompt.place} has no tokens, so there is nothing to answer. Give it text.")
        if len(ids) + max_new_tokens > max_positions:
            raise UserError(
                f"{prompt.place} has {len(ids):,} tokens and --max-new-tokens is {max_new_tokens:,}, together more "
                f"than the target's {max_positions:,} positions. Shorten one of them."
            )
        encoded.append(ids)
    return encoded


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error.msg} at column {error.colno}. Correct the line.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{place} is not JSON: {error}. Correct the line.") from None
    if not isinstance(row, dict):
        raise UserError(f'{place} must be a JSON object with "prompt" or "messages", found {type(row).__name__}.')
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return Prompt([{"role": "user", "content": row["prompt"]}], place)
    if not is_conversation(row):
        found = str(sorted(row))[:80]
        raise UserError(f'{place} needs a non-empty "prompt" text or a list of "messages" objects, found keys {found}.')
    try:
        messages, tools = read_conversation(row)
    except BadRow as error:
        raise UserError(f"{place}: {error}") from None
    while messages and messages[-1]["role"] == "assistant":  # a finished conversation: ask its last question again
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{place} has no message before the assistant's. Add the user's.")
    return Prompt(messages, place, tools)
