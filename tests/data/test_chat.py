"""The loss mask against ChatML strings written by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.data.chat import BadRow, ChatEncoder, prompt_ids
from paceline.records import UserError

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is 1 + 1?"},
    {"role": "assistant", "content": " it is  2\n"},
    {"role": "user", "content": "and é ☃?"},
    {"role": "assistant", "content": "☃"},
    {"role": "user", "content": "bye"},
]
TALK_TEXT = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    " it is  2\n<|im_end|>\n<|im_start|>user\nand é ☃?<|im_end|>\n<|im_start|>assistant\n☃<|im_end|>\n"
    "<|im_start|>user\nbye<|im_end|>\n"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def supervised_runs(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """Decode each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(("template", "rule"), [({}, "turn prefixes"), ({"template": MARKED}, "generation markers")])
def test_answers_and_their_stop_tokens_are_supervised(
    make_tokenizer: Callable[..., Any], template: dict[str, str], rule: str
) -> None:
    tokenizer = make_tokenizer(**template)
    encoder = ChatEncoder(tokenizer)
    ids, mask = encoder.encode(TALK)
    assert encoder.mask_rule == rule
    assert tokenizer.decode(ids) == TALK_TEXT
    assert supervised_runs(tokenizer, ids, mask) == [" it is  2\n<|im_end|>", "☃<|im_end|>"]


def test_ids_are_those_of_the_written_text(tokenizer: Any) -> None:
    ids, _ = ChatEncoder(tokenizer).encode(TALK)
    assert ids.tolist() == tokenizer(TALK_TEXT, add_special_tokens=False)["input_ids"]


def test_blank_before_the_answer_belongs_to_the_prompt(make_tokenizer: Callable[..., Any]) -> None:
    """Byte-level offsets trim blanks, so the prompt's last token looks empty and as if it lay in the answer."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['content'] if m['role'] == 'user' else ' ' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
    )
    ids, mask = ChatEncoder(tokenizer).encode(
        [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "42"}]
    )
    assert tokenizer.decode(ids) == "Q 42<|im_end|>"
    assert supervised_runs(tokenizer, ids, mask) == ["42<|im_end|>"]


def test_the_answer_continues_what_generation_is_given(tokenizer: Any) -> None:
    ids, mask = ChatEncoder(tokenizer).encode(TALK[:3])
    first = int(np.flatnonzero(mask)[0])
    assert prompt_ids(tokenizer, TALK[:2]) == ids[:first].tolist()


def test_template_that_rewrites_earlier_turns_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.last %}{{ '(last)' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(BadRow, match="message 3 .*prompt_ids and completion_ids"):
        ChatEncoder(tokenizer).encode(TALK)


def test_markers_locate_answers_in_a_template_that_rewrites(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{% if messages[-1]['role'] == 'user' %}{{ 'open: ' }}{% endif %}" + MARKED)
    ids, mask = ChatEncoder(tokenizer).encode(TALK)
    assert tokenizer.decode(ids) == "open: " + TALK_TEXT
    assert supervised_runs(tokenizer, ids, mask) == [" it is  2\n<|im_end|>", "☃<|im_end|>"]


def test_template_without_a_stop_token_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(BadRow, match="without a special token"):
        ChatEncoder(tokenizer).encode(TALK)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "malformed messages"),
        ([], "malformed messages"),
        ([{"content": "x"}], "malformed messages"),
        ([{"role": "user", "content": ["x"]}], "malformed messages"),
        ([{"role": "critic", "content": "x"}], "unknown role"),
        ([{"role": "user", "content": "x"}], "empty completion"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": " \n"}], "empty completion"),
        ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}], "not Unicode"),
    ],
)
def test_bad_messages_name_their_reason(tokenizer: Any, messages: object, reason: str) -> None:
    with pytest.raises(BadRow) as error:
        ChatEncoder(tokenizer).encode(messages)
    assert error.value.reason == reason


def test_template_that_raises_is_a_bad_row(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRow, match="roles must alternate"):
        ChatEncoder(tokenizer).encode(TALK)


def test_no_chat_template_ends_the_command(make_tokenizer: Callable[..., Any]) -> None:
    encoder = ChatEncoder(make_tokenizer(None))
    assert encoder.mask_rule == "given ids"
    with pytest.raises(UserError, match="no chat template") as error:
        encoder.encode(TALK)
    assert not isinstance(error.value, BadRow)
