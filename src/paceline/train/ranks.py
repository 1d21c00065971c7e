"""Several drafter ranks in one process: what each sums, summed over all of them.

Sums and counts cross between ranks, never means, so two ranks with a micro-batch each make the step of one rank with
both. Every rank then holds the same numbers and makes the same update, so their weights stay equal bit for bit.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.runtime import pulse
from paceline.runtime.streams import Mark, follow, mark


class Meeting:
    """Where the ranks of a process sum their buffers at the end of a step."""

    def __init__(self, ranks: int) -> None:
        self._given: list[Sequence[Tensor]] = [()] * ranks
        self._there: list[Mark | None] = [None] * ranks  # where each rank's stream has filled its buffers
        self._summed: dict[torch.device, Mark | None] = {}
        self._barrier = threading.Barrier(ranks)
        self._last = False

    def reduce(self, rank: int, buffers: Sequence[Tensor], *, last: bool = False) -> bool:
        """Replace each buffer by its sum over the ranks; waits for all of them.

        Returns what rank 0 gave as `last`, whether this is the last step: all ranks learn it in the same one.

        On CUDA devices of their own, ranks sum with NCCL; elsewhere rank 0 sums in the order of ranks, so the result
        does not depend on who comes first.

        Raises:
            BrokenBarrierError: the meeting was ended because another role failed.
        """
        self._given[rank], device = buffers, buffers[0].device
        self._there[rank] = mark(device)
        if rank == 0:
            self._last = last
        self._wait()
        agreed = self._last  # before the second barrier, behind which rank 0 may be at the next step's
        if rank == 0:
            self._sum()
        self._wait()
        follow(self._summed[device], device)
        return agreed

    def _sum(self) -> None:
        """Sum in this thread, on its streams: behind what every rank's own has queued, and before what comes next."""
        devices = {own[0].device for own in self._given}
        for device in devices:
            for there in self._there:
                follow(there, device)
        _sum(self._given)
        self._summed = {device: mark(device) for device in devices}

    def gather(self) -> None:
        """Wait until every rank is here.

        Raises:
            BrokenBarrierError: the meeting was ended because another role failed.
        """
        self._wait()

    def _wait(self) -> None:
        with pulse.waiting("the other ranks"):
            self._barrier.wait()

    def end(self) -> None:
        """Wake who waits, and let nobody meet any more."""
        self._barrier.abort()


def _sum(given: Sequence[Sequence[Tensor]]) -> None:
    devices = {buffers[0].device for buffers in given}
    apart = len(devices) == len(given) and all(device.type == "cuda" for device in devices)
    for parts in zip(*given, strict=True):
        if apart and len(parts) > 1:
            torch.cuda.nccl.all_reduce(list(parts))
            continue
        first, *others = parts
        for other in others:
            first += other.to(first.device)
        for other in others:
            other.copy_(first)
