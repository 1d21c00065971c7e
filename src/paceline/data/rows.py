"""Raw rows to samples: every row ends as a sample or refused with a reason; none is skipped silently.

A row holds a conversation (`messages` or `conversations`), a pair of texts (`prompt`, `completion`), text that is
rendered already (`text`), ids with their mask (`input_ids`, `loss_mask`), or ids as `paceline generate` writes them
(`prompt_ids`, `completion_ids`). Ids are kept as they are and go before everything else; a key whose value is null
counts as missing. Rows are tokenized many at a time, because the tokenizer is fastest so.

Shapes: S tokens of a sample.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from paceline.blocks import anchor_candidates
from paceline.data.chat import ChatEncoder, Rendered
from paceline.data.exclude import EvalPrompts
from paceline.data.messages import BadRow, is_conversation, read_conversation
from paceline.records import UserError, many

# Raise it whenever a change here or in the modules of chats changes what a row becomes: pieces and datasets of before
# are then made anew.
RULES = 2

EXCLUDED = "contains an evaluation prompt"  # asked for, so not a fault of the data
UNSUPERVISED = "no two supervised tokens"
FORMS = (
    ("prompt_ids", "completion_ids"),
    ("input_ids", "loss_mask"),
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("text",),
)

Ids = tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One tokenized completion that fits the limits."""

    line: int
    input_ids: Int[np.ndarray, " S"]
    loss_mask: Bool[np.ndarray, " S"]
    candidates: int  # positions that may be anchors, at least 1
    tokens_cut: int = 0
    supervised_cut: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A row that cannot be used, with the kind that is counted and what is wrong with this one."""

    line: int
    reason: str
    detail: str
    row: Any
    input_ids: Int[np.ndarray, " S"] | None = None  # where it came so far
    line_text: str | None = None  # as it stands in the file, where that is known


@dataclass(frozen=True, slots=True, eq=False)
class BrokenRow:
    """A row of a table that has a value which cannot be read: the values that can, and the fault."""

    row: dict[str, Any]
    error: BadRow


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What a row must respect."""

    max_length: int  # tokens
    on_long: Literal["refuse", "truncate"]
    mask_token_id: int | None  # an id that no row may hold; None: not known yet
    vocab_size: int  # ids lie below it


def encode_rows(
    rows: Sequence[tuple[int, Any]], chat: ChatEncoder, limits: RowLimits, exclude: EvalPrompts | None = None
) -> list[Sample | Refused]:
    """Return how each of the numbered rows ends, in their order.

    A row is an object, a line of JSON as bytes, or a table's row that could not be read whole.

    Raises:
        UserError: the tokenizer has no chat template and a row needs one.
    """
    looked = [_look(raw, chat, limits.vocab_size) for _, raw in rows]
    texts = [item for _, item in looked if isinstance(item, Rendered)]
    tokenized = iter(chat.tokenize(texts) if texts else [])
    ends: list[Sample | Refused] = []
    for (line, raw), (row, item) in zip(rows, looked, strict=True):
        result = next(tokenized) if isinstance(item, Rendered) else item
        try:
            if isinstance(result, BadRow):
                raise result
            if exclude is not None:
                _check_excluded(row, result, chat, exclude)
            ends.append(_within_limits(line, *result, limits))
        except BadRow as error:
            input_ids = None if isinstance(result, BadRow) else result[0]
            text = _line_text(raw) if isinstance(raw, bytes) else None
            ends.append(Refused(line, error.reason, str(error), row, input_ids, text))
    return ends


def unknown_form(keys: Iterable[object]) -> BadRow:
    """Return what is wrong with a row that has only these keys."""
    return BadRow(
        "unknown form",
        "A row holds messages or conversations, or prompt and completion, or text, or input_ids and loss_mask, or "
        f"prompt_ids and completion_ids; got the keys {', '.join(map(str, keys)) or '(none)'}.",
    )


def _look(raw: Any, chat: ChatEncoder, vocab_size: int) -> tuple[Any, Rendered | Ids | BadRow]:
    """Return a row as it is shown when it is refused, and what of it can be tokenized."""
    if isinstance(raw, BrokenRow):
        return raw.row, raw.error
    row = _line_text(raw) if isinstance(raw, bytes) else raw
    try:
        row = _parse(raw) if isinstance(raw, bytes) else raw
        return row, _read(row, chat, vocab_size)
    except BadRow as error:
        return row, error
    except RecursionError:  # wherever something walks into it: a template, JSON, repr
        return row, BadRow("nested too deeply", "The row nests objects or lists too deeply to be read. Flatten them.")


