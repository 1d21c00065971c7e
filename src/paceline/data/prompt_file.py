"""Prompts from a JSONL file: one object a line, {"prompt": text} or {"messages": [...]}, as messages.py reads them.

`system` and `tools` may stand beside either, and `category`, by which `evaluate` groups its results.
Every prompt remembers its file and line, so that whatever is wrong with it later can be found. Its key is its own `id`,
else its line. A file is read line by line, as often as it is iterated; a program's prompts are lines too.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data import chat
from paceline.data.messages import BadRow, Message, is_conversation, read_conversation, short
from paceline.records import UserError, many

Messages = list[Message]

LATER_TURN = " turn "  # what the names of a conversation's later rows and requests have behind its key
_TAKEN = re.compile(rf".*{LATER_TURN}\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages that end with what the model is to answer."""

    messages: Messages
    place: str  # file:line
    key: str  # names it among all prompts of a file
    tools: list[dict[str, Any]] | None = None
    category: Any = None  # as the line has it


class PromptLines:
    """The lines of a prompt file, or of the prompts that a program made up, that are not blank."""

    def __init__(self, source: Path | Sequence[Messages]) -> None:
        """Open nothing yet.

        Raises:
            UserError: it cannot be read more than once.
        """
        self._source = source
        if isinstance(source, Path) and source.exists() and not (source.is_file() or source.is_dir()):
            raise UserError(f"Prompt file {source} must be a regular file, got a pipe or a device. Write one.")

    @property
    def name(self) -> str:
        """What the prompts are called in files and messages."""
        return str(self._source) if isinstance(self._source, Path) else "(a program's)"

    def place(self, line: int) -> str:
        """Return how a line is named in messages."""
        return f"{self._source}:{line}" if isinstance(self._source, Path) else f"prompt {line}"

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number from 1, line).

        Raises:
            UserError: the file cannot be read.
        """
        # Bytes: only "\n" ends a line, U+2028 and the like may stand inside a JSON string.
        yield from ((line, raw) for line, raw in enumerate(self._raw(), 1) if raw.strip())

    def sha256(self) -> str:
        """Read everything and return its checksum."""
        digest = hashlib.sha256()
        for raw in self._raw():
            digest.update(raw)
        return digest.hexdigest()

    def parse(self, line: int, raw: bytes) -> Prompt:
        """Return a line's prompt.

        Raises:
            BadRow: the line is not as it should be; the message names its place.
        """
        return _prompt(raw, self.place(line), line)

    def own_id(self, line: int, raw: bytes) -> str | None:
        """Return a line's own id, also of a line that is refused; None: it has none, or none that can be read."""
        try:
            row = _parsed(raw, self.place(line), line)
            return None if row.get("id") is None else _key(row["id"], self.place(line), line)
        except BadRow:
            return None

    def _raw(self) -> Iterator[bytes]:
        if not isinstance(self._source, Path):
            yield from (json.dumps({"messages": messages}).encode() + b"\n" for messages in self._source)
            return
        try:
            with self._source.open("rb") as file:
                yield from file
        except FileNotFoundError:
            raise UserError(f"There is no prompt file {self._source}. Give a JSONL file, one prompt a line.") from None
        except OSError as error:
            raise UserError(
                f"Prompt file {self._source} cannot be read: {error.strerror}. Give a JSONL file."
            ) from None


def read_prompts(path: Path) -> list[Prompt]:
    """Return each line's prompt; blank lines are left out.

    Raises:
        UserError: the file or a line is not as it should be; the message names file and line.
    """
    return as_prompts(path)


def as_prompts(source: Path | Sequence[Messages]) -> list[Prompt]:
    """Return the prompts of a file, or those that a program made up.

    Raises:
        UserError: see read_prompts.
    """
    lines = PromptLines(source)
    prompts = [lines.parse(line, raw) for line, raw in lines]
    if not prompts and isinstance(source, Path):
        raise no_prompt(lines)
    return prompts


def no_prompt(lines: PromptLines) -> UserError:
    """Return the sentence for a file of blank lines."""
    return UserError(f"Prompt file {lines.name} holds no prompt. Write one JSON object a line.")


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    max_positions: int,
    template_args: dict[str, Any] | None = None,
) -> list[list[int]]:
    """Return the ids after which the target answers each prompt.

    Raises:
        UserError: a prompt is malformed, has no tokens, or leaves no room for its answer; the message names its place.
    """
    encoded = []
    for prompt in prompts:
        try:
            ids = chat.prompt_ids(tokenizer, prompt.messages, prompt.tools, template_args)
        except BadRow as error:
            raise UserError(f"{prompt.place}: {error}") from None
        check_room(prompt.place, len(ids), max_new_tokens, f"the target's {max_positions:,} positions", max_positions)
        encoded.append(ids)
    return encoded


def check_room(place: str, tokens: int, max_new_tokens: int, what: str, limit: int) -> None:
    """Refuse a prompt of no tokens, and one that leaves no room for its answer below a limit; `what` names the limit.

    Raises:
        BadRow: it is such a prompt.
    """
    if not tokens:
        raise BadRow("no tokens", f"{place} has no tokens, so there is nothing to answer. Give it text.")
    if tokens + max_new_tokens > limit:
        raise BadRow(
            "too long",
            f"{place} has {many(tokens, 'token')} and --max-new-tokens is {max_new_tokens:,}, together more "
            f"than {what}. "
            "Shorten one of them.",
        )


def _prompt(raw: bytes, place: str, line: int) -> Prompt:
    row = _parsed(raw, place, line)
    key, category = _key(row.get("id"), place, line), row.get("category")
    if is_conversation(row) and row.get("prompt") is not None:
        raise BadRow("unknown form", f'{place} must have "prompt" or "messages", got both. Leave one of them out.')
    if isinstance(row.get("prompt"), str) and row["prompt"].strip():
        row["messages"] = [{"role": "user", "content": row["prompt"]}]
    if not is_conversation(row):
        found = str(sorted(row))[:80]
        raise BadRow(
            "unknown form",
            f'{place} needs a non-empty "prompt" text or a list of "messages" objects, found keys {found}.',
        )
    try:
        messages, tools = read_conversation(row)
    except BadRow as error:
        raise BadRow(error.reason, f"{place}: {error}") from None
    while messages and messages[-1]["role"] == "assistant":  # a finished conversation: ask its last question again
        messages = messages[:-1]
    if not messages:
        raise BadRow("malformed messages", f"{place} has no message before the assistant's. Add the user's.")
    return Prompt(messages, place, key, tools, category)


def _parsed(raw: bytes, place: str, line: int) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise BadRow("not UTF-8", f"{place} is not UTF-8 (byte 0x{wrong:02x}). Convert the file to UTF-8.") from None
    except json.JSONDecodeError as error:
        raise BadRow(
            "not JSON", f"{place} is not JSON: {error.msg} at column {error.colno}. Correct the line."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise BadRow("not JSON", f"{place} is not JSON: {error}. Correct the line.") from None
    if not isinstance(row, dict):
        raise BadRow(
            "not an object", f'{place} must be a JSON object with "prompt" or "messages", found {type(row).__name__}.'
        )
    return row


def _key(given: object, place: str, line: int) -> str:
    """Return a prompt's own id as text, else its line."""
    if given is None:
        return str(line)
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        raise BadRow(
            "malformed id", f"{place} must have a text or a whole number as id, got {short(given)}. Correct it."
        )
    if _TAKEN.fullmatch(str(given)):  # or two rows could be named alike
        raise BadRow(
            "malformed id", f"{place} must have an id that does not end as {short(given)} does. Choose another id."
        )
    return str(given)
