"""Builds a stream ahead of whoever reads it, in a thread of its own and within a bound."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

_LEAVE_S = 5.0  # longest wait for the thread at the end; it is in the middle of one item at most


class _Shared(Generic[Item]):
    """What reader and thread have in common. It knows no reader, so one that is dropped can be collected."""

    def __init__(self, source: Iterator[Item], ahead: int) -> None:
        self.source, self.ahead = source, ahead
        self.ready: deque[Item] = deque()
        self.error: BaseException | None = None
        self.ended = self.stopped = False
        self.changed = threading.Condition()

    def fill(self) -> None:
        """Build until the source ends, fails or nobody wants more."""
        try:
            while self._wait_for_room():
                item = next(self.source, self)
                with self.changed:
                    if item is self or self.stopped:  # what was being built when all ended is nobody's
                        return
                    self.ready.append(item)  # type: ignore[arg-type]
                    self.changed.notify_all()
        except BaseException as error:  # raised again where it is read
            self.error = error
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or len(self.ready) < self.ahead)
            return not self.stopped


class Prefetch(Generic[Item]):
    """An iterator over the items of `source`, in order, of which up to `ahead` wait or are being built.

    The thread starts with the first `next`. An error of the source is raised in its place of the stream. `close` ends
    the thread and whoever waits for an item; so does dropping the iterator.
    """

    def __init__(self, source: Iterator[Item], ahead: int) -> None:
        self._shared = _Shared(source, ahead)
        self._thread = threading.Thread(target=self._shared.fill, name="prefetch", daemon=True)
        self._starting = threading.Lock()
        self._closed = False
        weakref.finalize(self, self._shared.stop)

    def __iter__(self) -> "Prefetch[Item]":
        return self

    def __next__(self) -> Item:
        """Return the next item; several threads may ask."""
        with self._starting:
            if self._thread.ident is None and not self._shared.stopped:
                self._thread.start()
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.ended or shared.stopped)
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
            if shared.error is not None and not shared.stopped:
                raise shared.error
            raise StopIteration

    def close(self) -> None:
        """Build no more and wait until the thread has left, once and not for long: it may hang."""
        self._shared.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(0.0 if self._closed else _LEAVE_S)
        self._closed = True

    def __enter__(self) -> "Prefetch[Item]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