def _line_text(line: bytes) -> str:
    return line.decode(errors="backslashreplace").rstrip("\r\n")


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise BadRow("not UTF-8", f"The line is not UTF-8 (byte 0x{wrong:02x}). Convert the file to UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"The line is not JSON: {error}.") from None


def _read(row: object, chat: ChatEncoder, vocab_size: int) -> Rendered | Ids:
    """Return a row's ids if it has them, else its text ready to be tokenized."""
    if not isinstance(row, dict):
        raise BadRow("not an object", f"A row must be an object, got {type(row).__name__}.")
    form = _form(row)
    if form == "prompt_ids":
        return _prompt_and_completion_ids(row, vocab_size)
    if form == "input_ids":
        return _masked_ids(row, vocab_size)
    if form in ("messages", "conversations", "prompt"):
        messages, tools = read_conversation(_as_conversation(row) if form == "prompt" else row)
        return chat.render(messages, tools)
    if form == "text":
        if not isinstance(row["text"], str) or not row["text"]:
            raise BadRow("malformed text", f"text must be a text that is not empty, got {repr(row['text'])[:60]}.")
        return _preformatted(row["text"], chat)
    raise unknown_form(row)


def _form(row: dict[str, Any]) -> str | None:
    """Return the first key of the first form that the row has; only if it has none whole, null counts as a value."""
    whole = (keys for keys in FORMS if all(row.get(key) is not None for key in keys))
    named = (keys for keys in FORMS if all(key in row for key in keys))
    return next(chain(whole, named), (None,))[0]


def _preformatted(text: str, chat: ChatEncoder) -> Rendered:
    try:
        return chat.preformatted(text)
    except BadRow:
        raise
    except UserError as error:  # this template or these options do not go with text: other rows may do without
        raise BadRow("text without a mask", str(error)) from None


def _as_conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its pair as messages; either half may be a list of messages already."""
    halves: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        half = row[key]
        halves += half if isinstance(half, list) else [{"role": role, "content": half}]
    return {**{key: row[key] for key in ("system", "tools") if key in row}, "messages": halves}


def _prompt_and_completion_ids(row: dict[str, Any], vocab_size: int) -> Ids:
    prompt, completion = (_ids(row, key, vocab_size) for key in ("prompt_ids", "completion_ids"))
    if len(prompt) == 0:
        raise BadRow("empty prompt", "prompt_ids is empty.")
    if len(completion) == 0:
        raise BadRow("empty completion", "completion_ids is empty.")
    ids_S = np.concatenate([prompt, completion])
    return ids_S, np.arange(len(ids_S)) >= len(prompt)


def _masked_ids(row: dict[str, Any], vocab_size: int) -> Ids:
    ids_S, raw = _ids(row, "input_ids", vocab_size), row["loss_mask"]
    try:
        mask = raw if isinstance(raw, np.ndarray) else np.array(raw if isinstance(raw, list) else [0.0])
    except ValueError:  # lists among its entries
        mask = np.array([0.0])
    if mask.ndim != 1 or mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise BadRow("malformed mask", "loss_mask must be a list of true and false, or of 0 and 1.")
    if len(mask) != len(ids_S):
        raise BadRow(
            "malformed mask",
            f"loss_mask must be as long as input_ids ({len(ids_S):,}), it has {many(len(mask), 'entry', 'entries')}.",
        )
    return ids_S, mask.astype(bool)


def _ids(row: dict[str, Any], key: str, vocab_size: int) -> Int[np.ndarray, " S"]:
    values = row[key]
    if isinstance(values, list) and all(type(value) is int for value in values):
        if any(abs(value) > 2**62 for value in values):
            raise BadRow("id outside the vocabulary", f"{key} holds a number of more than 62 bits.")
        values = np.array(values, dtype=np.int64)
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise BadRow("malformed ids", f"{key} must be a list of whole numbers.")
    outside = (values < 0) | (values >= vocab_size)
    if outside.any():
        raise BadRow(
            "id outside the vocabulary", f"{key} holds {values[outside][0]}; the target's ids end at {vocab_size - 1}."
        )
    return values.astype(np.int32)


def _check_excluded(row: Any, ids: Ids, chat: ChatEncoder, exclude: EvalPrompts) -> None:
    ids_S, mask_S = ids
    texts = _prompt_texts(row) or [chat.tokenizer.decode(ids_S[~mask_S], skip_special_tokens=True)]
    # Together, and each for itself: a short evaluation prompt counts where it is a whole text.
    for text in ["\n".join(texts), *(texts if len(texts) > 1 else [])]:
        place = exclude.find(text)
        if place is not None:
            raise BadRow(EXCLUDED, f"The prompt contains the evaluation prompt at {place}.")


def _prompt_texts(row: dict[str, Any]) -> list[str]:
    """Return what system and user say in a row that has words; nothing where there are only ids or rendered text."""
    if not is_conversation(row):
        if row.get("prompt") is None or row.get("completion") is None:
            return []
        row = _as_conversation(row)
    try:
        messages, _ = read_conversation(row)
    except (BadRow, RecursionError):  # beside ids, which are what counts
        return []
    return [message["content"] for message in messages if message["role"] in ("system", "user")]


def _within_limits(
    line: int, ids_S: Int[np.ndarray, " S"], mask_S: Bool[np.ndarray, " S"], limits: RowLimits
) -> Sample:
    too_long = len(ids_S) - limits.max_length
    if too_long > 0 and limits.on_long == "refuse":
        raise BadRow(
            "too long",
            f"The row has {many(len(ids_S), 'token')}, max_length is {limits.max_length:,}. Raise it or "
            "truncate long rows.",
        )
    supervised_cut = int(np.count_nonzero(mask_S[limits.max_length :]))
    ids_S, mask_S = ids_S[: limits.max_length], mask_S[: limits.max_length]
    if limits.mask_token_id is not None and (ids_S == limits.mask_token_id).any():
        raise BadRow(
            "contains the mask token",
            f"The row holds token {limits.mask_token_id}, which is the mask token. Choose an id that never occurs.",
        )
    candidates = len(anchor_candidates(mask_S))
    if candidates == 0:
        after = " after truncation" if too_long > 0 else ""
        raise BadRow(UNSUPERVISED, f"The row has no two supervised tokens in a row{after}.")
    return Sample(line, ids_S, mask_S, candidates, max(too_long, 0), supervised_cut)
