"""The process that probes run in: `python -m paceline.probe.child PIPE BENCH FUNCTION [ARGUMENT…] [, FUNCTION …]`.

One line of JSON for each probe goes to the pipe; what torch and compilers print goes where they like.
"""

import importlib
import json
import os
import sys
import warnings
from dataclasses import asdict
from itertools import groupby

from paceline.probe.finding import Bench, Finding, tell

SEPARATOR = ","


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
        json.dumps(asdict(finding))  # here, where it is the probe's own fault
        return finding
    except BaseException as error:
        return Finding("refused", tell(error), saw="fails")


if __name__ == "__main__":
    groups = groupby(sys.argv[3:], key=lambda word: word == SEPARATOR)
    main(int(sys.argv[1]), Bench(**json.loads(sys.argv[2])), [list(words) for is_end, words in groups if not is_end])
