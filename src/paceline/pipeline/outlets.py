"""A replica's access to the dispenser: every thread that serves it holds a lease of its own."""

import threading
from collections.abc import Iterator

from paceline.pipeline.dispenser import Dispenser, Outlet
from paceline.pipeline.slots import Slot
from paceline.records import TokenBatch

_ENDING_S = 1.0


class Outlets:
    """What an Outlet is, for an owner with one thread or several; a thread has its own from its first call on."""

    def __init__(self, dispenser: Dispenser) -> None:
        self._dispenser = dispenser
        self._changing = threading.Lock()
        self._own: dict[threading.Thread, Outlet] = {}
        self._leaving: list[tuple[threading.Thread, Outlet]] = []
        self._revoked = False

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self._mine())

    def settle(self, seq: int) -> bool:
        """End the lease of a micro-batch that this thread delivers; False if it is not this owner's any more."""
        return self._mine().settle(seq)

    @property
    def slot(self) -> Slot | None:
        """The slot of the micro-batch that this thread has, or had last."""
        return self._mine().slot

    def revoke(self, *, hung: bool = False) -> list[TokenBatch]:
        """Take back what all threads have, which is returned, and give them no other one.

        If it hangs, none of them is waited for; else a thread that has not ended keeps its slot until `left`.
        """
        with self._changing:
            self._revoked = True
            back: list[TokenBatch] = []
            for thread, outlet in self._own.items():
                leaving = not hung and thread.is_alive() and thread is not threading.current_thread()
                if (batch := outlet.revoke(hung=hung, leaving=leaving)) is not None:
                    back.append(batch)
                    self._leaving += [(thread, outlet)] * leaving
            return back

    def left(self) -> None:
        """Take back the slots of threads that have left since they were revoked; one that has not hangs."""
        with self._changing:
            leaving, self._leaving = self._leaving, []
        for thread, outlet in leaving:
            thread.join(_ENDING_S)  # one that has told of its failure is about to end
            outlet.left(hung=thread.is_alive())

    def _mine(self) -> Outlet:
        with self._changing:
            me = threading.current_thread()
            if me not in self._own:
                self._own[me] = self._dispenser.open()
                if self._revoked:
                    self._own[me].revoke()
            return self._own[me]
