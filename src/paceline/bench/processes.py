"""Runs of this program in processes of their own, timed and watched from outside."""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.memory import tree_peak
from paceline.records import RunError


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command printed, how long it took, and the most memory that its processes allocated together."""

    result: dict[str, Any]
    seconds: float
    cpu_s: float
    peak_mib: float
    processes: int


def run_child(job: str, *arguments: object) -> dict[str, Any]:
    """Return what a job of child.py found out."""
    return _run([sys.executable, "-m", "paceline.bench.child", job, *map(str, arguments)]).result


def run_prepare(rows: Path, out: Path, target: Path) -> Ran:
    """Run `paceline prepare` with its own defaults on one file."""
    command = [sys.executable, "-m", "paceline", "prepare", str(rows), "--out", str(out), "--target", str(target)]
    return _run([*command, "--max-length", str(1 << 20), "--overwrite", "--json"])


def _run(command: list[str]) -> Ran:
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # as the command line sets it
    began, cpu_began = time.perf_counter(), _cpu_of_children()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            with tree_peak(process.pid) as peak:
                output, errors = process.communicate()
        except BaseException:
            process.terminate()  # `prepare` ends its own processes then
            raise
    seconds, cpu_s = time.perf_counter() - began, _cpu_of_children() - cpu_began
    if process.returncode != 0:
        said = (errors.strip().splitlines() or ["nothing"])[-1]
        raise RunError(f"A measurement ended with status {process.returncode} and said: {said} ({' '.join(command)}).")
    return Ran(json.loads(output), seconds, cpu_s, peak.mib, peak.processes)


def _cpu_of_children() -> float:
    """Return the processors' time of all processes that ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
