"""The loss mask against strings written by hand: ChatML, and a template that shows history otherwise, as Qwen3 does."""

import pickle
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from paceline.data.chat import BadRow, ChatEncoder, ChatOptions, prompt_ids
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

CHATML = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3's: the last answer has a think block, empty or not, and so have answers between tool calls that reasoned;
# earlier answers have none.
THINKING = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.arguments | tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
NO_THINKING = ChatOptions(template_args={"enable_thinking": False})


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL_TALK = [
    user("1 + 1?"),
    answer("", tool_calls=[CALL], reasoning_content="add them"),
    {"role": "tool", "content": "2"},
    answer("it is", tool_calls=[CALL]),
    {"role": "tool", "content": "3"},
    answer("it is 2", reasoning_content="so"),
]


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


def test_template_that_shows_its_last_message_otherwise(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if loop.last %}{{ '(last)' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    ids, mask = ChatEncoder(tokenizer).encode(TALK)
    assert supervised_runs(tokenizer, ids, mask) == [" it is  2\n<|im_end|>", "☃<|im_end|>"]


def test_template_that_does_not_say_where_an_answer_lies_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer("{{ messages[2]['content'] | length if messages | length > 2 }}" + CHATML)
    with pytest.raises(BadRow, match="message 3 .*prompt_ids and completion_ids"):
        ChatEncoder(tokenizer).encode(TALK)


def test_content_that_a_template_writes_twice_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    twice = CHATML.replace("{{ m['content'] +", "{{ m['content'] * (1 if loop.last else 2) +")
    with pytest.raises(BadRow, match="message 3 .*cannot be located"):
        ChatEncoder(make_tokenizer(twice)).encode(TALK)


def test_an_earlier_answer_needs_its_stop_token_at_once(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '(last)' if loop.last }}{{ '<|im_start|>' + m['content'] + '\n<|im_end|>' }}"
        "{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}"
    )
    with pytest.raises(BadRow) as error:
        ChatEncoder(tokenizer).encode(TALK)
    assert error.value.reason == "no end-of-turn token"


def test_a_template_of_its_own_for_tools(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer({"default": CHATML, "tool_use": "{{ tools | tojson + '\n' }}" + CHATML})
    messages = [user("q"), answer("a")]
    ids, mask = ChatEncoder(tokenizer).encode(messages, [{"name": "f"}])
    assert tokenizer.decode(ids).startswith('[{"name": "f"}]\n<|im_start|>user\nq')
    assert supervised_runs(tokenizer, ids, mask) == ["a<|im_end|>"]
    assert tokenizer.decode(ChatEncoder(tokenizer).encode(messages)[0]).startswith("<|im_start|>user")


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


@pytest.mark.parametrize(
    ("messages", "options", "runs"),
    [
        ([user("q"), answer("a")], ChatOptions(), ["<think>\n\n</think>\n\na<|im_end|>"]),
        ([user("q"), answer("a")], NO_THINKING, ["a<|im_end|>"]),
        ([user("q"), answer("a"), user("r"), answer("0")], NO_THINKING, ["a<|im_end|>", "0<|im_end|>"]),
        (
            [user("q"), answer("a", reasoning_content="lost"), user("r"), answer("b", reasoning_content="\nit is\n")],
            ChatOptions(),
            ["a<|im_end|>", "<think>\nit is\n</think>\n\nb<|im_end|>"],
        ),
        (
            [user("q"), answer("a", reasoning_content="lost"), user("r"), answer("b", reasoning_content="it is")],
            ChatOptions(mask_reasoning=True),
            ["a<|im_end|>", "\n</think>\n\nb<|im_end|>"],
        ),
        (
            TOOL_TALK,
            ChatOptions(),
            [
                '<think>\nadd them\n</think>\n\n<call>{"a": 1}</call><|im_end|>',
                'it is<call>{"a": 1}</call><|im_end|>',
                "<think>\nso\n</think>\n\nit is 2<|im_end|>",
            ],
        ),
        (
            TOOL_TALK,
            ChatOptions(mask_reasoning=True),
            [
                '\n</think>\n\n<call>{"a": 1}</call><|im_end|>',
                'it is<call>{"a": 1}</call><|im_end|>',
                "\n</think>\n\nit is 2<|im_end|>",
            ],
        ),
        (TOOL_TALK, ChatOptions(turns="last"), ["<think>\nso\n</think>\n\nit is 2<|im_end|>"]),
        (TOOL_TALK[:3], ChatOptions(turns="last"), ['<think>\nadd them\n</think>\n\n<call>{"a": 1}</call><|im_end|>']),
        ([*TOOL_TALK, user("bye")], ChatOptions(turns="last"), ["it is 2<|im_end|>"]),
        ([answer("\nhi"), user("q"), answer(" a\n")], NO_THINKING, ["hi<|im_end|>", " a\n<|im_end|>"]),
        ([user("q"), answer("a"), answer("b")], NO_THINKING, ["a<|im_end|>", "b<|im_end|>"]),
        ([user("q"), answer(" "), answer("b")], ChatOptions("last", False, NO_THINKING.template_args), ["b<|im_end|>"]),
    ],
)
def test_template_that_shows_history_otherwise(
    make_tokenizer: Callable[..., Any], messages: list[dict[str, Any]], options: ChatOptions, runs: list[str]
) -> None:
    tokenizer = make_tokenizer(THINKING)
    ids, mask = ChatEncoder(tokenizer, options).encode(messages, [CALL])
    assert supervised_runs(tokenizer, ids, mask) == runs
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [{key: value for key, value in m.items() if key != "tool_calls"} | parsed_calls(m) for m in messages],
        tools=[CALL],
        tokenize=False,
    )


def parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"arguments": {"a": 1}}}]} if "tool_calls" in message else {}


def test_think_blocks_in_all_answers_to_the_last_question(make_tokenizer: Callable[..., Any]) -> None:
    always = THINKING.replace("and (loop.last or m.reasoning_content)", "")
    tokenizer = make_tokenizer(always)
    ids, mask = ChatEncoder(tokenizer).encode(TOOL_TALK)
    assert supervised_runs(tokenizer, ids, mask) == [
        '<think>\nadd them\n</think>\n\n<call>{"a": 1}</call><|im_end|>',
        '<think>\n\n</think>\n\nit is<call>{"a": 1}</call><|im_end|>',
        "<think>\nso\n</think>\n\nit is 2<|im_end|>",
    ]


def test_what_a_template_writes_before_the_stop_token_is_supervised(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(CHATML.replace("'<|im_end|>'", "'.<|im_end|>'"))
    ids, mask = ChatEncoder(tokenizer).encode(TALK)
    assert supervised_runs(tokenizer, ids, mask) == [" it is  2\n.<|im_end|>", "☃.<|im_end|>"]


def test_reasoning_inside_the_content(tokenizer: Any) -> None:
    """A template that knows no reasoning: the content says what it is."""
    messages = [user("q"), answer("<think>\nthe sum\n</think>\n\na"), user("r"), answer("b </think>")]
    options = ChatOptions(mask_reasoning=True)
    ids, mask = ChatEncoder(tokenizer, options).encode(messages)
    assert supervised_runs(tokenizer, ids, mask) == ["\n</think>\n\na<|im_end|>", "b </think><|im_end|>"]
    ids, mask = ChatEncoder(tokenizer).encode(messages)
    assert supervised_runs(tokenizer, ids, mask)[0] == "<think>\nthe sum\n</think>\n\na<|im_end|>"


def test_reasoning_that_is_not_rendered_is_refused(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer)
    with pytest.raises(BadRow, match="Message 2 .*does not render") as error:
        encoder.encode([user("q"), answer("a", reasoning_content="r")])
    assert error.value.reason == "reasoning not rendered"
    encoder.encode([user("q"), answer("a", reasoning_content="r"), user("bye")])


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([user("q"), answer("a")], [CALL], "tools not rendered"),
        ([user("q"), answer("a", tool_calls=[CALL]), user("r"), answer("b")], None, "tool calls not rendered"),
    ],
)
def test_tools_that_are_not_rendered_are_refused(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, reason: str
) -> None:
    with pytest.raises(BadRow, match="so they would be lost") as error:
        ChatEncoder(tokenizer).encode(messages, tools)
    assert error.value.reason == reason


