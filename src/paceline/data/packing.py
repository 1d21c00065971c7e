"""Best-fit-decreasing packing of lengths into bins, over the histogram of lengths. Free of torch.

Items of one length are alike and so are bins with the same room left, so whole groups move at once: 1.1 million items
of 8,000 lengths take a fraction of a second. Who is in which bin of a group is decided first come, first served.

Shapes: L lengths from 0 up, N items, longest first, n of them, M bins.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from paceline.data.arrays import long_array

_MOVES = 1 << 10  # that are looked at together


class Packing:
    """Who lies where when every item goes where it leaves the least room, or into a new bin.

    Nothing is kept of an item, only of a move and of the bins in it.
    """

    def __init__(self, counts_L: Int[np.ndarray, " L"], budget: int) -> None:
        """Pack so many items of each length, longest first, into bins of a budget, which no item may exceed."""
        self._moves, joined = _moves(counts_L, budget)
        self._first = np.cumsum([0, *joined], dtype=np.int32)  # of each queue, all queues side by side
        self._new = slice(int(self._first[budget]), int(self._first[budget + 1]))
        self._queues = long_array(int(self._first[-1]))
        self.sizes_M = long_array(joined[budget])  # items of each bin
        self.sizes_M[:] = 0
        self._queues[self._new] = np.arange(joined[budget], dtype=np.int32)
        for bins, each, leave, join in self._steps():
            moved = self._queues[leave : leave + bins]
            self._queues[join : join + bins] = moved
            self.sizes_M[moved] += np.int32(each)

    def seat(self, start_M: Int[np.ndarray, " M"]) -> "PackedSeats":
        """Give every item a place, one behind the other in its bin, whose first is given.

        What an earlier call returned is worth nothing then.
        """
        self._queues[self._new] = start_M
        for bins, each, leave, join in self._steps():
            self._queues[join : join + bins] = self._queues[leave : leave + bins] + np.int32(each)
        _, each, bins, room, place, _ = self._moves.T
        return PackedSeats(self._queues, self._first[room] + place, each.copy(), np.cumsum(bins * each) - bins * each)

    def _steps(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield how many bins each move takes, with how many items each, from where and to where in the queues."""
        for at in range(0, len(self._moves), _MOVES):
            length, each, bins, room, place, place_after = self._moves[at : at + _MOVES].T
            leave, join = self._first[room] + place, self._first[room - each * length] + place_after
            yield from zip(bins.tolist(), each.tolist(), leave.tolist(), join.tolist(), strict=True)


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


def _moves(counts_L: Int[np.ndarray, " L"], budget: int) -> tuple[Int[np.ndarray, " moves 6"], list[int]]:
    """Return who takes what, in order, and how many bins ever joined the queue of each room.

    Bins queue up by the room they have left. A move is: items of this length, this many for each, go to this many bins,
    with this room left; the place of the first of them in the queue that they leave, and in the one that they join.
    """
    left = [0] * (budget + 1)
    joined = [0] * (budget + 1)
    waiting = bytearray(budget + 1)  # whether a bin waits with that room; find() is quick on bytes
    moves = array("i")  # flat: with long rows there are tens of thousands, and as objects they would take megabytes
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
            moves.extend((length, each, bins, room, left[room], joined[after]))
            left[room] += bins
            waiting[room] = left[room] < joined[room]
            joined[after] += bins
            waiting[after] = 1
            items -= bins * each
    return np.frombuffer(moves, np.int32).reshape(-1, 6), joined
