"""On a disk that fills up, a verb says so in one sentence, exits 1 and leaves nothing half-written."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    subprocess.run([*prefix, "mount", "-t", "tmpfs", "-o", "size=256k,mode=777", "tmpfs", place], check=True)
    yield place
    subprocess.run([*prefix, "umount", place], check=True)


def paceline(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_prepare_onto_a_full_disk(small_disk: Path, tmp_path: Path, tiny_folder: Path) -> None:
    source = tmp_path / "rows.jsonl"
    row = {"prompt_ids": [5, 6, 7], "completion_ids": list(range(10, 100)) * 10}
    source.write_text((json.dumps(row) + "\n") * 3000)
    done = paceline("prepare", source, "--out", small_disk / "dataset", "--target", tiny_folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "No space left on device" in errors[0]
    assert list(small_disk.iterdir()) == []

    roomy = paceline("prepare", source, "--out", tmp_path / "dataset", "--target", tiny_folder, "--json")
    assert json.loads(roomy.stdout)["rows"] == 3000


def test_generate_onto_a_full_disk(small_disk: Path, tmp_path: Path, tiny_folder: Path) -> None:
    """What was finished before the disk was full is used again once there is room."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{4 + i % 120} w{4 + i // 120}"}) + "\n" for i in range(600)))
    command = ["generate", prompts, "--target", tiny_folder, "--max-new-tokens", "60", "--device", "cpu", "--out"]
    out = small_disk / "done"
    full = paceline(*command, out, "--dtype", "float32")
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == (
        f"error: {out} (--out) cannot be written: No space left on device. What was finished is kept: make room and "
        "run the same command again."
    )
    assert "Traceback" not in full.stderr
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    subprocess.run([*prefix, "mount", "-o", "remount,size=8m", small_disk], check=True)
    again = json.loads(paceline(*command, out, "--dtype", "float32", "--json").stdout)
    assert again["conversations"] == 600
    assert 50 < again["found"] < 600
    whole = tmp_path / "whole"
    assert paceline(*command, whole, "--dtype", "float32").returncode == 0
    assert (out / "completions-00000.jsonl").read_bytes() == (whole / "completions-00000.jsonl").read_bytes()
