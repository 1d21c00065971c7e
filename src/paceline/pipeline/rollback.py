"""Takes all drafter ranks back to the last good checkpoint when too many steps were rejected: once in a run."""

import threading
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import RunSettings
from paceline.records import RunError
from paceline.runtime import pulse
from paceline.runtime.gate import Gate
from paceline.train.guard import Guard
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep


class Rollback:
    """Puts the state of the newest whole checkpoint from before the first rejected step of the window into every rank.

    Weights, moments and the schedule's position go back; the data goes on from where it is, so the batches around the
    spike are passed over (as in PaLM, arXiv 2204.02311, section 5.1). `tell` gets how many steps are done and the
    checkpoint; `warn` a sentence on each damaged one.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        saver: Saver,
        meeting: Meeting,
        gate: Gate,
        tell: Callable[[int, Saved], None],
        warn: Callable[[str], None],
    ) -> None:
        self._settings, self._run = settings, Path(settings.run_dir)
        self._saver, self._meeting, self._gate = saver, meeting, gate
        self._tell, self._warn = tell, warn
        self._lock = threading.Lock()
        self._found: Saved | None = None

    def __call__(self, rank: int, step: DrafterStep, guard: Guard, steps: int) -> None:
        """Take a rank back after `steps` steps; returns once all ranks are.

        Raises:
            RunError: the run went back before, or there is no checkpoint from before the first rejected step.
        """
        if guard.rolled_back:
            raise RunError(self._report(guard, "went back to a checkpoint for that before"))
        saved = self._checkpoint(guard)
        with self._gate.work():
            step.restore(saved.tensors())
        guard.roll_back(saved.state["guard"]["applied"])
        self._meeting.gather()  # before rank 0 saves again, which may remove what another still reads
        if rank == 0:
            self._saver.go_back(saved.steps)
            self._tell(steps, saved)

    def _checkpoint(self, guard: Guard) -> Saved:
        """Return the checkpoint that all ranks take; whoever comes first finds it."""
        with pulse.waiting("the checkpoint that another rank looks for", "the other ranks"):
            self._lock.acquire()
        try:
            if self._found is None:
                self._saver.settle()
                line, first = self._saver.line, guard.rejected[0].step
                self._found = store.newest_before(self._run, line, first, tell=self._warn)
        finally:
            self._lock.release()
        if self._found is None:
            raise RunError(self._report(guard, "has no whole checkpoint from before them to go back to"))
        return self._found

    def _report(self, guard: Guard, obstacle: str) -> str:
        steps = "; ".join(
            f"step {step}: {told}, rows {', '.join([*map(str, rows), '…'])}" for step, told, rows in guard.rejected
        )
        limits = guard.settings
        command = store.resume_command(self._run, f"--resume guard.rejected={max(100, 10 * limits.rejected)}")
        return (
            f"At most {limits.rejected} (guard.rejected) of {limits.window} steps (guard.window) may be rejected, "
            f"got {len(guard.rejected)} ({steps}), and the run {obstacle}. All their rows are in "
            f"{self._run / 'quarantine.jsonl'}: look at them, then start anew in another run_dir with a lower train.lr "
            f"({self._settings.train.lr:g}) or without these rows, or go on with other limits, as in `{command}`."
        )
