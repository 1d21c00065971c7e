"""Prompt files: what is wrong is named with file and line, also once the tokenizer has looked at it."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompt_file import Prompt, PromptLines, as_prompts, encode_prompts, read_prompts
from paceline.records import UserError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the file without a path."""
    monkeypatch.chdir(tmp_path)


def written(*lines: str) -> Path:
    Path("p.jsonl").write_bytes("".join(f"{line}\n" for line in lines).encode())
    return Path("p.jsonl")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_both_forms_and_blank_lines() -> None:
    talk = [{"role": "system", "content": "s"}, user("q"), {"role": "assistant", "content": "a"}, user("r")]
    path = written('{"prompt": "one"}', "", json.dumps({"messages": talk}), "  \r", '{"prompt": "two", "id": 7}\r')
    assert read_prompts(path) == [
        Prompt([user("one")], "p.jsonl:1", "1"),
        Prompt(talk, "p.jsonl:3", "3"),
        Prompt([user("two")], "p.jsonl:5", "7"),
    ]


def test_a_finished_conversation_is_asked_its_last_question_again() -> None:
    answers = [{"role": "assistant", "content": "a"}] * 2
    (prompt,) = read_prompts(written(json.dumps({"messages": [user("q"), *answers]})))
    assert prompt.messages == [user("q")]


def test_the_other_spelling_a_system_text_and_tools() -> None:
    row = {"conversations": [{"from": "human", "value": "q"}], "system": "s", "tools": [{"name": "f"}]}
    (prompt,) = read_prompts(written(json.dumps(row)))
    assert prompt == Prompt([{"role": "system", "content": "s"}, user("q")], "p.jsonl:1", "1", [{"name": "f"}])


def test_a_system_text_and_tools_beside_a_prompt() -> None:
    row = {"prompt": "q", "system": "s", "tools": [{"name": "f"}], "messages": None}
    (prompt,) = read_prompts(written(json.dumps(row)))
    assert prompt == Prompt([{"role": "system", "content": "s"}, user("q")], "p.jsonl:1", "1", [{"name": "f"}])


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ('{"prompt": "x", "id": "a"}', "a"),
        ('{"prompt": "", "id": 7}', "7"),
        ('{"prompt": "x"}', None),
        ('{"prompt": "x", "id": true}', None),
        ('{"prompt": "x", "id": "a"', None),
        ("[]", None),
    ],
)
def test_a_refused_line_has_the_id_that_can_be_read(line: str, own: str | None) -> None:
    assert PromptLines(Path("p.jsonl")).own_id(3, line.encode()) == own


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\u000b", "\u001e"])
def test_only_a_line_feed_ends_a_line(separator: str) -> None:
    """JSON allows the first three unescaped inside a text, and `generate` writes them so."""
    line = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False)
    assert read_prompts(written('{"prompt": "x"}', line))[1] == Prompt([user(f"a{separator}b")], "p.jsonl:2", "2")


def test_a_byte_order_mark_is_no_part_of_the_prompt() -> None:
    Path("p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}')
    assert read_prompts(Path("p.jsonl")) == [Prompt([user("x")], "p.jsonl:1", "1")]


FORM = 'needs a non-empty "prompt" text or a list of "messages" objects, found keys'


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{nope", "is not JSON: Expecting property name enclosed in double quotes at column 2. Correct the line."),
        ('{"prompt": "x"} {}', "is not JSON: Extra data at column 17. Correct the line."),
        ("[1]", 'must be a JSON object with "prompt" or "messages", found list.'),
        ("null", 'must be a JSON object with "prompt" or "messages", found NoneType.'),
        ('"x"', 'must be a JSON object with "prompt" or "messages", found str.'),
        ("{}", f"{FORM} []."),
        ('{"x": 1, "a": 2}', f"{FORM} ['a', 'x']."),
        ('{"prompt": ""}', f"{FORM} ['prompt']."),
        ('{"prompt": " \\n"}', f"{FORM} ['prompt']."),
        ('{"prompt": 5}', f"{FORM} ['prompt']."),
        ('{"messages": null}', f"{FORM} ['messages']."),
        (
            '{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
            'must have "prompt" or "messages", got both. Leave one of them out.',
        ),
        (
            '{"prompt": "x", "conversations": [{"from": "human", "value": "x"}]}',
            'must have "prompt" or "messages", got both. Leave one of them out.',
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "has no message before the assistant's. Add the user's.",
        ),
        ('{"prompt": "x", "id": ""}', "must have a text or a whole number as id, got ''. Correct it."),
        ('{"prompt": "x", "id": true}', "must have a text or a whole number as id, got True. Correct it."),
        ('{"prompt": "x", "id": 1.5}', "must have a text or a whole number as id, got 1.5. Correct it."),
        (
            '{"prompt": "x", "id": "a turn 2"}',
            "must have an id that does not end as 'a turn 2' does. Choose another id.",
        ),
    ],
)
def test_lines_that_are_refused(line: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_prompts(written('{"prompt": "x"}', "", line))
    expected = f"p.jsonl:3 {sentence}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"messages": []}', "messages must be a list with entries, got []."),
        ('{"messages": "x"}', "messages must be a list with entries, got 'x'."),
        ('{"messages": ["x"]}', "Message 1 must be an object with a role, got 'x'."),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', "tools must be a list of objects, got [1]."),
        ('{"prompt": "x", "tools": [1]}', "tools must be a list of objects, got [1]."),
        ('{"prompt": "x", "system": 1}', "system must be a text, got 1."),
    ],
)
def test_messages_that_are_refused_when_they_are_read(line: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_prompts(written('{"prompt": "x"}', line))
    assert str(caught.value).startswith(f"p.jsonl:2: {sentence}")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "1" * 5000 + "}"])
