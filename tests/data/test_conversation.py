"""Conversations of several turns: what the target is asked, and rows that a training mask can be taken from."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.data.chat import ChatEncoder
from paceline.data.conversation import CUT, LOOP, Asker, Conversation, answer_tokens, questions
from paceline.data.loops import ends_in_loop
from paceline.data.prompt_file import Prompt
from paceline.records import Completion

# As Qwen3's: earlier answers lose their reasoning.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asker(tokenizer: Any, limit: int = 1000) -> Asker:
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return Asker(tokenizer, {}, stop_ids=[stop], max_new_tokens=8, limit=limit, limit_name="the limit")


def talk(
    tokenizer: Any, *texts: str, answers: list[str], drops: frozenset[str] = frozenset(), limit: int = 1000
) -> Any:
    """A conversation, answered as far as it goes; an answer that ends with … is cut."""
    messages = [user(text) for text in texts]
    one = Conversation(
        Prompt(messages, "p:1", "1"), "1", questions(messages, "all"), asker(tokenizer, limit), [], drops
    )
    for answer in answers:
        ids = one.ask()
        if ids is None:
            break
        cut = answer.endswith("…")
        tokens = tokenizer(answer.rstrip("…") + "<|im_end|>" * (not cut), add_special_tokens=False)["input_ids"]
        one.answer(Completion(tuple(ids), tuple(tokens), "length" if cut else "stop", retokenized="text" in answer))
    return one


def test_turns_that_follow_on_share_a_row(tokenizer: Any) -> None:
    """Ids and mask are those of the whole conversation, tokenized and masked at once."""
    answers = ["it is two", "the answer is two;", "it is it"]
    one = talk(tokenizer, "the sum?", "of two?", "a number", answers=answers)
    assert (one.over, one.ask()) == (True, None)
    (row,) = one.rows
    ids, mask = ChatEncoder(tokenizer).encode(row["messages"])
    behind = len(ids) - 1  # the template's line end, which is never generated
    assert row["input_ids"] == ids[:behind].tolist()
    assert row["loss_mask"] == mask[:behind].astype(int).tolist()
    assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == answers
    assert (row["id"], row["turns"], row["finish"]) == ("1", 3, "stop")
    assert answer_tokens(row) == mask.sum()


@pytest.mark.parametrize("answers", [["a text", "it"], ["it", "a text"]])
def test_a_row_says_that_ids_were_made_of_text(tokenizer: Any, answers: list[str]) -> None:
    assert [row["retokenized"] for row in talk(tokenizer, "it?", "it?", answers=answers).rows] == [True]
    assert "retokenized" not in talk(tokenizer, "it?", answers=["it"]).rows[0]


def test_a_template_that_forgets_gives_every_turn_a_row(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    one = talk(tokenizer, "the sum?", "of two?", answers=["<think>it</think>two", "it is"])
    first, second = one.rows
    assert (first["id"], second["id"]) == ("1", "1 turn 2")
    assert tokenizer.decode(second["prompt_ids"]).count("think") == 0
    assert second["messages"][1]["content"] == "<think>it</think>two"
    for row in one.rows:
        expected = ChatEncoder(tokenizer).encode(row["messages"])[0]
        assert row["prompt_ids"] + row["completion_ids"] == expected[:-1].tolist()


def test_a_cut_answer_ends_the_conversation(tokenizer: Any) -> None:
    one = talk(tokenizer, "the sum?", "of two?", "it?", "it?", answers=["two", "the ans…", "it", "it"])
    (row,) = one.rows
    assert (row["turns"], row["finish"], row["turns_left"]) == (2, "length", 2)
    assert tokenizer.decode(row["input_ids"]).endswith("<|im_start|>assistant\nthe ans")


@pytest.mark.parametrize(("answer", "reason"), [("the ans…", CUT), ("it" * 100, LOOP)])
def test_a_faulty_answer_is_left_out_and_the_turns_before_it_stay(tokenizer: Any, answer: str, reason: str) -> None:
    for first, kept in (([], 0), (["two"], 1)):
        one = talk(tokenizer, *["it?"] * (kept + 2), answers=[*first, answer], drops=frozenset({reason}))
        assert one.over
        assert one.dropped[0] == reason
        assert [row["turns_left"] for row in one.rows] == [2] * kept


def test_a_conversation_ends_where_the_limit_leaves_no_room(tokenizer: Any) -> None:
    whole = talk(tokenizer, "it?", "it?", answers=["two", "two"])
    length = len(whole.rows[0]["input_ids"])
    needed = length - 2 + 8  # the last answer, "two" and its end, may have 8 tokens
    while len(talk(tokenizer, "it?", "it?", answers=["two", "two"], limit=needed).rows[0]["messages"]) == 4:
        needed -= 1
    short = talk(tokenizer, "it?", "it?", answers=["two", "two"], limit=needed)
    assert length - needed < 8
    assert (short.rows[0]["turns"], short.rows[0]["turns_left"]) == (1, 1)


def test_what_is_asked() -> None:
    a, b = user("a"), user("b")
    said, system = {"role": "assistant", "content": "x"}, {"role": "system", "content": "s"}
    tool = {"role": "tool", "content": "t"}
    assert questions([system, a, said, b], "all") == [[system, a], [b]]
    assert questions([a, b, system], "all") == [[a], [b, system]]
    assert questions([a, said, b], "last") == [[a, said, b]]
    assert questions([a, said, tool], "all") == [[a, said, tool]]
    assert questions([system], "all") == [[system]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5] * 64, True),
        ([5] * 63, False),
        ([5] * 63 + [2], False),
        ([1, 9, *[5] * 64, 2], True),
        ([*[5] * 64, 6], False),
        ([*range(100, 116)] * 4, True),
        ([*range(100, 116)] * 3, False),
        ([7, *[*range(100, 164)] * 4], True),
        ([*range(100, 164)] * 3, False),
        ([*range(100, 165)] * 8, False),
        ([*range(100, 103)] * 21, False),
        ([*range(100, 103)] * 22, True),
        ([101, 102, *[100, 101, 102] * 22, 100], True),
        ([token for i in range(40) for token in (100, 101, 102, i)], False),
        ([], False),
        ([2], False),
    ],
)
def test_loops(tokens: list[int], expected: bool) -> None:
    assert ends_in_loop(tokens, stop_ids=(2,)) is expected
