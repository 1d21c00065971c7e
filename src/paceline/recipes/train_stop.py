"""SIGTERM and SIGINT while `paceline train` runs: the first finishes the step and saves, the second ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.records import INTERRUPTED_STATUS, Interrupted


class StopRequest:
    """Says, when called, whether a signal asked the run to stop.

    `stopped` returns what a person is told of the run's state. After the first signal `on_asked` is called, and if the
    run has not ended within `grace_s`, `on_late` with that text, and the process ends with status 75.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        stopped: Callable[[], str],
        on_asked: Callable[[], None],
        on_late: Callable[[str], None],
    ) -> None:
        self._grace_s, self._stopped, self._on_asked, self._on_late = grace_s, stopped, on_asked, on_late
        self._asked, self._over = threading.Event(), threading.Event()
        self._running = False

    def __call__(self) -> bool:
        """Return whether the run is to stop."""
        return self._asked.is_set()

    def begin(self) -> None:
        """From now on there is a step to finish."""
        self._running = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Look at signals until the block ends; only the main thread can.

        Raises:
            Interrupted: (in the block) the first signal came before there was a step to finish.
            KeyboardInterrupt: (in the block) the second signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self._handle) for number in numbers]
        try:
            yield
        finally:
            self._over.set()
            for number, old in zip(numbers, before, strict=True):
                signal.signal(number, old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            self._over.set()  # no grace any more
            raise KeyboardInterrupt
        self._asked.set()
        if not self._running:
            raise Interrupted(self._stopped())
        # Not here: whatever this thread was doing may be in the middle of a line.
        threading.Thread(target=self._watch, name="stop", daemon=True).start()

    def _watch(self) -> None:
        self._on_asked()
        if not self._over.wait(self._grace_s):
            text = f"{self._stopped()} It took longer than checkpoint.grace_s ({self._grace_s:g} s)."
            self._on_late(text)
            print(f"stopped: {text}", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED_STATUS)
