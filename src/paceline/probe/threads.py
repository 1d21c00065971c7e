"""Worker threads of a probe: what they raise reaches the probe."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """A thread that keeps what its function returned or raised. A daemon: the child ends without it."""

    def __init__(self, function: Callable[[], Any], name: str = "probe-worker") -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._body, name=name, daemon=True)
        self._thread.start()

    def _body(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        """Wait for the end. There is no limit here: the process that runs the probes has one."""
        self._thread.join()

    def value(self) -> Any:
        """Wait for the end and return the function's value, or raise what it raised."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.result


def in_worker(function: Callable[[], T]) -> T:
    """Run a function in a thread that is not the main one and return its value."""
    value: T = Worker(function).value()
    return value
