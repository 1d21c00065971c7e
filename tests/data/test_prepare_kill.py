"""`paceline prepare` killed and run again gives what it gives unkilled; its processes do not outlive it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from paceline.recipes.prepare import prepare_dataset


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """12 MB of ids, which make three pieces."""
    rng = np.random.default_rng(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        while file.tell() < 12 << 20:
            ids = rng.integers(4, 128, 400).tolist()
            file.write(json.dumps({"prompt_ids": ids[:20], "completion_ids": ids[20:]}) + "\n")
        file.write("[1]\n")
    return path


def start(source: Path, out: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "prepare", source, "--out", out, "--target", target, "--json"]
    return subprocess.Popen(
        [*map(str, command), "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    until = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_sigkill(source: Path, tmp_path: Path, tiny_folder: Path) -> None:
    killed = start(source, tmp_path / "killed", tiny_folder)
    workshop = tmp_path / "killed.partial"
    wait_for(killed, workshop, "*.json")
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    finished = {path.name: path.stat().st_mtime_ns for path in workshop.glob("*.json")}

    again, _ = (
        prepare_dataset([source], tmp_path / name, target=str(tiny_folder), revision=None, max_length=4096)
        for name in ("killed", "whole")
    )
    assert f"holds {len(finished)} of 3 pieces" in again["notes"][0]
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sum(name.endswith(".arrow") for name in names) == 3
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not workshop.exists()


@pytest.mark.parametrize("seconds", [0.1, 0.6])
def test_ctrl_c_while_processes_start(source: Path, tmp_path: Path, tiny_folder: Path, seconds: float) -> None:
    """A terminal sends it to all of them; those that are still importing must not answer with tracebacks."""
    stopped = start(source, tmp_path / "out", tiny_folder)
    wait_for(stopped, tmp_path / "out.partial", ".lock")
    time.sleep(seconds)
    os.killpg(stopped.pid, signal.SIGINT)
    out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, out, err) == (130, "", "error: interrupted\n")
    assert not (tmp_path / "out").exists()
