"""What asks `paceline train` to stop: a signal, or a file that announces the end of the machine.

The first finishes the step and saves. SIGTERM or SIGINT once more ends the run at once; a notice (SIGUSR1, SIGHUP or
the file) never does, because the scheduler that gives it sends SIGTERM behind it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paceline.config import CheckpointSettings
from paceline.records import INTERRUPTED_STATUS, Interrupted, UserError

_ORDERS = (signal.SIGTERM, signal.SIGINT)
_NOTICES = (signal.SIGUSR1, signal.SIGHUP)
_LOOK_S = 1.0  # between two looks for the notice file
_LEAVE_S = 5.0  # longest wait at the end for a look that is under way


class _Leave(KeyboardInterrupt):
    """What a signal raises in the main thread. A library that tries something, such as an import, and does without
    whatever fails would swallow an Exception."""


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Let a signal end the block, which comes before and behind a run's steps, as it ends a run.

    While there is something to finish or to save, StopRequest looks at signals instead. The block is given a function
    to call behind its imports: what a signal raises while torch imports NumPy is swallowed in C++, and half of NumPy
    stays behind, so that another import fails, or none does. Either was the signal.

    Raises:
        Interrupted: (in the block) one of them came.
    """
    came: list[str] = []
    importing = True

    def imported() -> None:
        nonlocal importing
        importing = False
        if came:
            raise Interrupted(came[0])

    if threading.current_thread() is not threading.main_thread():
        yield imported
        return

    def leave(number: int, _: FrameType | None) -> None:
        came.append(
            f"{signal.Signals(number).name} came while no step was under way, so nothing is lost. Start the same "
            "command again, with --resume if the run had begun."
        )
        raise _Leave(came[0])

    with _handled(leave):
        try:
            yield imported
        except Exception as error:
            if came and importing:
                raise Interrupted(came[0]) from error
            raise


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # A hangup that is ignored was meant to be: nohup.
    numbers = [n for n in (*_ORDERS, *_NOTICES) if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    except _Leave as asked:
        raise Interrupted(str(asked)) from None
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


class StopRequest:
    """Says, when called, whether the run was asked to stop.

    `stopped` returns what a person is told of the run's state. Once the run is asked, `on_asked` is called with what
    asked, and if the run has not ended within `grace_s`, `on_late` with that text, and the process ends with status 75.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        stopped: Callable[[], str],
        on_asked: Callable[[str], None],
        on_late: Callable[[str], None],
        notice: Path | None = None,
    ) -> None:
        """`notice` is a file whose appearance asks the run to stop."""
        self._grace_s, self._stopped, self._on_asked, self._on_late = grace_s, stopped, on_asked, on_late
        self._notice = notice
        self._asked, self._over = threading.Event(), threading.Event()
        self._running = self._ordered = False
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def __call__(self) -> bool:
        """Return whether the run is to stop."""
        return self._asked.is_set()

    def begin(self) -> None:
        """From now on there is a step to finish."""
        self._running = True

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Look at signals, and for the notice file, until the block ends; only the main thread can.

        Raises:
            Interrupted: (in the block) the run was asked to stop before there was a step to finish.
            KeyboardInterrupt: (in the block) SIGTERM or SIGINT came a second time.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled(self._handle):
            looking = threading.Thread(target=self._look, name="notice", daemon=True)
            looking.start()
            try:
                yield
            finally:
                self._over.set()
                looking.join(_LEAVE_S)  # else it could ask a process that handles no notice any more

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if number in _ORDERS:
            if self._ordered:
                self._over.set()  # no grace any more
                raise KeyboardInterrupt
            self._ordered = True
        if self._asked.is_set():
            return
        self._asked.set()
        if not self._running:
            raise _Leave(self._stopped())
        # Not here: whatever this thread was doing may be in the middle of a line.
        why = signal.Signals(number).name
        threading.Thread(target=self._watch, args=(why,), name="stop", daemon=True).start()

    def _leave_terminal(self) -> None:
        """Send what is written to a terminal that has gone nowhere, so that writing to it fails nobody."""
        for stream in self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)

    def _look(self) -> None:
        while self._notice is not None and not self._over.wait(_LOOK_S):
            if self._notice.exists():
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    def _watch(self, why: str) -> None:
        if self._notice is not None and self._notice.exists():
            why = f"{self._notice} is there (checkpoint.notice_file)"
        self._on_asked(why)
        if not self._over.wait(self._grace_s):
            text = f"{self._stopped()} It took longer than checkpoint.grace_s ({self._grace_s:g} s)."
            self._on_late(text)
            print(f"stopped: {text}", file=sys.stderr, flush=True)
            os._exit(INTERRUPTED_STATUS)


def notice_file(settings: CheckpointSettings) -> Path | None:
    """Return checkpoint.notice_file as a path that holds whatever the working directory becomes."""
    return None if settings.notice_file is None else Path(settings.notice_file).expanduser().absolute()


def check_notice(settings: CheckpointSettings) -> None:
    """Refuse a notice file that is there already, so that every run would stop at once.

    Raises:
        UserError: it is.
    """
    path = notice_file(settings)
    if path is not None and path.exists():
        raise UserError(
            f"{path} (checkpoint.notice_file) asks a run to stop when it appears, but it is there already: remove it, "
            "or name another file."
        )
