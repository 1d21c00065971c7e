"""Looks at a run every few seconds: who works, who waits for what, how full the queue and the devices are.

It reads what others have written anyway; no role waits for it, no lock is taken and no device asked to come to rest.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.observe.growth import host_bytes
from paceline.runtime.pulse import Pulse

_LEAVE_S = 1.0  # longest wait at the end for a look that is under way


@dataclass(frozen=True, slots=True)
class Seen:
    """A role as a look finds it."""

    name: str
    device: str
    state: str
    pulse: Pulse


class Sampler:
    """Makes samples of the time between one look and the next."""

    def __init__(
        self,
        every_s: float,
        *,
        roles: Callable[[], Sequence[Seen]],
        queue_bytes: Callable[[], int],
        queue_limit_bytes: int,
        gpus: Callable[[], list[dict[str, Any]]],
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` gets a sample's values; `roles` returns those that are under way."""
        self._every_s, self._roles, self._clock, self._tell = every_s, roles, clock, tell
        self._queue_bytes, self._limit, self._gpus = queue_bytes, queue_limit_bytes, gpus
        self._last = clock()
        self._waited: dict[Pulse, dict[str, float]] = {}  # until then

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Tell of a sample every so many seconds, in a thread, until the block ends."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(self._every_s):
                self._tell(**self.sample())

        self._last = self._clock()
        thread = threading.Thread(target=look, name="sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_LEAVE_S)

    def sample(self) -> dict[str, Any]:
        """Return what became since the last sample."""
        now = self._clock()
        last, self._last = self._last, now
        before, self._waited = self._waited, {}
        roles = [self._role(seen, before.get(seen.pulse, {}), last, now) for seen in self._roles()]
        return {
            "s": round(now - last, 3),
            "roles": roles,
            "queue_bytes": self._queue_bytes(),
            "queue_limit_bytes": self._limit,
            "gpus": self._gpus(),
            "host_bytes": host_bytes(),
        }

    def _role(self, seen: Seen, before: dict[str, float], last: float, now: float) -> dict[str, Any]:
        told: dict[str, Any] = {"role": seen.name, "device": seen.device, "state": seen.state}
        began = seen.pulse.began
        if began is None:  # it starts
            return told | {"busy_share": None, "wait_share": None, "waits_for": None, "waits": {}}
        length = now - max(last, began)
        waited = self._waited[seen.pulse] = seen.pulse.waited(now)
        sums = {sort: seconds - before.get(sort, 0.0) for sort, seconds in waited.items()}
        waits = {sort: round(min(s / length, 1.0), 4) for sort, s in sums.items() if length > 0 and s > 0}
        share = round(min(sum(waits.values()), 1.0), 4)
        longest = max(waits, key=lambda sort: waits[sort], default=None)
        return told | {"busy_share": round(1 - share, 4), "wait_share": share, "waits_for": longest, "waits": waits}
