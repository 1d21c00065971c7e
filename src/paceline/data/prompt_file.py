"""Prompts from a JSONL file: one object a line, {"prompt": text} or {"messages": [...]}."""

import json
from pathlib import Path
from typing import Any

from paceline.records import UserError

Messages = list[dict[str, Any]]


def read_prompts(path: Path) -> list[Messages]:
    """Return each line's messages, ending with what the model is to answer.

    Raises:
        UserError: the file or a line is not as it should be; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no prompt file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Prompt file {path} cannot be read as UTF-8 text: {error}.") from None
    prompts = [_messages(line, f"{path}:{at}") for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise UserError(f"Prompt file {path} holds no prompt. Write one JSON object a line.")
    return prompts


def _messages(line: str, place: str) -> Messages:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON: {error}.") from None
    if not isinstance(row, dict):
        raise UserError(f'{place} must be a JSON object with "prompt" or "messages", found {type(row).__name__}.')
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise UserError(f'{place} needs a non-empty "prompt" text or a list of "messages", found keys {sorted(row)}.')
    while messages and messages[-1].get("role") == "assistant":  # a finished conversation: ask its last question again
        messages = messages[:-1]
    if not messages:
        raise UserError(f"{place} has no message before the assistant's. Add the user's.")
    return messages
