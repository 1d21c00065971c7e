"""Hands micro-batches out under leases: each is made once and delivered once, whoever fails in between.

An owner's lease ends when its features are delivered, or when it is revoked: then the micro-batch goes to whoever asks
next, the first of the stream before all others, and what its owner still delivers is dropped. A lease comes with a slot
for the features, and who waits for a slot holds no lease: so the first of the stream never waits behind another.
"""

import heapq
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from paceline.pipeline.channel import Closed
from paceline.pipeline.slots import Slot, Slots
from paceline.records import TokenBatch
from paceline.runtime import pulse


class Outlet:
    """One owner's access to a dispenser; it holds a lease at most."""

    def __init__(self, dispenser: "Dispenser") -> None:
        self._dispenser = dispenser
        self.revoked = False
        self.slot: Slot | None = None  # of its lease

    def __iter__(self) -> Iterator[TokenBatch]:
        while (batch := self._dispenser.lease(self)) is not None:
            yield batch

    def settle(self, seq: int) -> bool:
        """End the lease of a micro-batch that is being delivered; False if it is not this owner's any more."""
        return self._dispenser.settle(self, seq)

    def revoke(self, *, hung: bool = False, leaving: bool = False) -> TokenBatch | None:
        """Take the owner's micro-batch back, which is returned, and give it no other one; if it hangs, it may still
        write into its slot. One that is `leaving` does so for a while, and keeps its slot until `left`."""
        return self._dispenser.revoke(self, hung=hung, leaving=leaving)

    def left(self, *, hung: bool) -> None:
        """Take back the slot that a leaving owner has kept; if it has not left, it hangs."""
        self._dispenser.take_back(self, hung=hung)


class Dispenser:
    """One stream of micro-batches for several owners.

    Who finds nothing that was given back takes the next of the stream; one fetches while the others wait. The stream is
    over for all only once every lease has ended, because a micro-batch may still come back.
    """

    def __init__(
        self, batches: Iterator[TokenBatch], on_end: Callable[[int], None], slots: Slots | None = None
    ) -> None:
        """`on_end` gets how many micro-batches there were. Without `slots` features land in memory of their own."""
        self._batches, self._on_end, self._slots = batches, on_end, slots
        if slots is not None:
            slots.on_free = self.look_again
        self._changed = threading.Condition()
        self._ready: list[tuple[int, TokenBatch]] = []  # a heap of what was given back or fetched
        self._leases: dict[Outlet, TokenBatch] = {}
        self._fetched = 0
        self._fetching = self._ended = self._stopped = False
        self.error: BaseException | None = None  # of the stream, for everyone

    def open(self) -> Outlet:
        """Return access for one more owner."""
        return Outlet(self)

    @property
    def over(self) -> bool:
        """Whether the stream has ended and every micro-batch is delivered."""
        return self._ended and not self._ready and not self._leases

    def missing_before(self, seq: int) -> bool:
        """Return whether a micro-batch before this one waits for an owner."""
        ready = self._ready[:1]
        return bool(ready) and ready[0][0] < seq

    def lease(self, owner: Outlet) -> TokenBatch | None:
        """Return the next micro-batch, None once the stream is over.

        Raises:
            Closed: the run stops, or the owner was revoked.
        """
        while True:
            with self._changed:
                with self._waiting():
                    self._changed.wait_for(lambda: self._decided(owner))
                if self._stopped or owner.revoked:
                    raise Closed
                if self._ready:
                    seq, batch = heapq.heappop(self._ready)
                    owner.slot = self._slots.take(seq) if self._slots else None
                    self._leases[owner] = batch
                    return batch
                if self.error is not None:
                    raise self.error
                if self._ended:
                    return None
                self._fetching = True
            self._fetch()

    def look_again(self) -> None:
        """Let those who wait for a slot look whether there is one."""
        with self._changed:
            self._changed.notify_all()

    def _waiting(self) -> AbstractContextManager[None]:
        if self._ready and not self._has_slot():
            return pulse.waiting("room for features at the drafter")
        return pulse.waiting("a micro-batch that another replica fetches or may give back", "data")

    def _has_slot(self) -> bool:
        return self._slots is None or self._slots.has(self._ready[0][0])

    def _decided(self, owner: Outlet) -> bool:
        if self._stopped or owner.revoked:
            return True
        if self._ready:
            return self._has_slot()
        if self.error is not None:
            return True
        return not self._leases if self._ended else not self._fetching

    def _fetch(self) -> None:
        batch: TokenBatch | None = None
        error: BaseException | None = None
        try:
            with pulse.waiting(f"micro-batch {self._fetched} from the loader", "data"):
                batch = next(self._batches, None)
        except BaseException as caught:  # everyone who asks gets it
            error = caught
        with self._changed:
            self._fetching, self.error = False, error
            if batch is not None:
                heapq.heappush(self._ready, (batch.seq, batch))
                if self._slots is not None:
                    self._slots.expect(batch)
                self._fetched += 1
            elif error is None and not self._stopped:
                self._ended = True
            self._changed.notify_all()
        if self._ended:
            self._on_end(self._fetched)

    def settle(self, owner: Outlet, seq: int) -> bool:
        """See Outlet."""
        with self._changed:
            batch = self._leases.get(owner)
            if batch is None or batch.seq != seq:
                return False
            del self._leases[owner]
            self._changed.notify_all()
            return True

    def revoke(self, owner: Outlet, *, hung: bool = False, leaving: bool = False) -> TokenBatch | None:
        """See Outlet."""
        with self._changed:
            owner.revoked = True
            batch = self._leases.pop(owner, None)
            if batch is not None:
                heapq.heappush(self._ready, (batch.seq, batch))
                if self._slots is not None and owner.slot is not None:
                    if leaving:
                        self._slots.expect_again(batch.seq, owner.slot)
                    else:
                        self._slots.give_back(batch.seq, owner.slot, hung=hung)
            self._changed.notify_all()
            return batch

    def take_back(self, owner: Outlet, *, hung: bool) -> None:
        """See Outlet.left."""
        with self._changed:
            if self._slots is not None and owner.slot is not None:
                self._slots.take_back(owner.slot, hung=hung)
            self._changed.notify_all()

    def stop(self) -> None:
        """End everyone who asks from now on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
