"""Which state of a run is the best, of those that are saved or about to be: by its held-out loss, or by true
acceptance, the higher the better."""

import math
import threading
from typing import Any, Literal

By = Literal["loss", "tau"]


class Best:
    """The best so far. A state that turns out not to be saved gives its place back to the one before it."""

    def __init__(
        self, steps: int | None = None, loss: float | None = None, tau: float | None = None, *, by: By = "loss"
    ) -> None:
        """Begin with a state that is saved, if there is one."""
        self.by = by
        self._lock = threading.Lock()  # the saving thread tells what became of a state that training offered
        # Each better than the one before. The first is on disk, others are waiting to be, or the first is too.
        value = loss if by == "loss" else tau
        self._states = [(steps, value)] if steps is not None and value is not None else []

    def offer(self, steps: int, value: float) -> bool:
        """Take the loss, or the acceptance, after `steps` steps; return whether it is the best so far, never if not
        finite.
        """
        with self._lock:
            better = math.isfinite(value) and (not self._states or self._beats(value, self._states[-1][1]))
            if better:
                self._states.append((steps, value))
            return better

    def _beats(self, value: float, other: float) -> bool:
        return value < other if self.by == "loss" else value > other

    def saved(self, steps: int) -> None:
        """Say that the state after `steps` steps is on disk; those that it beat no longer count."""
        with self._lock:
            places = [place for place, state in enumerate(self._states) if state[0] == steps]
            del self._states[: places[-1] if places else 0]

    def failed(self, steps: int) -> None:
        """Say that the state after `steps` steps could not be saved."""
        with self._lock:
            self._states = [state for state in self._states if state[0] != steps]

    @property
    def steps(self) -> int | None:
        """After how many steps the best state was."""
        with self._lock:
            return self._states[-1][0] if self._states else None

    def state(self) -> dict[str, Any] | None:
        """Return the best state's steps, and its loss or tau, as plain data, for a checkpoint and for people."""
        with self._lock:
            return {"steps": self._states[-1][0], self.by: self._states[-1][1]} if self._states else None
