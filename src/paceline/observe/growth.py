"""Warns when the memory that a run holds grows and does not stop.

Of the host the anonymous memory is looked at (RssAnon): what this process allocated. Mapped files are resident too, a
dataset's shards as they are read, but the system takes those pages back when it wants to, and page cache is nobody's.
Of a GPU it is what torch's allocator has reserved, which never falls by itself.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression

import torch

_EVERY_S = 60.0  # between two samples
_SAMPLES = 20  # that a slope is of
_SLOPE = 4.0  # MiB a minute: 5.6 GiB a day
_WARM_S = 300.0  # buffers and caches are made, and the allocators settle


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that grows."""

    where: str
    mib: float  # now
    mib_per_min: float


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of (seconds, MiB) in MiB a minute."""
    return 60 * linear_regression(*zip(*samples, strict=True)).slope


def growing(samples: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the last samples in MiB a minute, if what is held at least grows faster than the limit.

    That is the least of each quarter of the samples. What fills up, as a cache does, is flat sooner or later; a jump is
    flat before and behind it; what goes up and down comes back to its least.
    """
    recent, quarter = samples[-_SAMPLES:], _SAMPLES // 4
    if len(recent) < _SAMPLES:
        return None
    parts = [recent[first : first + quarter] for first in range(0, 4 * quarter, quarter)]
    least = [(part[0][0], min(mib for _, mib in part)) for part in parts]
    ascending = all(later - mib > _SLOPE * (then - s) / 60 for (s, mib), (then, later) in pairwise(least))
    rate = slope(recent)
    return rate if ascending and rate > _SLOPE else None


class MemoryWatch:
    """Takes a sample a minute when it is asked to look, and warns of growth: once, and again when it has doubled."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        warn: Callable[[Growth], None],
        read: Callable[[Sequence[str]], dict[str, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` returns MiB by place, those of `devices` among them."""
        self._devices, self._warn, self._read, self._clock = devices, warn, read or memory, clock
        self._due = clock() + _WARM_S
        self._samples: dict[str, list[tuple[float, float]]] = {}
        self._warned: dict[str, float] = {}

    def look(self) -> None:
        """Take a sample if it is time."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _EVERY_S
        for where, mib in self._read(self._devices).items():
            samples = [*self._samples.get(where, []), (now, mib)][-_SAMPLES:]
            self._samples[where] = samples
            rate = growing(samples)
            if rate is not None and mib >= 2 * self._warned.get(where, 0.0):
                self._warned[where] = mib
                self._warn(Growth(where, round(mib, 1), round(rate, 2)))


def memory(devices: Sequence[str]) -> dict[str, float]:
    """Return the MiB that this process has allocated on the host and reserved on GPUs; nothing here waits for one."""
    own = host_bytes()
    found = {} if own is None else {"host": own / 2**20}
    for device in sorted({name for name in devices if torch.device(name).type == "cuda"}):
        found[device] = torch.cuda.memory_reserved(device) / 2**20
    return found


def host_bytes() -> int | None:
    """Return the bytes that this process has allocated on the host, None on a system that does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
