"""An ordered, bounded channel between target replicas and a drafter rank.

Items carry their place in the stream; the receiver gets them in that order whoever made them. Waiting items are bounded
in bytes. The item that the receiver waits for always passes, so the bound cannot deadlock; and so does an item behind
one that nobody makes any more, because its sender is needed to make that one.
"""

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.drafter.packed import broken_tokens, is_packed
from paceline.records import FeatureBatch, RunError
from paceline.runtime import pulse


class Closed(Exception):
    """The channel ended because the run stops; roles leave quietly, the cause is told elsewhere."""


class OrderedChannel:
    """Feature batches in the order of their `seq`, for one receiver."""

    def __init__(self, credit_bytes: int, missing_before: Callable[[int], bool] = lambda seq: False) -> None:
        """`missing_before` says whether a batch before the one of this place waits for somebody to make it."""
        self.limit_bytes, self._missing_before = credit_bytes, missing_before
        self._waiting: dict[int, FeatureBatch] = {}
        self._bytes = 0
        self._next = 0
        self._end: int | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def put(self, batch: FeatureBatch, admit: Callable[[], bool] = lambda: True) -> bool:
        """Hand over a batch; waits while the credit is used up and the receiver waits for another one first.

        `admit` is asked at the moment of handing over; a batch that it refuses is dropped. Returns its answer.
        """
        seq = batch.tokens.seq
        with self._changed:
            with pulse.waiting("room in the channel"):
                self._changed.wait_for(lambda: self._stopped or self._has_room(seq, batch.nbytes))
            if self._stopped:
                raise Closed
            if not admit():
                return False
            self._waiting[seq] = batch
            self._bytes += batch.nbytes
            self._changed.notify_all()
            return True

    def _has_room(self, seq: int, nbytes: int) -> bool:
        # One from before the next came too late: it is not admitted, and has nothing to wait for.
        return seq <= self._next or self._bytes + nbytes <= self.limit_bytes or self._missing_before(seq)

    def look_again(self) -> None:
        """Let senders ask anew whether a batch before theirs is missing."""
        with self._changed:
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
                with pulse.waiting(f"features of micro-batch {self._next}", "features"):
                    self._changed.wait_for(
                        lambda: self._stopped or self._next in self._waiting or self._next == self._end
                    )
                if self._stopped:
                    raise Closed
                if self._next == self._end:
                    return
                batch = self._waiting.pop(self._next)
                self._bytes -= batch.nbytes
                self._next += 1
                self._changed.notify_all()
            yield batch


def check_finite(batch: FeatureBatch) -> None:
    """Refuse features that are not numbers, with one reduction unless something is wrong.

    Raises:
        RunError: some are infinite or not a number.
    """
    features_TD = batch.features_TD
    if is_packed(features_TD):
        _check_bytes(features_TD)
        return
    # A sum is not finite if one summand is not. It may also be too large for its format.
    if bool(torch.isfinite(features_TD.sum(dtype=torch.float32))):
        return
    wrong_TD = ~torch.isfinite(features_TD)
    count = int(wrong_TD.sum())
    if count:
        first = int(wrong_TD.any(dim=1).nonzero()[0])
        raise RunError(
            f"Features must be finite, but {count:,} of {wrong_TD.numel():,} values are not, first at token {first}."
        )


def _check_bytes(packed_TP: Tensor) -> None:
    broken_T = broken_tokens(packed_TP)
    if bool(broken_T.any()):
        raise RunError(
            f"Features must be finite, but of {int(broken_T.sum()):,} of {len(broken_T):,} tokens some are not, first "
            f"at token {int(broken_T.nonzero()[0])}."
        )
