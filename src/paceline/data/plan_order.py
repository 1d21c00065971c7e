"""Drawn orders and sorting by small keys, a part at a time: what plan.py lays its rows out with. Free of torch.

Only raw words of the counter-based Philox generator and stable sorts decide an order, so it is the same with every
version of numpy and on every machine. No more than the words of a part are held, which costs drawing all words again
for each part.

Shapes: N rows, L lengths from 0 up, G groups, n rows of a part or a piece.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int, UInt64

from paceline.data.arrays import PIECE, long_array, pick

_PARTS = 32  # of what is shuffled; a power of two
_SHIFT = np.uint64(64 - (_PARTS - 1).bit_length())  # of a word, to its part


def shuffled(count: int, seed: int, purpose: int, epoch: int, place: int = 0) -> Int[np.ndarray, " n"]:
    """Return 0 .. count - 1 in the order that (seed, purpose, epoch, place) draws, as 32-bit numbers."""
    order_N, done = long_array(count), 0
    for part_n in shuffled_parts(count, seed, purpose, epoch, place):
        order_N[done : done + len(part_n)] = part_n
        done += len(part_n)
    return order_N


def shuffled_parts(count: int, seed: int, purpose: int, epoch: int, place: int = 0) -> Iterator[Int[np.ndarray, " n"]]:
    """Yield what `shuffled` returns, part by part from front to back."""
    key = np.array([seed, purpose], dtype=np.uint64)
    words_N, rows_N = long_array(count, np.int64).view(np.uint64), long_array(count)  # touched as far as a part goes
    for part in range(_PARTS):
        drawing, held = np.random.Philox(key=key, counter=[0, 0, place, epoch]), 0
        for first in range(0, count, PIECE):
            words_n = drawing.random_raw(min(PIECE, count - first))
            mine_n = np.flatnonzero(words_n >> _SHIFT == part)
            span = slice(held, held + len(mine_n))
            words_N[span], rows_N[span] = words_n[mine_n], mine_n + first
            held += len(mine_n)
        yield pick(rows_N[:held], _word_order(words_N[:held]))


def numbered(
    parts: Iterable[Int[np.ndarray, " n"]],
    keys_N: Int[np.ndarray, " N"],
    group_L: Int[np.ndarray, " L"],
    counts_L: Int[np.ndarray, " L"],
) -> Iterator[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]:
    """Yield (places, rows), piece by piece, of rows sorted by the group of their key, in one group as they come.

    Places ascend within a piece. `counts_L` says how many rows have each key.
    """
    counts_G = np.bincount(group_L, counts_L).astype(np.int64)
    place_G = np.cumsum(counts_G) - counts_G  # of each group's next row
    step = max(PIECE, len(place_G))  # with many groups a small piece would cost more than it holds
    for part_n in parts:
        for first in range(0, len(part_n), step):
            rows_n = part_n[first : first + step]
            groups_n = group_L[keys_N[rows_n]]
            counts_G = np.bincount(groups_n, minlength=len(place_G))
            place_n = np.repeat(place_G - np.cumsum(counts_G) + counts_G, counts_G) + np.arange(len(rows_n))
            yield place_n, rows_n[stable_order(groups_n)]
            place_G += counts_G


def stable_order(keys_n: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the order of small whole numbers; numpy sorts 16 bits by radix, ten times as fast as 32."""
    order_n = np.argsort(keys_n.astype(np.uint16), kind="stable")
    if keys_n.dtype.itemsize < 4:
        return order_n
    high_n = keys_n >> 16
    return order_n if not high_n.any() else order_n[np.argsort(high_n[order_n].astype(np.uint16), kind="stable")]


def _word_order(words_n: UInt64[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    order_n = np.argsort(words_n)  # five times as fast as a stable sort, and the same unless two words are equal
    for first in range(0, len(order_n), PIECE):
        ordered_n = words_n[order_n[first : first + PIECE + 1]]
        if (ordered_n[1:] == ordered_n[:-1]).any():
            return np.argsort(words_n, kind="stable")
    return order_n
