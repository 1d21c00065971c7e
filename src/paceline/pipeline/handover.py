"""How a drafter's weights come from rank 0 to the evaluator between two steps, without training waiting for it.

One state at a time: what is due while the evaluator is busy is left out and told, so nothing piles up, and neither a
target nor a drafter rank ever waits for it. The exception is the last state of a run: then nobody trains any more.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.pipeline.channel import Closed
from paceline.records import StepReport
from paceline.runtime import pulse

WINDOW = 20  # steps that a teacher-forced estimate is of where no rows are held out


@dataclass(frozen=True, slots=True)
class Forced:
    """Acceptance as training sees it: with the right tokens before every anchor, whichever a decode would visit."""

    acceptance: float  # mean length, the target's own token included
    slot_acceptance_K: tuple[float, ...]  # share of blocks whose slots 1..k were all right

    @classmethod
    def of(cls, counts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Forced | None":
        """Return it of (accepted, available) counts, or None where there are none."""
        if not counts:
            return None
        sums = zip(*(zip(accepted, available, strict=True) for accepted, available in counts), strict=True)
        shares = [sum(right for right, _ in slot) / max(1, sum(of for _, of in slot)) for slot in sums]
        return cls(1 + sum(shares), tuple(shares))


@dataclass(frozen=True, slots=True)
class Job:
    """A state that is to decode."""

    steps: int
    forced: Forced | None
    saved: bool = False  # its weights are those of its checkpoint, and not handed over

    def state(self) -> dict[str, Any]:
        """Return it as plain data, for a checkpoint."""
        return {"steps": self.steps, "forced": asdict(self.forced) if self.forced else None}


class Handover:
    """Between rank 0, which claims and gives, and the evaluator, which takes jobs and says when it is done.

    `skipped` gets the steps of a state that is left out, and of the one that is being evaluated.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        due: Callable[[int], bool],
        held_out: bool,
        skipped: Callable[[int, int], None],
        steps_done: int = 0,
        state: dict[str, Any] | None = None,
    ) -> None:
        """`held_out`: the estimate is that of held-out rows, and not of the newest steps. Goes on from `state`."""
        self._total_steps, self._due, self._held_out, self._skipped = total_steps, due, held_out, skipped
        state = state or {"seen": 0, "pending": None, "window": []}
        self._seen: int = state["seen"]  # the last that was due
        window = [(tuple(accepted), tuple(available)) for accepted, available in state["window"]]
        self._window = deque[tuple[Sequence[int], Sequence[int]]](window, maxlen=WINDOW)
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._given = self._over = self._stopped = self._left = self._failed = False
        if pending := state["pending"]:
            forced = pending["forced"]
            forced = Forced(forced["acceptance"], tuple(forced["slot_acceptance_K"])) if forced else None
            self._job = Job(pending["steps"], forced, saved=True)
        elif steps_done and due(steps_done) and self._seen != steps_done and not held_out:
            # The part of the run before this one broke right after that step.
            self._seen, self._job = steps_done, Job(steps_done, Forced.of(self._window), saved=True)
        self._given = self._job is not None

    # Training's side: rank 0's thread

    def note(self, report: StepReport) -> None:
        """Take note of a step's counts, or of those of the held-out rows, which are then the only ones."""
        if self._held_out:
            self._window.clear()
        self._window.append((report.accepted_K, report.available_K))

    def claim(self, steps: int) -> bool:
        """Return whether the state after `steps` steps is to be saved and given; False if it is not due or left out.

        Waits only behind the last step.
        """
        if not self._due(steps) or steps == self._seen:
            return False
        with self._changed:
            if steps == self._total_steps:
                with pulse.waiting("the evaluator"):
                    self._changed.wait_for(lambda: self._job is None or self._left or self._stopped)
            self._seen = steps
            if self._failed:
                return False
            busy = self._job
            if busy is None:
                self._job = Job(steps, Forced.of(self._window))
        if busy is not None:
            self._skipped(steps, busy.steps)
        return busy is None

    def give(self, copy: Callable[[], None]) -> None:
        """Let `copy` put the weights where the evaluator finds them, unless it has left, and let it begin."""
        if not self._left:
            copy()
        with self._changed:
            self._given = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Say that no more will come."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Let the evaluator leave where it is; what it was at stays pending."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint says of it: the last state that was due, and the one whose worth is not known."""
        with self._changed:
            pending = self._job.state() if self._job else None
            return {"seen": self._seen, "pending": pending, "window": [[*counts] for counts in self._window]}

    # The evaluator's side

    def jobs(self) -> Iterator[Job]:
        """Yield what is to be evaluated, until there is no more; what was yielded is done when the next is asked for.

        Raises:
            Closed: it was stopped.
        """
        while True:
            with self._changed:
                with pulse.waiting("a drafter to evaluate"):
                    self._changed.wait_for(lambda: self._given or self._over or self._stopped)
                self.look()
                if not self._given or self._job is None:
                    return
                job = self._job
            yield job
            with self._changed:
                self._job, self._given = None, False
                self._changed.notify_all()

    def look(self) -> None:
        """Raise Closed once it was stopped."""
        if self._stopped:
            raise Closed

    def leave(self) -> None:
        """Say that nobody evaluates any more."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def fail(self) -> Job | None:
        """Say that the evaluator is lost: nothing is due any more. Returns what it was at."""
        with self._changed:
            lost, self._job = self._job, None
            self._left = self._failed = True
            self._changed.notify_all()
            return lost
