"""Memory of processes as Linux counts it (/proc), in MiB.

Anonymous memory is what a process allocated; pages of mapped files are left out where they are mere page cache, which
the kernel takes back at will. A tree's memory is the sum over its processes: pages that they share count twice.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_EVERY_S = 0.1
_OFTEN_S = 0.002  # planning an epoch of a million rows holds its most for some hundredths of a second


def memory_of(process: int | str = "self") -> dict[str, float]:
    """Return a process's VmRSS, VmHWM (the peak of VmRSS), RssAnon, RssShmem and RssFile; zeros once it is gone."""
    found = dict.fromkeys(("VmRSS", "VmHWM", "RssAnon", "RssShmem", "RssFile"), 0.0)
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) / 1024
    return found


def forget_peak() -> None:
    """Let VmHWM of this process start from what it holds now; where the kernel does not allow it, it stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@dataclass(slots=True)
class Peak:
    """The most that was allocated while a block ran, and by how many processes at most at one time."""

    mib: float = 0.0
    processes: int = 0


@contextmanager
def tree_peak(process: int) -> Iterator[Peak]:
    """Watch what a process and its descendants allocate together while a block runs."""

    def watch(peak: Peak, over: threading.Event) -> None:
        while not over.wait(_EVERY_S):
            members = [memory_of(member) for member in _tree(process)]
            peak.processes = max(peak.processes, len(members))
            peak.mib = max(peak.mib, sum(member["RssAnon"] + member["RssShmem"] for member in members))

    yield from _watched(watch)


@contextmanager
def own_peak() -> Iterator[Peak]:
    """Watch what this process allocates while a block runs, every two milliseconds."""

    def watch(peak: Peak, over: threading.Event) -> None:
        with Path("/proc/self/statm").open("rb", buffering=0) as file:  # an eighth of the time that status takes
            while True:
                _, resident, shared, *_ = os.pread(file.fileno(), 200, 0).split()
                peak.mib = max(peak.mib, (int(resident) - int(shared)) * mmap.PAGESIZE / 2**20)
                if over.wait(_OFTEN_S):
                    return

    yield from _watched(watch)


def _watched(watch: Callable[[Peak, threading.Event], None]) -> Iterator[Peak]:
    peak, over = Peak(), threading.Event()
    thread = threading.Thread(target=watch, args=(peak, over), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _tree(root: int) -> set[int]:
    """Return a process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                # pid (name) state ppid ...: the name may hold blanks and brackets
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    members = {root}
    while more := {process for process, parent in parents.items() if parent in members} - members:
        members |= more
    return members