def test_reasoning_that_the_generation_prompt_leaves_no_place_for(make_tokenizer: Callable[..., Any]) -> None:
    messages = [user("q"), answer("a", reasoning_content="r")]
    tokenizer = make_tokenizer(THINKING)
    with pytest.raises(BadRow, match="Message 2 .*does not lead. Mask reasoning"):
        ChatEncoder(tokenizer, NO_THINKING).encode(messages)
    masked = ChatOptions(mask_reasoning=True, template_args={"enable_thinking": False})
    ids, mask = ChatEncoder(tokenizer, masked).encode(messages)
    assert supervised_runs(tokenizer, ids, mask) == ["a<|im_end|>"]


MARKED_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (ChatOptions(), ["<think>the sum</think>a<|im_end|>", "b<|im_end|>"]),
        (ChatOptions(mask_reasoning=True), ["</think>a<|im_end|>", "b<|im_end|>"]),
        (ChatOptions(turns="last"), ["b<|im_end|>"]),
    ],
)
def test_options_with_markers(make_tokenizer: Callable[..., Any], options: ChatOptions, runs: list[str]) -> None:
    tokenizer = make_tokenizer(MARKED_THINKING)
    messages = [user("q"), answer("a", reasoning_content="the sum"), user("r"), answer("b"), user("bye")]
    ids, mask = ChatEncoder(tokenizer, options).encode(messages)
    assert supervised_runs(tokenizer, ids, mask) == runs


@pytest.mark.parametrize(
    ("template", "options"),
    [
        *[
            (template, turns)
            for template in (CHATML, MARKED, THINKING)
            for turns in (ChatOptions(), ChatOptions("last"))
        ],
        (THINKING, NO_THINKING),
    ],
)
def test_preformatted_text_gives_what_messages_give(
    make_tokenizer: Callable[..., Any], template: str, options: ChatOptions
) -> None:
    encoder = ChatEncoder(make_tokenizer(template), options)
    nested = [user("q"), answer("the <|im_start|>assistant\nsum")]
    talks = [TALK, TALK[1:5], TALK[:3], nested, [user("q"), answer("\n\na"), user("it"), answer("the sum")]]
    rendered = [encoder.render(talk) for talk in talks]
    texts = [encoder.preformatted(one.text) for one in rendered]
    for (ids, mask), (text_ids, text_mask) in zip(encoder.tokenize(rendered), encoder.tokenize(texts), strict=True):
        assert text_ids.tolist() == ids.tolist()
        assert text_mask.tolist() == mask.tolist()
        assert ids.dtype == np.int32


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty completion"),
        ("the sum", "empty completion"),
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "empty completion"),
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nthe sum", "no end-of-turn token"),
        ("\ud800", "not Unicode"),
    ],
)
def test_preformatted_text_without_a_whole_answer(tokenizer: Any, text: str, reason: str) -> None:
    encoder = ChatEncoder(tokenizer)
    with pytest.raises(BadRow) as error:
        for done in encoder.tokenize([encoder.preformatted(text)]):
            raise done  # type: ignore[misc]
    assert error.value.reason == reason


def test_preformatted_text_that_the_template_cannot_explain(make_tokenizer: Callable[..., Any]) -> None:
    masked = ChatEncoder(make_tokenizer(), ChatOptions(mask_reasoning=True))
    with pytest.raises(UserError, match="Masking reasoning needs messages"):
        masked.preformatted("x")
    with pytest.raises(UserError, match="must open an answer with a special token .* got 'A: '"):
        plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        ChatEncoder(make_tokenizer(plain + "{{ 'A: ' if add_generation_prompt }}")).preformatted("x")
    with pytest.raises(UserError, match="must open and close all answers alike"):
        counted = CHATML.replace("'<|im_start|>' + m", "'<|im_start|>' + loop.index | string + m")
        ChatEncoder(make_tokenizer(counted)).preformatted("x")
    with pytest.raises(UserError, match="no chat template"):
        ChatEncoder(make_tokenizer(None)).preformatted("x")


def test_an_answer_among_all_private_characters_cannot_be_located(make_tokenizer: Callable[..., Any]) -> None:
    every = "".join(map(chr, range(0xE000, 0xF900)))
    talk = [user(every), answer("a"), user("r"), answer("b")]
    for left_out in (0, 1):
        talk[0] = user(every[left_out:])
        with pytest.raises(BadRow, match="hold all characters of Unicode's private use area") as error:
            ChatEncoder(make_tokenizer(THINKING)).encode(talk)
        assert error.value.reason == "no free character"
    talk[0] = user(every[2:])
    assert ChatEncoder(make_tokenizer(THINKING)).encode(talk)


