"""Every row ends as a sample or refused with a reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.chat import BadRow, ChatEncoder, prompt_ids
from paceline.data.exclude import read_eval_sets
from paceline.data.pieces import _entry
from paceline.data.rows import Refused, RowLimits, Sample, encode_rows

LIMITS = RowLimits(max_length=40, on_long="refuse", mask_token_id=2, vocab_size=300)
IDS = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9, 1]}
MASKED = {"input_ids": [5, 6, 7, 8, 9, 1], "loss_mask": [0, 0, 0, 1, 1, 1]}
PAIR = {"prompt": "what is it?", "completion": "the sum"}
TALK = {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}]}
SHARE_GPT = {"conversations": [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "the sum"}]}
TURNS = {"prompt": TALK["messages"][:1], "completion": TALK["messages"][1:]}
TEXT = {"text": "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\nthe sum<|im_end|>\n"}


def encode(tokenizer: Any, *rows: Any, limits: RowLimits = LIMITS, **more: Any) -> list[Sample | Refused]:
    """Rows that are no objects are lines of a file."""
    numbered = [(i, row.encode() if isinstance(row, str) else row) for i, row in enumerate(rows, 1)]
    return encode_rows(numbered, ChatEncoder(tokenizer), limits, **more)


def kept(end: Sample | Refused) -> Sample:
    assert isinstance(end, Sample), end
    return end


@pytest.mark.parametrize(
    "row", [IDS, MASKED, {k: np.array(v) for k, v in MASKED.items()}, {**TALK, **IDS, "finish": "stop"}]
)
def test_ids_are_kept_as_they_are(tokenizer: Any, row: dict[str, Any]) -> None:
    """`paceline generate` writes messages too; its ids are what the target said."""
    sample = kept(encode(tokenizer, row)[0])
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9, 1]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert sample.candidates == 2


def test_every_form_of_a_conversation_gives_the_same(tokenizer: Any) -> None:
    ends = [kept(end) for end in encode(tokenizer, *(json.dumps(row) for row in (PAIR, TALK, SHARE_GPT, TURNS, TEXT)))]
    assert [end.line for end in ends] == [1, 2, 3, 4, 5]
    assert tokenizer.decode(ends[0].input_ids[ends[0].loss_mask]) == "the sum<|im_end|>"
    for end in ends:
        assert end.input_ids.tolist() == ends[0].input_ids.tolist()
        assert end.loss_mask.tolist() == ends[0].loss_mask.tolist()


@pytest.mark.parametrize("row", [PAIR, TEXT, IDS, MASKED, SHARE_GPT])
def test_a_key_without_a_value_is_none(tokenizer: Any, row: dict[str, Any]) -> None:
    """As files have it that were made of rows of several forms."""
    everything = dict.fromkeys([*IDS, *MASKED, *TALK, *SHARE_GPT, *PAIR, *TEXT])
    alone, among = encode(tokenizer, row, {**everything, **row})
    assert kept(among).input_ids.tolist() == kept(alone).input_ids.tolist()


BAD = [
    ("{not json", "not JSON"),
    ("", "not JSON"),
    ("[1, 2]", "not an object"),
    ('{"x": "x"}', "unknown form"),
    ('{"text": ""}', "malformed text"),
    ('{"messages": null}', "malformed messages"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": "{"}', "malformed tools"),
    ('{"prompt": "x", "completion": ""}', "empty completion"),
    ('{"prompt": "x", "completion": null}', "malformed messages"),
    ('{"prompt_ids": [4], "completion_ids": []}', "empty completion"),
    ('{"prompt_ids": [], "completion_ids": [4, 5]}', "empty prompt"),
    ('{"prompt_ids": [4], "completion_ids": [4, "5"]}', "malformed ids"),
    ('{"prompt_ids": [4], "completion_ids": [4, true]}', "malformed ids"),
    ('{"prompt_ids": [4], "completion_ids": [4, 300]}', "id outside the vocabulary"),
    ('{"prompt_ids": [-4], "completion_ids": [4, 5]}', "id outside the vocabulary"),
    ('{"prompt_ids": [4], "completion_ids": [4, 18446744073709551617]}', "id outside the vocabulary"),
    ('{"input_ids": [4, 5, 6], "loss_mask": [0, 1]}', "malformed mask"),
    ('{"input_ids": [4, 5, 6], "loss_mask": [0, 1, 2]}', "malformed mask"),
    ('{"input_ids": [4, 5, 6], "loss_mask": "011"}', "malformed mask"),
    ('{"input_ids": [4, 5, 6], "loss_mask": [1, [0], 1]}', "malformed mask"),
    ('{"input_ids": [4, 5, 6], "loss_mask": []}', "malformed mask"),
    ('{"input_ids": [4, 5, 6], "loss_mask": [0, 0, 0]}', "no two supervised tokens"),
    ('{"prompt_ids": [4], "completion_ids": [4]}', "no two supervised tokens"),
    ('{"prompt_ids": [4, 2], "completion_ids": [4, 5]}', "contains the mask token"),
    ('{"messages": [{"role": "robot", "content": "x"}]}', "unknown role"),
    (json.dumps({"prompt_ids": [4], "completion_ids": [4] * 40}), "too long"),
]


def test_bad_rows_are_refused_with_reason_and_line(tokenizer: Any) -> None:
    ends = encode(tokenizer, json.dumps(TALK), *(line for line, _ in BAD), json.dumps(PAIR))
    assert [kept(ends[0]).line, kept(ends[-1]).line] == [1, len(BAD) + 2]
    refused = [end for end in ends if isinstance(end, Refused)]
    assert [(end.line, end.reason) for end in refused] == [(i, reason) for i, (_, reason) in enumerate(BAD, 2)]
    assert all(end.detail.endswith(".") for end in refused)
    assert refused[0].row == "{not json"
    assert refused[2].row == [1, 2]


DEEP = [700, 800, 860, 920, 960, 990]


@pytest.mark.parametrize("depth", DEEP)
@pytest.mark.parametrize("where", ["tools", "arguments", "messages", "beside ids"])
def test_nesting_that_nobody_can_walk_through_is_refused(
    make_tokenizer: Callable[..., Any], tmp_path: Path, where: str, depth: int
) -> None:
    nested = "[" * depth + "]" * depth
    call = f'{{"function": {{"name": "f", "arguments": {{"a": {nested}}}}}}}'
    asked = json.dumps({"role": "user", "content": "q"})
    line = {
        "tools": f'{{"tools": [{{"a": {nested}}}], {json.dumps(PAIR)[1:]}',
        "arguments": f'{{"messages": [{asked}, {{"role": "assistant", "tool_calls": [{call}]}}]}}',
        "messages": f'{{"messages": {nested}}}',
        "beside ids": f'{{"messages": [{nested}], {json.dumps(IDS)[1:]}',
    }[where]
    template = (
        "{{ (tools or '') | tojson }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ (m['tool_calls'] or '') | tojson }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (tmp_path / "eval.jsonl").write_text('{"prompt": "no such words"}\n')
    exclude = read_eval_sets([tmp_path / "eval.jsonl"])
    limits = RowLimits(max_length=9000, on_long="refuse", mask_token_id=None, vocab_size=400)
    good = json.dumps(PAIR).encode()
    chat = ChatEncoder(make_tokenizer(template))
    (bad, kept_one) = encode_rows([(1, line.encode()), (2, good)], chat, limits, exclude)
    assert isinstance(kept_one, Sample)
    if isinstance(bad, Refused):
        assert bad.reason in {"nested too deeply", "not JSON", "malformed messages", "no end-of-turn token"}
        assert _entry("a.jsonl", bad).startswith('{"file": "a.jsonl", "line": 1, ')
    else:
        assert depth < 960 or where == "beside ids"


def deeper_than_any_stack() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):  # Python 3.13's json takes some thousands
        deep = [deep]
    return deep


def test_objects_of_any_depth(tokenizer: Any, make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "no such words"}\n')
    exclude = read_eval_sets([tmp_path / "eval.jsonl"])
    deep = deeper_than_any_stack()
    refused, ids = encode(tokenizer, {"messages": [deep]}, {"messages": [deep], **IDS}, exclude=exclude)
    assert isinstance(refused, Refused)
    assert refused.reason == "nested too deeply"
    assert isinstance(ids, Sample)
    with pytest.raises(BadRow, match="too deeply for the chat template"):
        prompt_ids(make_tokenizer("{{ tools | tojson }}"), TALK["messages"][:1], [{"name": deep}])


def test_what_cannot_be_written_as_json_is_quarantined_as_its_line() -> None:
    deep = deeper_than_any_stack()
    entry = json.loads(_entry("a.jsonl", Refused(1, "nested too deeply", "It is.", deep, None, "[[...]]")))
    assert entry["row"] == "[[...]]"


def test_a_line_that_is_not_utf8_is_refused_and_its_bytes_are_shown(tokenizer: Any) -> None:
    (end,) = encode_rows([(7, b'{"prompt": "\xff"}')], ChatEncoder(tokenizer), LIMITS)
    assert isinstance(end, Refused)
    assert (end.line, end.reason) == (7, "not UTF-8")
    assert "0xff" in end.detail
    assert "\\xff" in end.row


def test_a_byte_order_mark_is_no_fault(tokenizer: Any) -> None:
    assert isinstance(
        encode_rows([(1, b"\xef\xbb\xbf" + json.dumps(PAIR).encode())], ChatEncoder(tokenizer), LIMITS)[0], Sample
    )


def test_truncation_cuts_at_the_right_and_is_counted(tokenizer: Any) -> None:
    limits = replace(LIMITS, max_length=5, on_long="truncate", mask_token_id=None)
    late = {"prompt_ids": [4] * 4, "completion_ids": [4] * 4}
    long = {"input_ids": [5, 6, 7, 8, 9, 1, 1], "loss_mask": [0, 0, 0, 1, 1, 1, 0]}
    cut, whole, refused = encode(tokenizer, long, {"prompt_ids": [5], "completion_ids": [6] * 4}, late, limits=limits)
    assert kept(cut).input_ids.tolist() == [5, 6, 7, 8, 9]
    assert (kept(cut).tokens_cut, kept(cut).supervised_cut) == (2, 1)
    assert (kept(whole).tokens_cut, kept(whole).supervised_cut) == (0, 0)
    assert isinstance(refused, Refused)
    assert refused.reason == "no two supervised tokens"
    assert "after truncation" in refused.detail


def test_common_prefixes_stay_whole(tokenizer: Any) -> None:
    """Several completions of one prompt are as many samples, each with the whole prompt."""
    completions = ["the sum", "the sum of two", "the", "two numbers"]
    ends = [kept(end) for end in encode(tokenizer, *({**PAIR, "completion": text} for text in completions))]
    assert [tokenizer.decode(end.input_ids[end.loss_mask]) for end in ends] == [
        f"{text}<|im_end|>" for text in completions
    ]
    assert len({tuple(end.input_ids[~end.loss_mask].tolist()) for end in ends}) == 1


def test_rows_that_hold_an_evaluation_prompt_are_left_out(tokenizer: Any, tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": f"What comes after {words}?"}) + "\n")
    exclude = read_eval_sets([tmp_path / "eval.jsonl"])
    hit, in_answer = {**PAIR, "prompt": f"Say: {words.upper()}!"}, {**PAIR, "completion": words}
    ids = tokenizer(f"count {words} end")["input_ids"]
    as_ids = {"prompt_ids": ids, "completion_ids": [5, 6]}
    limits = replace(LIMITS, max_length=400, vocab_size=400)
    ends = encode(tokenizer, hit, in_answer, PAIR, as_ids, limits=limits, exclude=exclude)
    assert [isinstance(end, Refused) for end in ends] == [True, False, False, True]
    assert isinstance(ends[0], Refused)
    assert ends[0].reason == "contains an evaluation prompt"
    assert "eval.jsonl:1" in ends[0].detail


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (PAIR, True),
        ({**PAIR, "prompt": "so what is it?"}, False),
        ({**PAIR, "system": "be brief"}, True),
        ({**PAIR, "system": "What is it?", "prompt": "x"}, True),
        ({"messages": [{"role": "user", "content": "hi"}, *TALK["messages"]]}, True),
        ({"messages": [*TALK["messages"], {"role": "user", "content": "bye"}]}, True),
        ({"text": TEXT["text"].replace("what is it?", "so what is it to you")}, True),
    ],
)
def test_where_evaluation_prompts_are_looked_for(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], found: bool
) -> None:
    """A short one must be a whole text of the user's or the system's, a longer one be in one."""
    prompts = ["what is it", "so what is it to you"]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    limits = replace(LIMITS, max_length=400, vocab_size=400)
    (end,) = encode(tokenizer, row, limits=limits, exclude=read_eval_sets([tmp_path / "eval.jsonl"]))
    assert isinstance(end, Refused) is found


def test_special_tokens_are_no_words_of_a_prompt(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "what is it"}\n')
    ids = tokenizer("<|im_start|>what is it?<|im_end|>")["input_ids"]
    row = {"prompt_ids": ids, "completion_ids": [5, 6]}
    limits = replace(LIMITS, vocab_size=400)
    (end,) = encode(tokenizer, row, limits=limits, exclude=read_eval_sets([tmp_path / "eval.jsonl"]))
    assert isinstance(end, Refused)
