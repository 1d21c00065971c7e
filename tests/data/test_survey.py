"""The look at all prompts: counts by shard, room for the longest conversation, ids."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.data.conversation import Asker
from paceline.data.prompt_file import PromptLines
from paceline.data.survey import Survey, survey
from paceline.records import UserError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def look(tokenizer: Any, *lines: Any, limit: int = 10_000, turns: Any = "all") -> Survey:
    Path("p.jsonl").write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    asker = Asker(tokenizer, {}, stop_ids=[], max_new_tokens=50, limit=limit, limit_name="the limit")
    return survey(PromptLines(Path("p.jsonl")), asker, turns, 4, lambda seen: None)


def talk(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> int:
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_counts_and_faults(tokenizer: Any) -> None:
    found = look(tokenizer, talk("a"), "", "{nope", talk("b"), *[""] * 4, talk("it " * 99), talk("c"), limit=100)
    assert (found.prompts, found.refused) == ((3, 0, 2), 2)
    assert found.first_refused.startswith("p.jsonl:3 is not JSON")


def test_room_for_the_longest_conversation(tokenizer: Any) -> None:
    short, long = talk("it?"), talk("what is it?" * 3)
    assert look(tokenizer, short, long).slots == tokens(tokenizer, long["messages"]) + 50
    three = talk("it?", "it?", "it?")
    whole = [message for one in three["messages"] for message in (one, {"role": "assistant", "content": ""})][:-1]
    assert look(tokenizer, three).slots >= tokens(tokenizer, whole) + 3 * 50
    assert look(tokenizer, three, limit=100).slots == 100
    assert look(tokenizer, three, turns="last").slots < 100


def test_a_template_that_refuses_empty_answers_gets_all_the_room_there_is(make_tokenizer: Callable[..., Any]) -> None:
    picky = make_tokenizer(
        "{% for m in messages %}{{ raise_exception('empty') if not m['content'] else m['content'] }}{% endfor %}"
    )
    assert look(picky, talk("a", "b"), limit=999).slots == 999


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": "a", "id": 3}, {"prompt": "b"}, {"prompt": "c"}], "'3' in p.jsonl:1 and in p.jsonl:3."),
        (
            [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "y"}, {"prompt": "c", "id": "x"}],
            "'x' in p.jsonl:1 and in",
        ),
    ],
)
def test_ids_that_are_not_unique(tokenizer: Any, rows: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        look(tokenizer, *rows)
    assert sentence in str(caught.value)


def test_hashes_that_are_alike_are_no_fault(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.survey._hash", lambda key: 7)
    assert look(tokenizer, *[{"prompt": "a", "id": name} for name in "abcd"]).prompts == (4,)


def test_what_can_be_read_once_only_is_refused() -> None:
    os.mkfifo("pipe")
    with pytest.raises(
        UserError, match="^Prompt file pipe must be a regular file, got a pipe or a device. Write one.$"
    ):
        PromptLines(Path("pipe"))