def test_a_bad_text_does_not_spoil_the_batch_and_limits_of_the_tokenizer_do_not_count(tokenizer: Any) -> None:
    encoder = ChatEncoder(tokenizer)
    good = encoder.render(TALK)
    tokenizer(["a b", "c"], truncation=True, max_length=1, padding=True)
    first, bad, second = encoder.tokenize([good, encoder.preformatted("the sum"), good])
    assert isinstance(bad, BadRow)
    assert first[0].tolist() == second[0].tolist() == tokenizer(TALK_TEXT, add_special_tokens=False)["input_ids"]
    assert encoder.tokenize([]) == []


def test_a_copy_in_another_process_says_the_same(make_tokenizer: Callable[..., Any]) -> None:
    options = ChatOptions("last", True, {"enable_thinking": False, "asked": "x"})
    encoder = ChatEncoder(make_tokenizer(THINKING), options)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.mask_rule == encoder.mask_rule
    assert copy.mask_rule == "turn prefixes; last turn only; reasoning masked; asked='x'; enable_thinking=False"
    for got, want in zip(copy.encode(TALK), encoder.encode(TALK), strict=True):
        assert got.tolist() == want.tolist()


def test_arguments_that_paceline_sets(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="must not be one that paceline sets itself, got tools"):
        ChatEncoder(tokenizer, ChatOptions(template_args={"tools": []}))


def test_arguments_that_the_template_does_not_know(make_tokenizer: Callable[..., Any]) -> None:
    typo = ChatOptions(template_args={"enable_thinking": False, "enable_thinkin": False})
    for template in (THINKING, CHATML, None):
        with pytest.raises(UserError, match=r"never mentions enable_thinkin.* Correct its name or leave it out\."):
            ChatEncoder(make_tokenizer(template), typo)
    both = make_tokenizer({"default": CHATML, "tool_use": THINKING})
    assert ChatEncoder(both, NO_THINKING).encode(TALK)


def test_prompt_ids_with_tools_and_arguments(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(THINKING)
    ids = prompt_ids(tokenizer, [user("q")], [{"name": "f"}], {"enable_thinking": False})
    assert tokenizer.decode(ids) == (
        '<|im_start|>tools\n[{"name": "f"}]<|im_end|>\n<|im_start|>user\nq<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("marked", [False, True])
def test_the_day_does_not_matter(make_tokenizer: Callable[..., Any], marked: bool) -> None:
    """As Llama 3.x writes today's date, unless it is given one."""
    base = MARKED if marked else CHATML
    head = "\n  {% macro day(how) %}{{ strftime_now(how) }}{% endmacro %}"
    head += "{% if strftime_now is defined %}{{ '<|im_start|>system\n' + (date_string or day('%d %b %Y, %H:%M')) }}"
    dated, plain = make_tokenizer(head + "{% endif %}{{ '<|im_end|>\n' }}" + base), make_tokenizer(base)
    talk, answered = [user("1 + 1?")], [user("1 + 1?"), answer("2")]
    given = ChatOptions(template_args={"date_string": "x"})
    for options, shown in ((ChatOptions(), "01 Jan 2025, 00:00"), (given, "x")):
        start = f"\n<|im_start|>system\n{shown}<|im_end|>\n"
        asked = prompt_ids(dated, talk, template_args=options.template_args)
        assert dated.decode(asked) == start + plain.decode(prompt_ids(plain, talk))
        ids, mask = ChatEncoder(dated, options).encode(answered)
        assert dated.decode(ids) == start + plain.decode(ChatEncoder(plain).encode(answered)[0])
        assert supervised_runs(dated, ids, mask) == ["2<|im_end|>"]
    with pytest.raises(UserError, match="got strftime_now"):
        ChatEncoder(dated, ChatOptions(template_args={"strftime_now": "x"}))


@pytest.mark.parametrize("how", ["%d %b %Y", "%Y-%m-%d", "%A, %B %-d, %Y", "%H:%M:%S %p", "%%d 5%%", "%j"])
def test_the_day_is_written_as_asked_for(make_tokenizer: Callable[..., Any], how: str) -> None:
    tokenizer = make_tokenizer(f"{{{{ strftime_now({how!r}) }}}}")
    assert tokenizer.decode(prompt_ids(tokenizer, [user("x")])) == datetime(2025, 1, 1).strftime(how)
