"""Loss masks with real templates and tokenizers: SmolLM2's ChatML and Qwen3's, which rewrites history.

The supervised texts are written by hand. Beside them each answer is compared with what the tokenizer itself says it is
asked with: those ids are a prefix of the row, not supervised at their end, and what follows them is.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from paceline.data.chat import BadRow, ChatEncoder, ChatOptions, prompt_ids
from paceline.data.messages import read_conversation
from paceline.runtime.profile import cache_folder
from paceline.target.load import load_tokenizer
from paceline.target.smollm2 import fetch_smollm2

pytestmark = pytest.mark.interop

NO_THINKING = ChatOptions(template_args={"enable_thinking": False})
EMPTY = "<think>\n\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
        },
    }
]
TALK = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "What is 12 + 30?"},
        {"from": "gpt", "value": " It is 42.\n\nReally: 42.\n"},
        {"from": "human", "value": "And 雪 in English?"},
        {"from": "gpt", "value": "0"},
        {"from": "human", "value": "Thanks ☃!"},
        {"from": "gpt", "value": "Snow 雪 ☃."},
    ],
}
REASONED = {
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "One and one."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Check: 2.\n\nFine\n"},
    ]
}
CALLS = {
    "tools": TOOLS,
    "messages": [
        {"role": "user", "content": "Add 1 and 2, é."},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I call.",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2, "é"]}'}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "<tool_response>4"},
        {
            "role": "assistant",
            "content": "Again.",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3.", "reasoning": "Three."},
    ],
}


@pytest.fixture(scope="module")
def qwen3() -> Any:
    folder = os.environ.get("PACELINE_QWEN3_TOKENIZER")
    assert folder, "PACELINE_QWEN3_TOKENIZER must name the folder of Qwen3's tokenizer.json: run `make interop`."
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def smollm2() -> Any:
    folder: Path = fetch_smollm2(cache_folder(), lambda text: None)
    return load_tokenizer(str(folder))


def runs_of(tokenizer: Any, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """Decode each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def check_against_the_tokenizer(
    encoder: ChatEncoder, row: dict[str, Any], ids: np.ndarray, mask: np.ndarray, asked: Sequence[int]
) -> None:
    """Compare with transformers' own rendering and tokenizing; `asked` counts the messages before some answers."""
    messages, tools = read_conversation(row)
    how = {"tools": tools, "tokenize": True, "return_dict": False, **encoder.options.template_args}
    assert ids.tolist() == encoder.tokenizer.apply_chat_template(messages, **how)
    for count in asked:
        prompt = encoder.tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True, **how)
        assert prompt == prompt_ids(encoder.tokenizer, messages[:count], tools, encoder.options.template_args)
        assert ids[: len(prompt)].tolist() == prompt
        assert mask[len(prompt) - 3 : len(prompt) + 2].tolist() == [False] * 3 + [True] * 2


def check_preformatted(encoder: ChatEncoder, row: dict[str, Any], ids: np.ndarray, mask: np.ndarray) -> None:
    messages, tools = read_conversation(row)
    text = encoder.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **encoder.options.template_args)
    (done,) = encoder.tokenize([encoder.preformatted(text)])
    assert not isinstance(done, BadRow)
    assert done[0].tolist() == ids.tolist()
    assert done[1].tolist() == mask.tolist()


def test_smollm2(smollm2: Any) -> None:
    encoder = ChatEncoder(smollm2)
    messages, tools = read_conversation(TALK)
    ids, mask = encoder.encode(messages, tools)
    assert smollm2.decode(ids).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 + 30?")
    assert runs_of(smollm2, ids, mask) == [
        " It is 42.\n\nReally: 42.\n<|im_end|>",
        "0<|im_end|>",
        "Snow 雪 ☃.<|im_end|>",
    ]
    check_against_the_tokenizer(encoder, TALK, ids, mask, asked=(2, 4, 6))
    check_preformatted(encoder, TALK, ids, mask)


