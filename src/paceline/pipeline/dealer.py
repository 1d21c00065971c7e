"""Deals the ordered stream of feature batches out to drafter ranks: a step's micro-batches go round from rank 0 on."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from paceline.records import FeatureBatch, TokenBatch
from paceline.runtime import pulse
from paceline.train.loop import Dealt


class Turns:
    """Which rank gets each micro-batch of a stream."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._place = ranks, 0  # in the step

    def next(self, tokens: TokenBatch) -> int:
        """Return the rank that gets the next micro-batch."""
        rank = self._place % self._ranks
        self._place = 0 if tokens.closes_step else self._place + 1
        return rank


class Dealer:
    """One stream for several threads. Who finds nothing for itself fetches, and deals what comes to whose turn it is.

    What is dealt but not taken is at most a step: ranks meet at its end.
    """

    def __init__(self, stream: Iterable[FeatureBatch], ranks: int) -> None:
        self._stream = iter(stream)
        self._queues: list[deque[Dealt]] = [deque() for _ in range(ranks)]
        self._changed = threading.Condition()
        self._fetching = self._ended = False
        self._error: BaseException | None = None
        self._turns = Turns(ranks)

    def stream(self, rank: int) -> Iterator[Dealt]:
        """Yield what is dealt to a rank; every rank learns of every step's end."""
        while (item := self._next(rank)) is not None:
            yield item

    def _next(self, rank: int) -> Dealt | None:
        while True:
            with self._changed:
                with pulse.waiting("features that another rank fetches", "features"):
                    self._changed.wait_for(lambda: self._queues[rank] or self._ended or not self._fetching)
                if self._queues[rank]:
                    return self._queues[rank].popleft()
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return None
                self._fetching = True
            self._fetch()

    def _fetch(self) -> None:
        batch: FeatureBatch | None = None
        error: BaseException | None = None
        try:
            batch = next(self._stream, None)
        except BaseException as caught:  # everyone who waits gets it
            error = caught
        with self._changed:
            self._fetching = False
            self._error = error
            self._ended = batch is None
            if batch is not None:
                self._deal(batch)
            self._changed.notify_all()

    def _deal(self, batch: FeatureBatch) -> None:
        mine = self._turns.next(batch.tokens)
        closing = batch.tokens if batch.tokens.closes_step else None
        for rank, queue in enumerate(self._queues):
            if rank == mine:
                queue.append((batch, closing))
            elif closing is not None:
                queue.append((None, closing))
