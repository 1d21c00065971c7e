"""Best-fit-decreasing packing of lengths into bins, over the histogram of lengths. Free of torch.

Items of one length are alike and so are bins with the same room left, so whole groups move at once: 1.1 million items
of 8,000 lengths take a fraction of a second. Who is in which bin of a group is decided first come, first served.

Shapes: L lengths from 0 up, N items, longest first, n of them, M bins.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from paceline.data.arrays import long_array


class _Move(NamedTuple):
    """`bins` bins with `room` left take `each` items of a length; bins queue up by the room they have left."""

    length: int
    each: int
    bins: int
    room: int
    place: int  # of the first of them in the queue that they leave
    place_after: int  # of the first of them in the queue that they join


class Packing:
    """Who lies where when every item goes where it leaves the least room, or into a new bin.

    Nothing is kept of an item, only of a move and of the bins in it.
    """

    def __init__(self, counts_L: Int[np.ndarray, " L"], budget: int) -> None:
        """Pack so many items of each length, longest first, into bins of a budget, which no item may exceed."""
        self._moves, joined = _moves(counts_L, budget)
        first = np.concatenate([[0], np.cumsum(joined)]).tolist()  # of each queue, all queues side by side
        self._leaves = [first[move.room] + move.place for move in self._moves]
        self._joins = [first[move.room - move.each * move.length] + move.place_after for move in self._moves]
        self._new = slice(first[budget], first[budget + 1])
        self._queues = long_array(first[-1])
        self.sizes_M = np.zeros(joined[budget], dtype=np.int32)  # items of each bin
        self._queues[self._new] = np.arange(joined[budget])
        for move, leave, join in zip(self._moves, self._leaves, self._joins, strict=True):
            bins = self._queues[leave : leave + move.bins]
            self._queues[join : join + move.bins] = bins
            self.sizes_M[bins] += np.int32(move.each)

    def seat(self, start_M: Int[np.ndarray, " M"]) -> "PackedSeats":
        """Give every item a place, one behind the other in its bin, whose first is given.

        What an earlier call returned is worth nothing then.
        """
        self._queues[self._new] = start_M
        for move, leave, join in zip(self._moves, self._leaves, self._joins, strict=True):
            self._queues[join : join + move.bins] = self._queues[leave : leave + move.bins] + np.int32(move.each)
        each = np.array([move.each for move in self._moves])
        taken = np.cumsum([0, *(move.bins * move.each for move in self._moves)])
        return PackedSeats(self._queues, np.array(self._leaves), each, taken[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class PackedSeats:
    """The places of packed items: the bins of a move take its items in turn, `each` at a time."""

    queues: Int[np.ndarray, " queued"]  # next free place of each bin when it came into this queue
    leaves: Int[np.ndarray, " moves"]  # where a move's bins are in the queues
    each: Int[np.ndarray, " moves"]
    taken: Int[np.ndarray, " moves"]  # items before this move

    def __call__(self, items_n: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the places of items, which are numbered longest first."""
        move_n = np.searchsorted(self.taken, items_n, side="right") - 1
        turn_n, within_n = np.divmod(items_n - self.taken[move_n], self.each[move_n])
        return self.queues[self.leaves[move_n] + turn_n] + within_n


def count_bins(counts_L: Int[np.ndarray, " L"], budget: int) -> int:
    """Return how many bins a packing fills."""
    return _moves(counts_L, budget)[1][budget]


def _moves(counts_L: Int[np.ndarray, " L"], budget: int) -> tuple[list[_Move], list[int]]:
    """Return who takes what, in order, and how many bins ever joined the queue of each room."""
    left = [0] * (budget + 1)
    joined = [0] * (budget + 1)
    waiting = bytearray(budget + 1)  # whether a bin waits with that room; find() is quick on bytes
    moves = []
    for length in np.flatnonzero(counts_L)[::-1].tolist():
        items, size = int(counts_L[length]), max(length, 1)
        while items:
            room = waiting.find(1, size)
            if room < 0:
                room = budget
                joined[room] += -(-items // (room // size))
            # A bin that took one takes the next of that length too: nothing else has less room where it fits.
            each = min(room // size, items)
            bins = min(joined[room] - left[room], items // each)
            after = room - each * length
            moves.append(_Move(length, each, bins, room, left[room], joined[after]))
            left[room] += bins
            waiting[room] = left[room] < joined[room]
            joined[after] += bins
            waiting[after] = 1
            items -= bins * each
    return moves, joined
