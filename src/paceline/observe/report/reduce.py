"""Long curves cut down to what can be seen.

Shapes: N points, ascending in x.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

COLUMNS = 1000  # of pixels that a curve is drawn in at most; a figure is about as wide
BINS = 150  # that sums are pooled in, and columns of a heat map


def reduced(
    x_N: Float[np.ndarray, " N"], y_N: Float[np.ndarray, " N"], columns: int = COLUMNS
) -> tuple[list[float], list[float | None]]:
    """Return the points that decide what a line looks like when it is drawn `columns` pixels wide.

    Of each column these are the first, the last, a lowest and a highest, and the first that is no finite number, which
    is None: a gap. At most four points a column are left where all are finite, and never one that was not there.
    """
    if not len(x_N):
        return [], []
    keep_N = np.ones(len(x_N), dtype=bool)
    if len(x_N) > 4 * columns:
        keep_N = _kept(columns_of(x_N, columns), y_N)
    return x_N[keep_N].tolist(), [y if math.isfinite(y) else None for y in y_N[keep_N].tolist()]


def columns_of(x_N: Float[np.ndarray, " N"], columns: int) -> Int[np.ndarray, " N"]:
    """Return which of so many equal parts of the range of x each point lies in."""
    low, high = float(x_N[0]), float(x_N[-1])
    share_N = (x_N - low) / (high - low) if high > low else np.zeros(len(x_N))
    return np.clip((share_N * columns).astype(np.int64), 0, columns - 1)


def _kept(column_N: Int[np.ndarray, " N"], y_N: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    keep_N = np.zeros(len(y_N), dtype=bool)
    edges = [0, *(np.flatnonzero(np.diff(column_N)) + 1).tolist(), len(y_N)]
    for start, end in pairwise(edges):
        finite = start + np.flatnonzero(np.isfinite(y_N[start:end]))
        if len(finite):
            extremes = [0, len(finite) - 1, int(y_N[finite].argmin()), int(y_N[finite].argmax())]
            keep_N[finite[extremes]] = True
        if len(finite) < end - start:
            keep_N[start + int(np.isfinite(y_N[start:end]).argmin())] = True
    return keep_N


def pooled(
    x_N: Float[np.ndarray, " N"],
    above_N: Sequence[Any] | np.ndarray,
    below_N: Sequence[Any] | np.ndarray,
    bins: int = BINS,
) -> tuple[list[float], np.ndarray]:
    """Return, of equal parts of the range of x, the mean x and the quotient of the sums; parts without points are not
    there. `above` and `below` may have further axes; nothing below gives nan.
    """
    above, below = np.asarray(above_N, dtype=np.float64), np.asarray(below_N, dtype=np.float64)
    if not len(x_N):
        return [], above
    column_N = columns_of(x_N, bins)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(column_N)) + 1])
    counts = np.diff([*starts.tolist(), len(x_N)])
    x = np.add.reduceat(x_N, starts) / counts
    with np.errstate(divide="ignore", invalid="ignore"):
        return x.tolist(), np.add.reduceat(above, starts, axis=0) / np.add.reduceat(below, starts, axis=0)


def plain(values: Any) -> Any:
    """Return an array's numbers as lists, None where they are not finite: JSON has none."""
    if isinstance(values, list | tuple | np.ndarray):
        return [plain(value) for value in values]
    number = float(values)
    return number if math.isfinite(number) else None
