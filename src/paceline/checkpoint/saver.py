"""Saves a run's state off the training thread, which only copies it into host memory between two steps."""

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import store
from paceline.checkpoint.best import Best
from paceline.checkpoint.folder import free_bytes
from paceline.checkpoint.host import HostCopy
from paceline.config import CheckpointSettings
from paceline.records import RunError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOOK_S = 1.0  # between two looks at a full disk
_SPARE = 1 << 20  # bytes that have to be free beside a checkpoint's own, for its folder and the events


class Saver:
    """Decides when to save, saves in a thread, and stops or holds the run while the disk is full.

    `tell` gets the event's name and values: `checkpoint`, `checkpoint_failed`, `checkpoint_skipped`, `disk_full`.
    """

    def __init__(
        self,
        run: Path,
        settings: CheckpointSettings,
        *,
        describe: Callable[[], dict[str, Any]],
        tell: Callable[..., None],
        stopping: Callable[[], bool],
        best: Best | None = None,
        total_steps: int | None = None,
        line: Sequence[int] = (),
        patient: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext(),
        patience_s: float = 600.0,
    ) -> None:
        """`describe` returns what state.json holds. After `total_steps` only a best state is saved. `line` has the
        steps of the checkpoints that the run came through, in ascending order.

        `patient` is held where the training thread waits for the disk; `patience_s` is how long a save that is under
        way may take once the run has ended.
        """
        self._run, self._settings = run, settings
        self._describe, self._tell, self._stopping = describe, tell, stopping
        self._best, self._total_steps = best or Best(), total_steps
        self._line, self._went_back = [*line], False  # and whether nothing was saved since it was shortened
        self._patient, self._patience_s = patient, patience_s
        self._written_steps: int | None = None  # of the newest that this process has written
        self._copies: dict[str, HostCopy] = {}
        self._thread: threading.Thread | None = None
        self._last, self._steps = time.monotonic(), 0  # when the last save was due, and after which step
        self._full: str | None = None  # why nothing can be written
        self._ended = threading.Event()
        self._candidates: dict[int, threading.Event] = {}  # states whose worth is not known; set once saved or lost

    def prepare(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate host memory for a copy. What is saved later has the same names and shapes."""
        self._copies = {file: HostCopy(group) for file, group in tensors.items()}

    def begin(self) -> None:
        """Count the time to the first save from now."""
        self._last = time.monotonic()

    def between_steps(
        self,
        steps: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        last: bool,
        more: Mapping[str, Any] | None = None,
        good: int | None = None,
        candidate: bool = False,
    ) -> None:
        """Save if it is time, or, if the run stops here or went back or this state is the best or may be, in any case.

        `steps` are done. A `candidate` for the best is not removed until `choose` or `let_go`.

        `more` goes into state.json too. With `good`, the newest checkpoint after at most so many steps is not removed.
        Waits for the copy into host memory, for a disk that is full (on_full_disk: wait), for a save that is under way
        where this one must not be missed, and with `last` until the state is on the disk or saving has failed.

        Raises:
            RunError: the disk is full (on_full_disk: stop).
        """
        best = self._best.by == "loss" and self._best.steps == steps
        if steps == self._total_steps and not (best or candidate):
            return  # the drafter itself is saved
        self._hold()
        if candidate:
            self._candidates[steps] = threading.Event()
        if last or best or candidate or self._went_back:
            self.settle()
            if not self._busy():  # it is if we were released: what is being written must not change
                self._start(steps, tensors, more or {}, good, best=best)
            if last:
                self.settle()
        elif self._due(steps):
            if self._busy():
                self._last = time.monotonic()
                self._tell("checkpoint_skipped", steps=steps)
            else:
                self._start(steps, tensors, more or {}, good)

    def settle(self) -> None:
        """Wait until no save is under way, or the run ends."""
        with self._patient("the checkpoint to be on the disk"):
            while self._busy() and not self._ended.wait(0.02):
                pass

    @property
    def line(self) -> list[int]:
        """The steps of the checkpoints that the run came through and that are kept, in ascending order."""
        return [*self._line]

    def go_back(self, steps: int) -> None:
        """Say that the run went back to a checkpoint of its line, while no save is under way.

        Those behind it are none of the line any more. They go once the state with which the run goes on is saved, which
        is the next time in any case: whoever is killed before that goes on from one of them and is led back again.
        """
        self._line, self._went_back = [n for n in self._line if n <= steps], True

    def adopt(self, steps: int) -> None:
        """Keep a candidate that an earlier part of the run has saved."""
        self._candidates[steps] = threading.Event()
        self._candidates[steps].set()

    def has(self, steps: int) -> bool:
        """Return whether a candidate is on the disk; waits for its save, unless the run ends."""
        saved = self._candidates.get(steps)
        with self._patient("the checkpoint to be on the disk"):
            while saved is not None and not saved.wait(0.1) and steps in self._candidates and not self._ended.is_set():
                pass
        return saved is not None and saved.is_set() and steps in self._candidates

    def choose(self, steps: int) -> None:
        """Let `best` name a candidate.

        Raises:
            OSError: as on a full disk; it names what it named before.
        """
        store.point_best(self._run, steps)
        self._best.saved(steps)
        self.let_go(steps)  # only now, when the pointer keeps it

    def let_go(self, steps: int) -> None:
        """Keep a candidate no longer than others are kept."""
        self._candidates.pop(steps, None)

    def save_now(
        self,
        steps: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        more: Mapping[str, Any] | None = None,
        good: int | None = None,
    ) -> bool:
        """Save what a run that failed has reached, and return whether it is on the disk; see between_steps.

        From any thread, once nobody trains any more.
        """
        self._join()
        if self._written_steps != steps and not self._busy():
            best = self._best.by == "loss" and self._best.steps == steps
            self._start(steps, tensors, more or {}, good, best=best)
            self._join()
        return self._written_steps == steps

    def release(self) -> None:
        """Let the training thread wait no more, because the run ends."""
        self._ended.set()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait for a save that is under way, unless all is to end at once; but no more for a full disk."""
        self._ended.set()
        if kind is not None and not issubclass(kind, Exception):
            self._tell = lambda *_, **__: None  # nobody listens any more
        else:
            self._join()
            if self._busy():
                message = f"it was still being written after pipeline.work_timeout_s ({self._patience_s:g} s)"
                self._tell("checkpoint_failed", steps=self._steps, message=message)
                self._tell = lambda *_, **__: None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._patience_s)

    def _due(self, steps: int) -> bool:
        if self._settings.every_steps is not None:
            return steps % self._settings.every_steps == 0
        return time.monotonic() - self._last >= 60 * self._settings.every_minutes

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _hold(self) -> None:
        if self._full is None:
            return
        with self._patient("room on the disk"):
            self._hold_while_full()

    def _hold_while_full(self) -> None:
        while self._full is not None and not self._stopping() and not self._ended.wait(0.1):
            if self._settings.on_full_disk == "stop":
                raise RunError(
                    f"{self._full} What was saved before is as it was: make room and go on with "
                    f"`{store.resume_command(self._run)}`."
                )

    def _start(
        self,
        steps: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        more: Mapping[str, Any],
        good: int | None,
        *,
        best: bool = False,
    ) -> None:
        self._last, self._steps, self._went_back = time.monotonic(), steps, False
        for file, copy in self._copies.items():
            copy.take(tensors[file])
        line = [n for n in self._line if n != steps]  # one that is there is written once more
        state = {**self._describe(), **more, "line": line}
        self._thread = threading.Thread(
            target=self._save, args=(steps, state, good, best), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _save(self, steps: int, state: dict[str, Any], good: int | None, best: bool) -> None:
        began = time.monotonic()
        try:
            while not self._written(steps, state, best):
                time.sleep(_LOOK_S)
            if self._best.by == "loss":
                self._best.saved(steps)
            if (waited_for := self._candidates.get(steps)) is not None:
                waited_for.set()
            nbytes = sum(copy.nbytes for copy in self._copies.values())
            copy_s = sum(copy.copy_s for copy in self._copies.values())
            write_s = time.monotonic() - began
            times = {"copy_s": round(copy_s, 3), "write_s": round(write_s, 3)}
            self._written_steps = steps
            self._tell("checkpoint", steps=steps, best=best, bytes=nbytes, **times)
            self._line = [*state["line"], steps]
            with suppress(OSError):  # what cannot be removed is one too many, and no loss
                keep, also = self._settings.keep, {*self._candidates}
                self._line = store.prune(self._run, self._line, keep, good=good, also=also)
        except Exception as error:  # the run goes on: its last checkpoint is as it was
            if self._best.by == "loss":
                self._best.failed(steps)
            self.let_go(steps)
            if self._settings.on_full_disk == "wait":  # nobody looks for room any more
                self._full = None
            message = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._tell("checkpoint_failed", steps=steps, message=message)

    def _written(self, steps: int, state: dict[str, Any], best: bool) -> bool:
        """Write a checkpoint; False if there is no room and waiting for it is what is wanted."""
        try:
            self._check_room()
            store.write(self._run, steps, self._copies, state, best=best)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            told = self._full is not None
            self._full = f"The disk of {self._run} (run_dir) has no room for a checkpoint: {error.strerror}."
            if self._settings.on_full_disk == "stop" or self._stopping() or self._ended.is_set():
                raise
            if not told:
                self._tell("disk_full", steps=steps, message=self._full)
            return False
        self._full = None
        return True

    def _check_room(self) -> None:
        needed = sum(copy.nbytes for copy in self._copies.values()) + _SPARE
        free = free_bytes(self._run)
        if free < needed:
            raise OSError(errno.ENOSPC, f"it needs {needed:,} bytes and {free:,} are free", os.fspath(self._run))
