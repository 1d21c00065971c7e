"""Raw rows to samples: every row ends as a sample or in the quarantine with a reason; none is skipped silently.

A row is a conversation (`messages`), a pair of texts (`prompt`, `completion`), or ids as `paceline generate` writes
them (`prompt_ids`, `completion_ids`), which are kept as they are. Reading files is left to sources.py.

Shapes: S tokens of a sample.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from paceline.blocks import anchor_candidates
from paceline.data.chat import BadRow, ChatEncoder
from paceline.data.sources import SourceFile, read_rows
from paceline.records import UserError

Progress = Callable[[int, int | None], None]
_REPORT_EVERY = 256  # rows between two calls of the progress callback


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One tokenized completion that fits the limits."""

    input_ids: Int[np.ndarray, " S"]
    loss_mask: Bool[np.ndarray, " S"]
    candidates: int  # positions that may be anchors, at least 1
    truncated: bool


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What a row must respect."""

    max_length: int  # tokens
    on_long: Literal["refuse", "truncate"]
    mask_token_id: int | None  # an id that no row may hold; None: not known yet
    vocab_size: int  # ids lie below it


class Quarantine:
    """The file of refused rows, written as they come, and their counts per reason.

    The file exists only if a row was refused. With `stop`, the first refused row is an error instead.
    """

    def __init__(self, path: Path, *, stop: bool) -> None:
        """Remove what an earlier run left at the place."""
        self.path = path
        self.stop = stop
        self.counts: Counter[str] = Counter()
        self._file: IO[str] | None = None
        path.unlink(missing_ok=True)

    def add(self, file: str, line: int, row: Any, error: BadRow) -> None:
        """Write a refused row down.

        Raises:
            UserError: the first refused row ends the command.
        """
        if self.stop:
            raise UserError(f"{file}:{line}: {error}")
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        self.counts[error.reason] += 1
        entry = {"file": file, "line": line, "reason": error.reason, "detail": str(error), "row": row}
        self._file.write(json.dumps(entry, default=str) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_samples(
    files: Sequence[SourceFile], chat: ChatEncoder, limits: RowLimits, quarantine: Quarantine, on_progress: Progress
) -> Iterator[Sample]:
    """Yield the files' good rows in order and put the others into the quarantine.

    Raises:
        UserError: a file cannot be read, or the quarantine stops at the first bad row.
    """
    total = sum(file.rows for file in files)
    done = 0
    for file in files:
        for line, raw in read_rows(Path(file.path)):
            row: Any = raw
            try:
                row = _parse(raw) if isinstance(raw, str) else raw
                yield encode_row(row, chat, limits)
            except BadRow as error:
                quarantine.add(file.path, line, row, error)
            done += 1
            if done % _REPORT_EVERY == 0:
                on_progress(done, total)
    on_progress(done, total)


def encode_row(row: object, chat: ChatEncoder, limits: RowLimits) -> Sample:
    """Return a row as a sample within the limits.

    Raises:
        BadRow: the row is malformed or breaks a limit.
        UserError: the tokenizer has no chat template and the row needs one.
    """
    if not isinstance(row, dict):
        raise BadRow("not an object", f"A row must be an object, got {type(row).__name__}.")
    if "prompt_ids" in row and "completion_ids" in row:
        ids_S, mask_S = _given_ids(row, limits.vocab_size)
    elif "messages" in row and not row.get("tools"):
        ids_S, mask_S = chat.encode(row["messages"])
    elif "prompt" in row and "completion" in row:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        ids_S, mask_S = chat.encode(turns)
    else:
        raise BadRow(
            "unknown form",
            "A row holds messages (without tools), or prompt and completion, or prompt_ids and completion_ids; "
            f"got the keys {', '.join(map(str, row)) or '(none)'}.",
        )
    return _within_limits(ids_S, mask_S, limits)


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"The line is not JSON: {error}.") from None


def _given_ids(row: dict[str, Any], vocab_size: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
    for key in ("prompt_ids", "completion_ids"):
        ids = row[key]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise BadRow("malformed ids", f"{key} must be a list of whole numbers.")
        if not ids:
            raise BadRow("empty prompt" if key == "prompt_ids" else "empty completion", f"{key} is empty.")
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise BadRow("id outside the vocabulary", f"{key} holds {wrong}; the target's ids end at {vocab_size - 1}.")
    ids_S = np.array(row["prompt_ids"] + row["completion_ids"], dtype=np.int64)
    return ids_S, np.arange(len(ids_S)) >= len(row["prompt_ids"])


def _within_limits(ids_S: Int[np.ndarray, " S"], mask_S: Bool[np.ndarray, " S"], limits: RowLimits) -> Sample:
    truncated = len(ids_S) > limits.max_length
    if truncated and limits.on_long == "refuse":
        raise BadRow(
            "too long",
            f"The row has {len(ids_S):,} tokens, max_length is {limits.max_length:,}. Raise it or truncate long rows.",
        )
    ids_S, mask_S = ids_S[: limits.max_length], mask_S[: limits.max_length]
    if limits.mask_token_id is not None and (ids_S == limits.mask_token_id).any():
        raise BadRow(
            "contains the mask token",
            f"The row holds token {limits.mask_token_id}, which is the mask token. Choose an id that never occurs.",
        )
    candidates = len(anchor_candidates(mask_S))
    if candidates == 0:
        after = " after truncation" if truncated else ""
        raise BadRow("no two supervised tokens", f"The row has no two supervised tokens in a row{after}.")
    return Sample(input_ids=ids_S, loss_mask=mask_S, candidates=candidates, truncated=truncated)
