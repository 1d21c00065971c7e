"""The process that probes run in: `python -m paceline.probe.child PIPE BENCH FUNCTION [ARGUMENT…] [, FUNCTION …]`.

One line of JSON for each probe goes to the pipe; what torch and compilers print goes where they like.
"""

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from paceline.probe.finding import Bench, Finding, tell

SEPARATOR = ","
_PR_SET_PDEATHSIG = 1


def main(pipe: int, bench: Bench, calls: list[list[str]]) -> None:
    """Run the probes one after the other; an exception is the finding `refused`."""
    os.set_inheritable(pipe, False)  # compile workers must not keep it open
    warnings.simplefilter("ignore")
    with os.fdopen(pipe, "w", encoding="utf-8") as lines:
        for function, *arguments in calls:
            lines.write(json.dumps(asdict(_try(function, arguments, bench))) + "\n")
            lines.flush()


def _try(function: str, arguments: list[str], bench: Bench) -> Finding:
    try:
        module, _, name = function.rpartition(":")
        finding: Finding = getattr(importlib.import_module(module), name)(bench, *arguments)
        return replace(finding, numbers=_plain(finding.numbers))
    except BaseException as error:
        return Finding("refused", tell(error), saw="fails")


def _plain(value: Any) -> Any:
    """Return the numbers as JSON can hold them: it has neither infinity nor what is not a number."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, int | str) else str(value)


def _end_with_parent() -> None:
    """Let the kernel end this process when the doctor is killed: nobody would watch its time limit any more."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    _end_with_parent()
    groups = groupby(sys.argv[3:], key=lambda word: word == SEPARATOR)
    main(int(sys.argv[1]), Bench(**json.loads(sys.argv[2])), [list(words) for is_end, words in groups if not is_end])
