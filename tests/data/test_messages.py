"""Conversations in both spellings against the one form, written by hand."""

import json
import pickle
from typing import Any

import pytest

from paceline.data.messages import BadRow, is_conversation, read_conversation, read_messages

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_both_spellings_under_both_keys(key: str) -> None:
    sharegpt = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    want = [{"role": "system", "content": "s"}, Q, A]
    assert read_conversation({key: sharegpt}) == (want, None)
    assert read_conversation({key: want}) == (want, None)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, "user") for name in ("human", "user")),
        *((name, "assistant") for name in ("gpt", "assistant", "model", "chatgpt")),
        *((name, "tool") for name in ("tool", "observation", "function_response")),
        ("system", "system"),
    ],
)
def test_sharegpt_names(name: str, role: str) -> None:
    assert read_messages([{"from": name, "value": "x"}]) == [{"role": role, "content": "x"}]


def test_a_system_text_beside_the_messages_goes_first_unless_they_have_one() -> None:
    system = {"role": "system", "content": "own"}
    assert read_conversation({"messages": [Q, A], "system": "s"})[0] == [{"role": "system", "content": "s"}, Q, A]
    assert read_conversation({"messages": [system, Q, A], "system": "s"})[0] == [system, Q, A]
    assert read_conversation({"messages": [Q, A], "system": ""})[0] == [Q, A]


@pytest.mark.parametrize(("tools", "want"), [(TOOLS, TOOLS), (json.dumps(TOOLS), TOOLS), ([], None), ("", None)])
def test_tools_are_objects_or_their_json_text(tools: object, want: object) -> None:
    assert read_conversation({"messages": [Q, A], "tools": tools}) == ([Q, A], want)


def test_text_parts_are_joined_and_keys_without_a_value_dropped() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    given = [{"role": "user", "content": parts, "name": "eve", "tool_calls": None, "reasoning_content": None}]
    assert read_messages(given) == [{"role": "user", "content": "one two", "name": "eve"}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(key: str) -> None:
    assert read_messages([{**A, key: "r"}]) == [{**A, "reasoning_content": "r"}]
    assert read_messages([{**A, key: ""}]) == [A]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tool_calls_have_objects_as_arguments_and_a_text_beside_them(arguments: object) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}
    done = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}, answer])
    assert done == [{"role": "assistant", "content": "", "tool_calls": [CALL]}, answer]
    (bare,) = read_messages([{"role": "assistant", "tool_calls": [{"name": "add", "arguments": arguments}]}])
    assert bare["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]


@pytest.mark.parametrize("arguments", [None, ""])
def test_a_call_without_arguments(arguments: object) -> None:
    (done,) = read_messages([{**A, "tool_calls": [{"name": "now", "arguments": arguments}]}])
    assert done["tool_calls"] == [{"name": "now", "arguments": {}}]


def test_reading_twice_changes_nothing_and_the_row_stays_as_it_was() -> None:
    row = {"messages": [{"from": "human", "value": "q"}, {**A, "thinking": "r", "tool_calls": [CALL]}], "system": "s"}
    before = json.dumps(row)
    once = read_conversation(row)[0]
    assert read_messages(once) == once
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("row", "reason", "sentence"),
    [
        ({"messages": "x"}, "malformed messages", "messages must be a list with entries, got 'x'."),
        ({"conversations": []}, "malformed messages", "conversations must be a list with entries, got []."),
        ({"messages": [Q, 5]}, "malformed messages", "Message 2 must be an object with a role, got 5."),
        ({"messages": [{"content": "x"}]}, "malformed messages", "Message 1 must be an object with a role"),
        ({"messages": [{"role": "human", "content": "x"}]}, "unknown role", "Message 1 has role 'human'. Use one of"),
        ({"messages": [{"from": "bot", "value": "x"}]}, "unknown role", "Message 1 has role 'bot'. Use one of"),
        ({"messages": [{"role": "user"}]}, "malformed messages", "Message 1 must have a text as content, got None."),
        ({"messages": [{"role": "user", "content": []}]}, "malformed messages", "must have a text as content, got []."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "malformed messages",
            "Message 1 has a part of type 'image_url' in its content. Only text can be used",
        ),
        (
            {"messages": [{**A, "reasoning": 5}]},
            "malformed messages",
            "Message 1 must have a text as reasoning, got 5.",
        ),
        ({"messages": [Q], "system": 5}, "malformed messages", "system must be a text, got 5."),
        ({"messages": [Q], "tools": "{"}, "malformed tools", "tools must be a list or its JSON text, got bad JSON"),
        ({"messages": [Q], "tools": '{"a": 1}'}, "malformed tools", "tools must be a list of objects, got {'a': 1}."),
        ({"messages": [Q], "tools": ["x"]}, "malformed tools", "tools must be a list of objects, got ['x']."),
        ({"messages": [{**A, "tool_calls": "x"}]}, "malformed tool call", "must have a list as tool_calls, got 'x'."),
        ({"messages": [{**A, "tool_calls": ["x"]}]}, "malformed tool call", "has the tool call 'x'. Give the function"),
        (
            {"messages": [{**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "malformed tool call",
            "Message 1 calls a tool with the arguments '[1]'. Give an object, or its JSON text.",
        ),
    ],
)
def test_what_is_malformed_is_one_sentence(row: dict[str, Any], reason: str, sentence: str) -> None:
    with pytest.raises(BadRow) as error:
        read_conversation(row)
    assert error.value.reason == reason
    assert sentence in str(error.value)


def test_what_is_a_conversation() -> None:
    assert is_conversation({"messages": []})
    assert is_conversation({"messages": None, "conversations": [Q]})
    assert not is_conversation({"prompt": "x", "messages": None})


def test_a_bad_row_keeps_its_reason_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(BadRow("kind", "What is wrong.")))
    assert (type(copy), copy.reason, str(copy)) == (BadRow, "kind", "What is wrong.")
