"""A disk that fills up at any moment: one sentence, nothing lost, and the same result once there is room again.

The disk is a file system of its own in memory, which takes root or sudo to mount; without either these tests fail.
"""

import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

FULL = "No space left on device"


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of so much room at the place, for the block."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    place.mkdir(exist_ok=True)
    options = f"size={mib}m,mode=777"
    subprocess.run([*prefix, "mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run([*prefix, "umount", "-l", place], check=True)


def fill(disk: Path, left: int) -> Path:
    """Take all but so many bytes of a disk and return the file that does."""
    taken = disk / "taken"
    with taken.open("wb") as file:
        told = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, max(told.f_bavail * told.f_frsize - left, 1))
    return taken


def keep_full(taken: Path, left: int, child: Any) -> None:
    """Leave no more than so many bytes until a command ends, whatever it removes."""
    while child.process.is_alive():
        told = os.statvfs(taken.parent)
        more = told.f_bavail * told.f_frsize - left
        if more > 0:
            with taken.open("r+b") as file, suppress(OSError):  # it may have written first
                os.posix_fallocate(file.fileno(), taken.stat().st_size, more)
        time.sleep(0.002)


def the_error(child: Any) -> str:
    """Return the one sentence of a command that failed on a full disk."""
    assert child.status() == 1, child.text()
    assert "Traceback" not in child.text()
    errors = [line for line in child.text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, child.text()
    assert errors[0].count(". ") <= 3
    return errors[0]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("seed", range(400, 405))
def test_a_disk_that_is_full_when_a_run_saves(lab: Any, survival: Any, seed: int) -> None:
    draw = random.Random(seed)
    changes = {
        "train": {"max_steps": 60, "epochs": 100}
    }  # so many that one is saved behind, however busy the machine is
    whole, run = lab.finished(lab.settings("whole", changes)), lab.settings("run", changes)
    state = size(max((whole / "checkpoints").glob("step-*")))
    with survival.trial("ENOSPC at save", seed), small_disk(run, mib=4 + 8 * state // 2**20):
        child = lab.train(run, slow_s=0.02)
        saved = draw.randrange(1, 4)
        child.wait_for(lambda: lab.told(run, "checkpoint") >= saved)
        if draw.random() < 0.6:  # in the middle of a save, when room was there at its begin
            child.wait_for(lambda: any((run / "checkpoints").glob(".step-*/*")))
        latest = (run / "checkpoints" / "latest").read_text()
        left = draw.randrange(0, 3 * state // 2)
        taken = fill(run, left)
        keep_full(taken, left, child)
        error = the_error(child)
        assert FULL in error or "no room for a checkpoint" in error
        assert str(run) in error
        now = (run / "checkpoints" / "latest").read_text()
        assert now >= latest, "what was saved stays"
        assert not list((run / "checkpoints").glob(".step-*")), "nothing is left half-written"
        taken.unlink()
        lab.finished(run)
        lab.assert_equal(run, whole)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{4 + i % 120} w{4 + i // 120}"}) + "\n" for i in range(240)))
    return path


@pytest.mark.parametrize("seed", range(410, 415))
def test_a_disk_that_fills_up_while_completions_are_generated(
    lab: Any, survival: Any, tmp_path: Path, tiny_folder: Path, prompts: Path, seed: int
) -> None:
    draw = random.Random(seed)
    command = ["generate", prompts, "--target", tiny_folder, "--max-new-tokens", 40, "--device", "cpu", "--out"]
    whole = tmp_path / "whole"
    child = lab.command(*command, whole, "--dtype", "float32")
    assert child.status() == 0, child.text()
    with survival.trial("ENOSPC at generate", seed), small_disk(tmp_path / "small", mib=8) as disk:
        taken = fill(disk, left=draw.randrange(0, size(whole) * 3 // 2))
        error = the_error(lab.command(*command, disk / "done", "--dtype", "float32"))
        assert error == (
            f"error: {disk / 'done'} (--out) cannot be written: {FULL}. What was finished is kept: make room and run "
            "the same command again."
        )
        taken.unlink()
        again = lab.command(*command, disk / "done", "--dtype", "float32")
        assert again.status() == 0, again.text()
        assert contents(disk / "done").keys() == contents(whole).keys()
        for name in ("completions-00000.jsonl", "completions.json"):
            assert contents(disk / "done")[name] == contents(whole)[name]


@pytest.mark.parametrize("seed", range(420, 425))
def test_a_disk_that_fills_up_while_a_dataset_is_prepared(
    lab: Any, survival: Any, tmp_path: Path, tiny_folder: Path, seed: int
) -> None:
    draw = random.Random(seed)
    source, whole = tmp_path / "rows.jsonl", tmp_path / "whole"
    rows = ({"prompt_ids": [5, 6, 7], "completion_ids": [8 + i % 100] * (i % 400 + 2)} for i in range(1500))
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + json.dumps({"nothing": 1}) + "\n")
    command = ["prepare", source, "--target", tiny_folder, "--workers", draw.choice([1, 2]), "--out"]
    child = lab.command(*command, whole)
    assert child.status() == 0, child.text()
    with survival.trial("ENOSPC at prepare", seed), small_disk(tmp_path / "small", mib=8) as disk:
        taken = fill(disk, left=draw.randrange(0, size(whole) * 9 // 10))
        out = disk / "dataset"
        error = the_error(lab.command(*command, out))
        assert re.search(rf"{out} .*cannot be written: .*{FULL}", error), error
        assert not out.exists()
        taken.unlink()
        again = lab.command(*command, out)
        assert again.status() == 0, again.text()
        assert contents(out) == contents(whole)
        listed = (
            path.read_bytes() for path in (disk / "dataset.quarantine.jsonl", tmp_path / "whole.quarantine.jsonl")
        )
        assert len({*listed}) == 1
        assert sorted(path.name for path in disk.iterdir()) == ["dataset", "dataset.quarantine.jsonl"]