def test_smollm2_writes_a_system_prompt_that_the_row_has_not(smollm2: Any) -> None:
    row = {"messages": read_conversation(TALK)[0][1:]}
    encoder = ChatEncoder(smollm2, ChatOptions(turns="last"))
    ids, mask = encoder.encode(row["messages"])
    assert smollm2.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert runs_of(smollm2, ids, mask) == ["Snow 雪 ☃.<|im_end|>"]
    check_against_the_tokenizer(encoder, row, ids, mask, asked=(5,))
    check_preformatted(encoder, row, ids, mask)


def test_smollm2_merges_a_blank_with_the_prompt(smollm2: Any) -> None:
    """The token of the line feed before the answer and of its first blank is neither's, and not supervised."""
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "  two"}]}
    encoder = ChatEncoder(smollm2)
    ids, mask = encoder.encode(row["messages"])
    assert runs_of(smollm2, ids, mask) == [" two<|im_end|>"]
    assert smollm2.decode(ids[int(np.flatnonzero(mask)[0]) - 1]) == "\n "
    check_preformatted(encoder, row, ids, mask)


def test_smollm2_does_not_lose_reasoning_silently(smollm2: Any) -> None:
    with pytest.raises(BadRow, match="Message 4 .*does not render"):
        ChatEncoder(smollm2).encode(read_conversation(REASONED)[0])


# The messages before answers whose prompt is a prefix of the row: with thinking switched off only the last one is, for
# the template shows earlier answers without the empty think block that they were asked with.
@pytest.mark.parametrize(
    ("row", "options", "runs", "asked"),
    [
        (
            TALK,
            ChatOptions(),
            [" It is 42.\n\nReally: 42.\n<|im_end|>", "0<|im_end|>", EMPTY + "Snow 雪 ☃.<|im_end|>"],
            (2, 4, 6),
        ),
        (
            TALK,
            NO_THINKING,
            [" It is 42.\n\nReally: 42.\n<|im_end|>", "0<|im_end|>", "Snow 雪 ☃.<|im_end|>"],
            (6,),
        ),
        (
            REASONED,
            ChatOptions(),
            ["2<|im_end|>", "<think>\nCheck: 2.\n\nFine\n</think>\n\nYes.<|im_end|>"],
            (1, 3),
        ),
        (REASONED, ChatOptions(turns="last"), ["<think>\nCheck: 2.\n\nFine\n</think>\n\nYes.<|im_end|>"], (3,)),
        (
            CALLS,
            ChatOptions(),
            [
                f"<think>\nI call.\n</think>\n\n{CALL}<|im_end|>",
                f"Again.\n{CALL}<|im_end|>",
                "<think>\nThree.\n</think>\n\nIt is 3.<|im_end|>",
            ],
            (1, 4, 6),
        ),
    ],
)
def test_qwen3(qwen3: Any, row: dict[str, Any], options: ChatOptions, runs: list[str], asked: tuple[int, ...]) -> None:
    encoder = ChatEncoder(qwen3, options)
    ids, mask = encoder.encode(*read_conversation(row))
    assert runs_of(qwen3, ids, mask) == runs
    check_against_the_tokenizer(encoder, row, ids, mask, asked)
    check_preformatted(encoder, row, ids, mask)


def test_qwen3_calls_tools_without_thinking(qwen3: Any) -> None:
    bare = [{k: v for k, v in message.items() if k != "reasoning"} for message in CALLS["messages"]]
    row = {"tools": TOOLS, "messages": bare}
    encoder = ChatEncoder(qwen3, NO_THINKING)
    ids, mask = encoder.encode(*read_conversation(row))
    assert runs_of(qwen3, ids, mask) == [f"{CALL}<|im_end|>", f"Again.\n{CALL}<|im_end|>", "It is 3.<|im_end|>"]
    check_against_the_tokenizer(encoder, row, ids, mask, asked=(6,))
    check_preformatted(encoder, row, ids, mask)


