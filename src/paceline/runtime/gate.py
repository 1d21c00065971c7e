"""A gate around every role's unit of work: many work at once, or one is alone.

Compiling, capturing and resetting happen alone. While one thread compiles, torch 2.13 and later report is_compiling()
in every thread, so that foreach optimizers elsewhere crash or change bits; tracing patches nn.Module for the whole
process; and `torch._dynamo.reset()` under running compiled code kills the process.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.runtime import pulse


class Gate:
    """Readers and a writer. Who wants to be alone goes before who wants to work, so nobody waits for ever.

    Threads are told apart as objects and not by number: a number is given out again once its thread has ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._working: dict[threading.Thread, int] = {}  # how often it is inside
        self._alone: threading.Thread | None = None
        self._waiting = 0  # to be alone

    @contextmanager
    def work(self) -> Iterator[None]:
        """Hold a unit of work: several threads may be inside, and nobody is alone meanwhile.

        Keep it short, and never wait inside for another role: that role may be waiting to be alone.
        """
        me = threading.current_thread()
        with self._changed:
            if self._alone is not me and me not in self._working and not self._open():
                with pulse.waiting("its turn, while another role loads or compiles alone", "its turn"):
                    self._changed.wait_for(self._open)
            self._working[me] = self._working.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                if me in self._working:  # unless its place was revoked
                    self._working[me] -= 1
                    if not self._working[me]:
                        del self._working[me]
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the process: wait until nobody works, and let nobody begin. May be nested.

        Raises:
            RuntimeError: this thread is inside `work`, so it would wait for itself.
        """
        me = threading.current_thread()
        with self._changed:
            if self._alone is me:
                nested = True
            elif me in self._working:
                raise RuntimeError("A thread that is inside work() cannot be alone: it would wait for itself.")
            else:
                nested = False
                self._waiting += 1
                try:
                    with pulse.waiting("the other roles' work to end, to be alone", "its turn"):
                        self._changed.wait_for(lambda: self._alone is None and not self._working)
                    self._alone = me
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
        try:
            yield
        finally:
            if not nested:
                with self._changed:
                    if self._alone is me:  # unless its place was revoked
                        self._alone = None
                    self._changed.notify_all()

    def revoke(self, thread: threading.Thread) -> None:
        """Take its place from a thread that hangs: nobody waits for it any more, and when it leaves nothing happens.

        Should it come back to life inside, it is no longer apart from who is alone.
        """
        with self._changed:
            self._working.pop(thread, None)
            if self._alone is thread:
                self._alone = None
            self._changed.notify_all()

    def _open(self) -> bool:
        return self._alone is None and not self._waiting
