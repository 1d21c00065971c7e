"""Record batches to rows: the columns that a row may need, as Python objects.

Other columns are not looked at: what is in them can neither help a row nor spoil it. A value that cannot be an object,
such as a text that is not UTF-8, spoils its own row alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from paceline.data.messages import BadRow
from paceline.data.rows import FORMS, BrokenRow, unknown_form

COLUMNS = frozenset(key for keys in FORMS for key in keys) | {"system", "tools", "finish"}
# What pyarrow raises over a value: bad UTF-8, a time outside of Python's, an unknown time zone, too deep a nesting.
_FAULTS = (pa.ArrowException, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)

TableRow = dict[str, Any] | BrokenRow


def objects(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[TableRow]:
    """Yield rows as objects; lists of numbers or truth values stay arrays, without a Python object a number.

    `columns` are all that the file has: they are named where no row of it can be used.
    """
    lacks = None
    if not any(all(key in columns for key in keys) for keys in FORMS):
        lacks = unknown_form(columns)
    used = [i for i, name in enumerate(batch.schema.names) if name in COLUMNS]
    names = [batch.schema.names[i] for i in used]
    values = [_values(batch.column(i)) for i in used]
    for row in zip(*values, strict=True) if used else ((),) * batch.num_rows:
        error = lacks
        item: dict[str, Any] = {}
        for name, value in zip(names, row, strict=True):
            if isinstance(value, _Fault):
                error = BadRow("unreadable value", f"Column {name} cannot be read: {value.text}. Correct its value.")
            elif value is not None:
                item[name] = value
        yield BrokenRow(item, error) if error else item


class _Fault:
    """In place of a value that cannot be an object."""

    def __init__(self, error: BaseException) -> None:
        self.text = f"{type(error).__name__}, {' '.join(str(error).split())[:120]}"


def _values(column: pa.Array) -> Sequence[Any]:
    try:
        return _converted(column)
    except _FAULTS:
        return [_value(column.slice(i, 1)) for i in range(len(column))]


def _value(cell: pa.Array) -> Any:
    try:
        return _converted(cell)[0]
    except _FAULTS as error:
        return _Fault(error)


def _converted(column: pa.Array) -> Sequence[Any]:
    kind = column.type
    numbers = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    )
    if not numbers or column.null_count or column.flatten().null_count:
        return [_without_nulls(value) for value in column.to_pylist()]
    flat = column.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(column.value_lengths().to_numpy())
    return np.split(flat, ends[:-1]) if len(column) else []


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null: a table gives every object every key that any of them has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value] if value and isinstance(value[0], dict) else value
    return value