@pytest.mark.parametrize(
    ("row", "runs"),
    [
        (TALK, [" It is 42.\n\nReally: 42.\n<|im_end|>", "0<|im_end|>", EMPTY + "Snow 雪 ☃.<|im_end|>"]),
        # A full stop and the line feed behind it are one token, which is partly reasoning; after "Fine" it is not.
        (REASONED, ["2<|im_end|>", "\n</think>\n\nYes.<|im_end|>"]),
        (
            CALLS,
            [f"</think>\n\n{CALL}<|im_end|>", f"Again.\n{CALL}<|im_end|>", "</think>\n\nIt is 3.<|im_end|>"],
        ),
    ],
)
def test_qwen3_with_reasoning_masked(qwen3: Any, row: dict[str, Any], runs: list[str]) -> None:
    encoder = ChatEncoder(qwen3, ChatOptions(mask_reasoning=True))
    messages, tools = read_conversation(row)
    ids, mask = encoder.encode(messages, tools)
    assert runs_of(qwen3, ids, mask) == runs
    inline = [
        {**message, "content": f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"}
        if reasoning
        else message
        for message in messages
        for reasoning in [message.pop("reasoning_content", "")]
    ]
    for got, want in zip(encoder.encode(inline, tools), (ids, mask), strict=True):
        assert got.tolist() == want.tolist()


def test_qwen3_answers_where_its_template_is_asked_for_them_in_odd_places(qwen3: Any) -> None:
    """An answer first, two in a row, and a conversation that ends with the user."""
    talk = [
        {"role": "assistant", "content": "Welcome."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "assistant", "content": "\n\nHello?\n"},
        {"role": "user", "content": "Bye."},
    ]
    ids, mask = ChatEncoder(qwen3).encode(talk)
    # The line feeds before "Hello" are one token with that of the prompt.
    assert runs_of(qwen3, ids, mask) == ["Welcome.<|im_end|>", "Yes?<|im_end|>", "Hello?\n<|im_end|>"]
    assert ids.tolist() == qwen3.apply_chat_template(talk, return_dict=False)


BITS = [
    "\n",
    "\n\n",
    "  ",
    " ",
    "a",
    "Hello",
    "0",
    "42",
    " é",
    "雪",
    "☃",
    ".\n",
    "\t",
    "e\u0301",
    '{"',
    "<",
    "\r\n",
    "</th",
]


def some_text(rng: random.Random) -> str:
    text = "".join(rng.choices(BITS, k=rng.randint(1, 12)))
    return text if text.strip() else f"{text}x"


def some_talk(rng: random.Random, *, thinking: bool) -> list[dict[str, Any]]:
    def answer(**more: Any) -> dict[str, Any]:
        reasoning = {"reasoning_content": f"r{some_text(rng)}"} if thinking and rng.random() < 0.5 else {}
        return {"role": "assistant", "content": some_text(rng), **reasoning, **more}

    talk = [{"role": "system", "content": some_text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        talk.append({"role": "user", "content": some_text(rng)})
        for _ in range(rng.choice([0, 0, 1, 2])):
            calls = [{"function": {"name": "f", "arguments": {"x": some_text(rng)}}}] * rng.randint(1, 2)
            results = [{"role": "tool", "content": some_text(rng)}] * rng.randint(1, 2)
            talk += [answer(tool_calls=calls), *results]
        talk.append(answer())
    return talk


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_against_a_scan_of_the_ids(qwen3: Any, thinking: bool) -> None:
    """Random conversations without special tokens in them, so every <|im_start|>assistant opens an answer."""
    start, end, assistant, think = qwen3.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "assistant", "<think>"])
    rng = random.Random(thinking)
    encoder = ChatEncoder(qwen3, ChatOptions() if thinking else NO_THINKING)
    for _ in range(200):
        rendered = encoder.render(some_talk(rng, thinking=thinking))
        for done in encoder.tokenize([rendered, encoder.preformatted(rendered.text)]):
            assert not isinstance(done, BadRow)
            ids, mask = done
            want = np.zeros_like(mask)
            for at in np.flatnonzero((ids[:-1] == start) & (ids[1:] == assistant)):
                first = at + 3  # behind the line feed, with whatever is merged with it
                if not thinking and ids[first] == think:  # the prompt goes on with an empty think block of four tokens
                    first += 4
                want[first : at + np.flatnonzero(ids[at:] == end)[0] + 1] = True
            assert mask.tolist() == want.tolist(), rendered.text
