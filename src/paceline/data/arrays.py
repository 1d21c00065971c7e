"""Arrays as long as an epoch, with memory that goes back to the system when they do. Free of torch.

What malloc has once handed out in pieces of some megabytes it keeps, though a plan needs it for the blink of an eye, so
these arrays are mapped one by one. Where numpy would make 64-bit copies of all numbers, these functions go through them
piece by piece.

Shapes: N and R rows, L numbers from 0 up.
"""

import mmap
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import DTypeLike

PIECE = 1 << 13  # rows that are looked at together
_SMALL = 1 << 17  # bytes: malloc has room for less without asking for more


def long_array(count: int, dtype: DTypeLike = np.int32) -> Int[np.ndarray, " N"]:
    """Return an array to be filled."""
    size = count * np.dtype(dtype).itemsize
    if size < _SMALL:
        return np.empty(count, dtype)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)


class Marks:
    """A yes or no for each of many places, one bit a place: numbers of the places would take four bytes each."""

    def __init__(self, count: int) -> None:
        """Begin with no everywhere."""
        self.bits = np.zeros(-(-count // 8), dtype=np.uint8)

    def set(self, places_n: Int[np.ndarray, " n"]) -> None:
        """Mark these places, which ascend and lie near one another: all between them are spread out."""
        first, behind = int(places_n[0]) // 8, int(places_n[-1]) // 8 + 1
        spread = np.unpackbits(self.bits[first:behind])
        spread[places_n - first * 8] = 1
        self.bits[first:behind] = np.packbits(spread)

    def between(self, first: int, behind: int) -> Bool[np.ndarray, " n"]:
        """Return whether the places from `first` up to `behind` are marked."""
        spread = np.unpackbits(self.bits[first // 8 : -(-behind // 8)])
        return spread[first % 8 : first % 8 + behind - first].view(np.bool_)


def joined(
    parts: Callable[[], Iterable[Int[np.ndarray, " n"]]], dtype: DTypeLike | None = None
) -> Int[np.ndarray, " N"]:
    """Return the parts end to end, which are asked for twice; numbers from 0 up, in as few bytes as the largest needs
    with a sign.

    Of the parts one at a time is held, for together they are as large as the whole.
    """
    count = largest = 0
    for part in parts():
        count += len(part)
        largest = max(largest, int(part.max(initial=0)))
    joined_N, first = long_array(count, dtype or np.min_scalar_type(-largest - 1)), 0
    for part in parts():
        joined_N[first : first + len(part)] = part
        first += len(part)
    return joined_N


def pick(values_N: Int[np.ndarray, " N"], places_R: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
    """Return the values at these places."""
    picked_R = long_array(len(places_R), values_N.dtype)
    for first in range(0, len(places_R), PIECE):
        picked_R[first : first + PIECE] = values_N[places_R[first : first + PIECE]]
    return picked_R


def put(values_R: Int[np.ndarray, " R"], places_R: Int[np.ndarray, " R"]) -> Int[np.ndarray, " R"]:
    """Return an array with the values at these places, which are all that it has."""
    array_R = long_array(len(places_R), values_R.dtype)
    for first in range(0, len(places_R), PIECE):
        array_R[places_R[first : first + PIECE]] = values_R[first : first + PIECE]
    return array_R


def histogram(values_N: Int[np.ndarray, " N"]) -> Int[np.ndarray, " L"]:
    """Return how often each number occurs, from 0 up to the largest."""
    counts_L = np.zeros(int(values_N.max(initial=0)) + 1, dtype=np.int64)
    step = max(PIECE, len(counts_L))
    for first in range(0, len(values_N), step):
        counts_L += np.bincount(values_N[first : first + step], minlength=len(counts_L))
    return counts_L