def test_lines_that_json_gives_up_on(line: str) -> None:
    with pytest.raises(UserError, match=r"^p.jsonl:1 is not JSON: .* Correct the line.$"):
        read_prompts(written(line))


def test_files_that_are_refused() -> None:
    with pytest.raises(UserError, match=r"^There is no prompt file nowhere. Give a JSONL file, one prompt a line.$"):
        read_prompts(Path("nowhere"))
    with pytest.raises(UserError, match=r"^Prompt file . cannot be read: Is a directory. Give a JSONL file.$"):
        read_prompts(Path())
    with pytest.raises(UserError, match=r"^Prompt file p.jsonl holds no prompt. Write one JSON object a line.$"):
        read_prompts(written("", " "))
    Path("p.jsonl").write_bytes(b'{"prompt": "x"}\n\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"^p.jsonl:3 is not UTF-8 \(byte 0xff\). Convert the file to UTF-8.$"):
        read_prompts(Path("p.jsonl"))


def encoded(tokenizer: Any, *rows: dict[str, Any], max_new_tokens: int = 4, max_positions: int = 64) -> list[list[int]]:
    prompts = as_prompts(written('{"prompt": "what is it?"}', "", *map(json.dumps, rows)))
    return encode_prompts(tokenizer, prompts, max_new_tokens=max_new_tokens, max_positions=max_positions)


def test_prompts_end_where_the_answer_begins(tokenizer: Any) -> None:
    first, second = encoded(tokenizer, {"messages": [{"role": "system", "content": "the"}, user("it")]})
    assert tokenizer.decode(first) == "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second).startswith("<|im_start|>system\nthe<|im_end|>\n<|im_start|>user\nit")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "robot", "content": "x"}], "Message 1 has role 'robot'. Use one of system, user, assistant, tool."),
        ([user("x"), {"content": "x"}], "Message 2 must be an object with a role, got {'content': 'x'}."),
        ([{"role": "user"}], "Message 1 must have a text as content, got None."),
        ([user("\ud800")], "The messages hold half of a surrogate pair, which is no character."),
    ],
)
def test_messages_that_are_refused_are_named_by_line(tokenizer: Any, messages: list[Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        encoded(tokenizer, {"messages": messages})
    expected = f"p.jsonl:3: {sentence}"
    assert str(caught.value) == expected


def test_what_the_template_refuses_is_named_by_line(make_tokenizer: Any) -> None:
    picky = make_tokenizer("{{ raise_exception('one\nmessage, please') if messages | length > 1 }}x")
    with pytest.raises(UserError, match=r"^p.jsonl:3: The chat template refuses the messages: one\smessage, please.$"):
        encoded(picky, {"messages": [user("a"), user("b")]})


def test_a_prompt_without_tokens(make_tokenizer: Any) -> None:
    bare = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UserError, match=r"^p.jsonl:3 has no tokens, so there is nothing to answer. Give it text.$"):
        encoded(bare, {"messages": [user("")]})


def test_a_prompt_must_leave_room_for_its_answer(tokenizer: Any) -> None:
    row = {"prompt": "it " * 20}
    tokens = len(encoded(tokenizer, row)[1])
    assert len(encoded(tokenizer, row, max_new_tokens=4, max_positions=tokens + 4)) == 2
    with pytest.raises(UserError) as caught:
        encoded(tokenizer, row, max_new_tokens=5, max_positions=tokens + 4)
    expected = (
        f"p.jsonl:3 has {tokens} tokens and --max-new-tokens is 5, together more than the target's {tokens + 4} "
        "positions. Shorten one of them."
    )
    assert str(caught.value) == expected


def test_prompts_of_a_program_are_named_by_number() -> None:
    (prompt,) = as_prompts([[user("it")]])
    assert prompt.place == "prompt 1"
    with pytest.raises(UserError, match="^prompt 2: Message 1 has role 'robot'"):
        as_prompts([[user("it")], [{"role": "robot", "content": "x"}]])
