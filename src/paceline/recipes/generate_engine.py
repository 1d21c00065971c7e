"""The built-in engine: replicas of the target in threads of this process, as a Completer."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple

import torch

from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.stats import Stats, progress_note
from paceline.pipeline.generating import Generation
from paceline.records import Completion
from paceline.target.load import TargetFacts
from paceline.target.model import DecodingTarget


class BuiltIn:
    """One replica a device; weights are loaded once, however often it is asked."""

    name = "built-in"

    def __init__(
        self, facts: TargetFacts, devices: Sequence[str], *, sampling: Sampling, dtype: str, rows: int, slots: int
    ) -> None:
        """`rows` completions at once on each device, of up to `slots` tokens with their prompts; loads nothing yet."""
        self._facts, self._devices, self._dtype = facts, devices, getattr(torch, dtype)
        self._sampling, self._rows, self._slots = sampling, rows, slots
        self._made: list[tuple[str, DecodingTarget]] = []
        self._idle: list[tuple[str, DecodingTarget]] = []
        self._lock = threading.Lock()
        self._running: Generation | None = None
        self._stats: list[Stats] = []  # of rounds that have ended
        self._seconds = 0.0

    def complete(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Completion]]:
        """Yield what came of each request, as replicas finish them."""
        self._idle = list(self._made)
        self._running = running = Generation(
            requests,
            self._devices,
            build=self._build,
            sampling=self._sampling,
            rows=self._rows,
            slots=self._slots,
            captured=self._devices[0].startswith("cuda"),
            cpu_threads=max(1, torch.get_num_threads() // len(self._devices)),
        )
        yield from running
        self._stats, self._seconds = self.stats, self._seconds + running.seconds
        self._running = None

    @property
    def stats(self) -> list[Stats]:
        """What each replica did, all rounds together; empty until they are ready."""
        now = self._running.stats if self._running else []
        if not now or not self._stats:
            return now or self._stats
        both = zip(map(astuple, self._stats), map(astuple, now), strict=True)
        return [Stats(*map(sum, zip(one, other, strict=True))) for one, other in both]

    def note(self, left: int | None) -> str:
        """Return tokens/s, mean length, time left and, of several replicas, their busy shares."""
        stats, seconds = self.stats, self._seconds + (self._running.seconds if self._running else 0.0)
        total = None if left is None else sum(one.finished for one in stats) + left
        return progress_note(stats, seconds, total)

    def _build(self, device: str) -> DecodingTarget:
        with self._lock:
            for at, (where, target) in enumerate(self._idle):
                if where == device:
                    del self._idle[at]
                    return target
        target = DecodingTarget(self._facts, (), dtype=self._dtype, device=device)
        with self._lock:
            self._made.append((device, target))
        return target
