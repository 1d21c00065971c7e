"""Raw rows to samples: every row ends as a sample or refused with a reason; none is skipped silently.

A row holds a conversation (`messages` or `conversations`), a pair of texts (`prompt`, `completion`), text that is
rendered already (`text`), ids with their mask (`input_ids`, `loss_mask`), or ids as `paceline generate` writes them
(`prompt_ids`, `completion_ids`). Ids are kept as they are and go before everything else. Rows are tokenized many at a
time, because the tokenizer is fastest so.

Shapes: S tokens of a sample.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from paceline.blocks import anchor_candidates
from paceline.data.chat import ChatEncoder, Rendered
from paceline.data.exclude import EvalPrompts
from paceline.data.messages import BadRow, read_conversation
from paceline.records import UserError

EXCLUDED = "contains an evaluation prompt"  # asked for, so not a fault of the data
UNSUPERVISED = "no two supervised tokens"

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

    A row is an object, or a line of JSON as bytes.

    Raises:
        UserError: the tokenizer has no chat template and a row needs one.
    """
    known: list[Rendered | Ids | BadRow] = []
    objects = []
    for _, raw in rows:
        row = raw
        try:
            row = _parse(raw) if isinstance(raw, bytes) else raw
            known.append(_read(row, chat, limits.vocab_size))
        except BadRow as error:
            known.append(error)
        objects.append(row if not isinstance(row, bytes) else row.decode(errors="backslashreplace").rstrip("\r\n"))
    texts = [item for item in known if isinstance(item, Rendered)]
    tokenized = iter(chat.tokenize(texts) if texts else [])
    ends: list[Sample | Refused] = []
    for (line, _), row, item in zip(rows, objects, known, strict=True):
        result = next(tokenized) if isinstance(item, Rendered) else item
        try:
            if isinstance(result, BadRow):
                raise result
            _check_excluded(row, result, chat, exclude)
            ends.append(_within_limits(line, *result, limits))
        except BadRow as error:
            ends.append(Refused(line, error.reason, str(error), row))
    return ends


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
    if "prompt_ids" in row and "completion_ids" in row:
        return _prompt_and_completion_ids(row, vocab_size)
    if "input_ids" in row and "loss_mask" in row:
        return _masked_ids(row, vocab_size)
    if "messages" in row or "conversations" in row:
        messages, tools = read_conversation(row)
        return chat.render(messages, tools)
    if "prompt" in row and "completion" in row:
        messages, tools = read_conversation(_as_conversation(row))
        return chat.render(messages, tools)
    if "text" in row:
        if not isinstance(row["text"], str) or not row["text"]:
            raise BadRow("malformed text", f"text must be a text that is not empty, got {repr(row['text'])[:60]}.")
        return _preformatted(row["text"], chat)
    raise BadRow(
        "unknown form",
        "A row holds messages or conversations, or prompt and completion, or text, or input_ids and loss_mask, or "
        f"prompt_ids and completion_ids; got the keys {', '.join(map(str, row)) or '(none)'}.",
    )


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
    mask = raw if isinstance(raw, np.ndarray) else np.array(raw) if isinstance(raw, list) else np.zeros(0)
    if mask.ndim != 1 or mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise BadRow("malformed mask", "loss_mask must be a list of true and false, or of 0 and 1.")
    if len(mask) != len(ids_S):
        raise BadRow(
            "malformed mask", f"loss_mask must be as long as input_ids ({len(ids_S):,}), it has {len(mask):,} entries."
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


def _check_excluded(row: Any, ids: Ids, chat: ChatEncoder, exclude: EvalPrompts | None) -> None:
    if exclude is None:
        return
    ids_S, mask_S = ids
    place = exclude.find(_prompt_text(row) or chat.tokenizer.decode(ids_S[~mask_S]))
    if place is not None:
        raise BadRow(EXCLUDED, f"The prompt contains the evaluation prompt at {place}.")


def _prompt_text(row: dict[str, Any]) -> str:
    """Return what the user says in a row that has words; empty where there are only ids or rendered text."""
    if "prompt" in row and "completion" in row and "messages" not in row:
        row = _as_conversation(row)
    if "messages" not in row and "conversations" not in row:
        return ""
    try:
        messages, _ = read_conversation(row)
    except BadRow:  # beside ids, which are what counts
        return ""
    return "\n".join(message["content"] for message in messages if message["role"] == "user")


def _within_limits(
    line: int, ids_S: Int[np.ndarray, " S"], mask_S: Bool[np.ndarray, " S"], limits: RowLimits
) -> Sample:
    too_long = len(ids_S) - limits.max_length
    if too_long > 0 and limits.on_long == "refuse":
        raise BadRow(
            "too long",
            f"The row has {len(ids_S):,} tokens, max_length is {limits.max_length:,}. Raise it or truncate long rows.",
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
