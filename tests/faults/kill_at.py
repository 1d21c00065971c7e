"""Kills this process with SIGKILL as one of its functions, named with dots, is called so many times."""

import os
import pkgutil
import signal
from typing import Any


def inject(owner: str, name: str, call: int) -> None:
    """Let the call number `call`, from 0, of `owner`.`name` be the process's last act."""
    place = pkgutil.resolve_name(owner)
    whole, calls = getattr(place, name), iter(range(10**9))

    def last(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **more)

    setattr(place, name, last)
