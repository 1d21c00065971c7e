"""Memory of processes as Linux counts it (/proc), in MiB.

Anonymous memory is what a process allocated; pages of mapped files are left out where they are mere page cache, which
the kernel takes back at will. A tree's memory is the sum over its processes: pages that they share count twice.
"""

import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

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


class TreePeak:
    """Watches a process and its descendants while a block runs: `mib` is the most they allocated together.

    `processes` is how many of them there were at most at one time.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self.mib, self.processes = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "TreePeak":
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            members = [memory_of(process) for process in _tree(self.process)]
            self.processes = max(self.processes, len(members))
            self.mib = max(self.mib, sum(member["RssAnon"] + member["RssShmem"] for member in members))


class OwnPeak:
    """Watches this process while a block runs: `mib` is the most it allocated, looked at every two milliseconds."""

    def __init__(self) -> None:
        self.mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "OwnPeak":
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with Path("/proc/self/statm").open("rb", buffering=0) as file:  # an eighth of the time that status takes
            while True:
                _, resident, shared, *_ = os.pread(file.fileno(), 200, 0).split()
                self.mib = max(self.mib, (int(resident) - int(shared)) * mmap.PAGESIZE / 2**20)
                if self._stop.wait(_OFTEN_S):
                    return


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
