"""Conversations as rows spell them, brought to one form: a list of messages and the tools that they may call.

Two spellings are read, `role`/`content` and ShareGPT's `from`/`value`. A message then has `role` and a text `content`,
and where it has them `reasoning_content` (also read from `reasoning` and `thinking`) and `tool_calls`, whose arguments
are objects. Other keys stay for the chat template to see; keys without a value (Parquet fills them in) are dropped.
Normalising twice changes nothing.
"""

import json
from typing import Any, cast

from paceline.records import UserError

ROLES = ("system", "user", "assistant", "tool")
_FROM = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CONVERSATION = ("messages", "conversations")
_REASONING = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


class BadRow(UserError):
    """A row that cannot be used: `reason` is the kind that is counted, the text says what is wrong with this one."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason

    def __reduce__(self) -> tuple[type["BadRow"], tuple[str, str]]:
        """Keep the reason when the error travels between processes."""
        return BadRow, (self.reason, str(self))


def is_conversation(row: dict[str, Any]) -> bool:
    """Return whether the row holds a conversation under one of its two keys."""
    return any(row.get(key) is not None for key in _CONVERSATION)


def read_conversation(row: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return the messages of a row's `messages` or `conversations`, and its tools.

    A `system` text beside them goes first, unless the conversation has a system message of its own.

    Raises:
        BadRow: something in them is malformed.
    """
    key = next((key for key in _CONVERSATION if row.get(key) is not None), _CONVERSATION[0])
    messages = read_messages(row.get(key), key)
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRow("malformed messages", f"system must be a text, got {short(system)}. Write the system prompt.")
    if system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return messages, read_tools(row.get("tools"))


def read_messages(messages: object, key: str = "messages") -> list[Message]:
    """Return the messages in the one form; `key` is their name in an error.

    Raises:
        BadRow: they are no list of objects, a role is unknown, or a content, reasoning or tool call is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow("malformed messages", f"{key} must be a list with entries, got {short(messages)}.")
    return [_message(message, at) for at, message in enumerate(messages, 1)]


def read_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools as a list of objects, or None when there are none; a JSON text of such a list is read too.

    Raises:
        BadRow: they are something else.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRow("malformed tools", f"tools must be a list or its JSON text, got bad JSON: {error}.") from None
    if tools is None or tools == [] or (isinstance(tools, str) and not tools.strip()):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(
            "malformed tools", f"tools must be a list of objects, got {short(tools)}. Give each tool's JSON schema."
        )
    return tools


def short(value: object) -> str:
    """Return what to show of a value in a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _message(message: object, at: int) -> Message:
    if not isinstance(message, dict):
        raise BadRow("malformed messages", f"Message {at} must be an object with a role, got {short(message)}.")
    given = {key: value for key, value in message.items() if value is not None}
    content_key = "content" if "role" in given else "value"
    done: Message = {"role": _role(given, message, at)}
    calls = _tool_calls(given.get("tool_calls"), at)
    content = given.get(content_key)
    done["content"] = "" if content is None and calls else _text(content, "content", at)
    reasoning = next((given[key] for key in _REASONING if given.get(key)), None)
    if reasoning is not None:
        done["reasoning_content"] = _text(reasoning, "reasoning", at)
    if calls:
        done["tool_calls"] = calls
    read = {"role", "from", content_key, "tool_calls", *_REASONING}
    return done | {key: value for key, value in given.items() if key not in read}


def _role(given: Message, message: Message, at: int) -> str:
    spelling = "role" if "role" in given else "from"
    role = given.get(spelling)
    if not isinstance(role, str):
        raise BadRow("malformed messages", f"Message {at} must be an object with a role, got {short(message)}.")
    known = dict(zip(ROLES, ROLES, strict=True)) if spelling == "role" else _FROM
    if role not in known:
        raise BadRow("unknown role", f"Message {at} has role {role!r}. Use one of {', '.join(known)}.")
    return known[role]


def _text(content: object, what: str, at: int) -> str:
    """Return a text, or the joined texts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        wrong = next((part for part in content if part.get("type") != "text"), None)
        if wrong is not None:
            raise BadRow(
                "malformed messages",
                f"Message {at} has a part of type {wrong.get('type')!r} in its {what}. Only text can be used: leave "
                "other parts out.",
            )
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise BadRow("malformed messages", f"Message {at} must have a text as {what}, got {short(content)}.")


def _tool_calls(calls: object, at: int) -> list[dict[str, Any]]:
    if not calls:
        return []
    if not isinstance(calls, list):
        raise BadRow("malformed tool call", f"Message {at} must have a list as tool_calls, got {short(calls)}.")
    return [_tool_call(call, at) for call in calls]


def _tool_call(call: object, at: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(
            "malformed tool call",
            f"Message {at} has the tool call {short(call)}. Give the function's name and its arguments.",
        )
    # Templates write arguments with `tojson`, which would put a text into quotation marks.
    done = {**function, "arguments": _arguments(function.get("arguments"), at)}
    return {**cast(dict[str, Any], call), "function": done} if function is not call else done


def _arguments(arguments: object, at: int) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, dict):
        raise BadRow(
            "malformed tool call",
            f"Message {at} calls a tool with the arguments {short(arguments)}. Give an object, or its JSON text.",
        )
    return parsed
