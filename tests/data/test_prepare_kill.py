"""`paceline prepare` killed and run again gives what it gives unkilled; its processes do not outlive it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """16 MB of ids, which make four pieces."""
    rng = np.random.default_rng(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        while file.tell() < 16 << 20:
            ids = rng.integers(4, 128, 400).tolist()
            file.write(json.dumps({"prompt_ids": ids[:20], "completion_ids": ids[20:]}) + "\n")
        file.write("[1]\n")
    return path


def start(source: Path, out: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "prepare", source, "--out", out, "--target", target, "--json"]
    return subprocess.Popen(
        [*map(str, command), "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_sigkill(source: Path, tmp_path: Path, tiny_folder: Path) -> None:
    killed = start(source, tmp_path / "killed", tiny_folder)
    workshop = tmp_path / "killed.partial"
    until = time.monotonic() + 120
    while not list(workshop.glob("*.json")):
        assert time.monotonic() < until
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    finished = {path.name: path.stat().st_mtime_ns for path in workshop.glob("*.json")}

    again = start(source, tmp_path / "killed", tiny_folder)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"holds {len(finished)} of 4 pieces" in json.loads(out)["notes"][0]
    whole = start(source, tmp_path / "whole", tiny_folder)
    whole.communicate(timeout=120)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sum(name.endswith(".arrow") for name in names) == 4
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not workshop.exists()
