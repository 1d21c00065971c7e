"""An ordered, bounded channel between target replicas and a drafter rank.

Items carry their place in the stream; the receiver gets them in that order whoever made them. Waiting items are bounded
in bytes. The item that the receiver waits for always passes, so the bound cannot deadlock.
"""

import threading
from collections.abc import Iterator

from paceline.records import FeatureBatch


class Closed(Exception):
    """The channel ended because the run stops; roles leave quietly, the cause is told elsewhere."""


class OrderedChannel:
    """Feature batches in the order of their `seq`, for one receiver."""

    def __init__(self, credit_bytes: int) -> None:
        self._credit = credit_bytes
        self._waiting: dict[int, FeatureBatch] = {}
        self._bytes = 0
        self._next = 0
        self._end: int | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def put(self, batch: FeatureBatch) -> None:
        """Hand over a batch; waits while the credit is used up and the receiver waits for another one first."""
        seq = batch.tokens.seq
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or seq == self._next or self._bytes + batch.nbytes <= self._credit
            )
            if self._stopped:
                raise Closed
            self._waiting[seq] = batch
            self._bytes += batch.nbytes
            self._changed.notify_all()

    def finish(self, count: int) -> None:
        """Say how many batches the stream has in all."""
        with self._changed:
            self._end = count
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake and end everyone at the channel."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of features that wait for the receiver."""
        return self._bytes

    def __iter__(self) -> Iterator[FeatureBatch]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._next in self._waiting or self._next == self._end)
                if self._stopped:
                    raise Closed
                if self._next == self._end:
                    return
                batch = self._waiting.pop(self._next)
                self._bytes -= batch.nbytes
                self._next += 1
                self._changed.notify_all()
            yield batch
