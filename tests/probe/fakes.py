"""Probes that misbehave. The runner's children import this file by its name, through PYTHONPATH."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from paceline.probe import pairs
from paceline.probe.finding import Bench, Finding


def fine(bench: Bench, word: str = "fine") -> Finding:
    return Finding("ok", f"{word} {os.getpid()}", {"scratch": bench.scratch, "odd": float("nan")})


def segfaults(bench: Bench) -> Finding:
    sys.stderr.write("something\nthe last line\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hangs(bench: Bench) -> Finding:
    """Leave the number of a process of the same group behind, and sleep with it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        Path(bench.scratch, "pid").write_text(str(other.pid))
        time.sleep(600)
    raise AssertionError


def makes_noise(bench: Bench) -> Finding:
    os.write(1, b'{"verdict": "refused", "observed": "not this"}\n' * 20_000)  # more than a pipe holds
    os.write(2, b"and this\n")
    return Finding("ok", "the answer")


def raises_empty(bench: Bench) -> Finding:
    raise AssertionError


def raises_with_cause(bench: Bench) -> Finding:
    try:
        raises_empty(bench)
    except AssertionError as error:
        raise RuntimeError("many\n  lines") from error
    raise AssertionError


def leaves(bench: Bench) -> Finding:
    os._exit(0)


def exits(bench: Bench) -> Finding:
    sys.exit(3)


def environment(bench: Bench) -> Finding:
    return Finding("ok", os.environ["TORCHINDUCTOR_CACHE_DIR"])


def widens(bench: Bench) -> Finding:
    """What two drafters compiled is called with another width."""
    calls = pairs._calls

    def wider(*given: Any) -> dict[str, Any]:
        pairs.SHARED_WIDTH = 120
        return calls(*given)

    pairs._calls = wider
    return pairs.one_compile(bench)
