"""A replica's access to the dispenser: every thread that serves it holds a lease of its own."""

import threading
from collections.abc import Iterator

from paceline.pipeline.dispenser import Dispenser, Outlet
from paceline.records import TokenBatch


class Outlets:
    """What an Outlet is, for an owner with one thread or several; a thread has its own from its first call on."""

    def __init__(self, dispenser: Dispenser) -> None:
        self._dispenser = dispenser
        self._changing = threading.Lock()
        self._own: dict[threading.Thread, Outlet] = {}
        self._revoked = False

    def __iter__(self) -> Iterator[TokenBatch]:
        return iter(self._mine())

    def settle(self, seq: int) -> bool:
        """End the lease of a micro-batch that this thread delivers; False if it is not this owner's any more."""
        return self._mine().settle(seq)

    def revoke(self) -> list[TokenBatch]:
        """Take back what all threads have, which is returned, and give them no other one."""
        with self._changing:
            self._revoked = True
            return [batch for outlet in self._own.values() if (batch := outlet.revoke()) is not None]

    def _mine(self) -> Outlet:
        with self._changing:
            me = threading.current_thread()
            if me not in self._own:
                self._own[me] = self._dispenser.open()
                if self._revoked:
                    self._own[me].revoke()
            return self._own[me]
