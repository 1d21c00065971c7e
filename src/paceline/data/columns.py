"""Whether an Arrow file's columns hold rows: opening a dataset looks at them before anything else does."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from paceline.records import UserError, many

Lists: TypeAlias = pa.ListArray | pa.LargeListArray
NEEDED = ("input_ids", "loss_mask")
_LOOKED_AT = 1 << 20  # values of a mask at a time


def check_columns(path: Path, table: pa.Table) -> None:
    """Refuse a file without lists of ids and of marks.

    Raises:
        UserError: a column is missing, of another type or given twice.
    """
    for name in NEEDED:
        kind = table.schema.field(name).type if table.column_names.count(name) == 1 else pa.null()
        inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else pa.null()
        if not (pa.types.is_integer(inner) or (name == "loss_mask" and pa.types.is_boolean(inner))):
            raise UserError(
                f"{path} must have the columns input_ids (lists of whole numbers) and loss_mask (lists of truth values "
                f"or 0 and 1), got {one_line(table.schema)}. Make a dataset with `paceline prepare`."
            )


def check_rows(path: Path, table: pa.Table) -> None:
    """Refuse rows that nothing can be done with: without ids, with a mask of another length or of other numbers.

    Raises:
        UserError: such a row exists.
    """
    row = 0
    for ids, mask in aligned_chunks(table):
        lengths, masked = (np.diff(np.from_dlpack(column.offsets)) for column in (ids, mask))
        wrong = np.flatnonzero((lengths != masked) | (lengths == 0))
        if len(wrong):
            at = int(wrong[0])
            raise UserError(
                f"A row must have one or more input_ids and as many values of loss_mask, got {lengths[at]:,} and "
                f"{masked[at]:,} in row {row + at:,} of {path}. Mend it or leave it out."
            )
        if not pa.types.is_boolean(mask.values.type):
            _check_marks(path, row, mask)
        row += len(ids)


def _check_marks(path: Path, first_row: int, mask: Lists) -> None:
    """Refuse a mask of numbers that has others than 0 and 1, such as weights or -100."""
    offsets, values = np.from_dlpack(mask.offsets), np.from_dlpack(mask.values)
    for start in range(int(offsets[0]), int(offsets[-1]), _LOOKED_AT):
        piece = values[start : min(start + _LOOKED_AT, int(offsets[-1]))]
        wrong = np.flatnonzero((piece != 0) & (piece != 1))
        if len(wrong):
            at = first_row + int(np.searchsorted(offsets, start + wrong[0], side="right")) - 1
            raise UserError(
                f"loss_mask must hold truth values or 0 and 1, got {piece[wrong[0]]} in row {at:,} of {path}. "
                "Mend it or leave it out."
            )


def check_ends(path: Path, table: pa.Table, advice: str) -> None:
    """Refuse rows that end before they begin, or beyond what the file holds: nothing else looks where they point.

    Raises:
        UserError: such a row exists.
    """
    try:
        table.validate()  # lengths against sizes, first and last ends of a chunk: reads next to nothing
    except pa.ArrowException as error:
        raise _damaged(path, " ".join(str(error).split())[:200], advice) from None
    for name in NEEDED:
        row = 0
        for ends in ends_of(table, name):
            wrong = ends[1:] < ends[:-1]
            if wrong.any():
                at = int(wrong.argmax())
                found = f"row {row + at:,} of {name} goes from {ends[at]:,} to {ends[at + 1]:,}"
                raise _damaged(path, found, advice)
            row += len(wrong)


def check_candidates(path: Path, table: pa.Table, advice: str) -> None:
    """Refuse a row of our own with a mask of another length, or with more anchor candidates than tokens.

    Raises:
        UserError: such a row exists.
    """
    if table.column("candidates").null_count:
        raise _damaged(path, "candidates holds a null", advice)
    row = 0
    numbers = [np.from_dlpack(chunk) for chunk in table.column("candidates").chunks if len(chunk)]
    for ids, masked, candidates in zip(ends_of(table, "input_ids"), ends_of(table, "loss_mask"), numbers, strict=True):
        lengths, marks = np.diff(ids), np.diff(masked)
        wrong = (lengths != marks) | (candidates < 0) | (candidates > lengths)
        if wrong.any():
            at = int(wrong.argmax())
            found = ((lengths, "token"), (marks, "mask value"), (candidates, "candidate"))
            told = ", ".join(many(int(counts[at]), what) for counts, what in found)
            raise _damaged(path, f"row {row + at:,} has {told}", advice)
        row += len(lengths)


def ends_of(table: pa.Table, name: str) -> Iterator[Int[np.ndarray, " ends"]]:
    """Yield for each chunk where its first row begins and where each of its rows ends."""
    return (np.from_dlpack(chunk.offsets) for chunk in table.column(name).chunks if len(chunk))


def aligned_chunks(table: pa.Table) -> Iterator[tuple[Lists, Lists]]:
    """Yield chunks of ids and masks that hold the same rows, whatever batches the file was written in."""
    for batch in table.select(NEEDED).to_batches():
        ids, mask = batch.columns
        if ids.null_count or mask.null_count or ids.values.null_count or mask.values.null_count:
            raise UserError("A dataset's input_ids and loss_mask must hold no null. Make it again with `prepare`.")
        if len(ids):
            yield ids, mask


def one_line(schema: pa.Schema) -> str:
    """Return a schema for a message."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _damaged(path: Path, found: str, advice: str) -> UserError:
    return UserError(f"Shard {path} is damaged: {found}. {advice}")
