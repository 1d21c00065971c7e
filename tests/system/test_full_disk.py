"""On a disk that fills up, a verb says so in one sentence, exits 1 and leaves nothing half-written."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.observe.reading import read_events

pytestmark = pytest.mark.system


@pytest.fixture
def size() -> str:
    return "256k"


@pytest.fixture
def small_disk(tmp_path: Path, size: str) -> Iterator[Path]:
    """A file system of so much."""
    place = tmp_path / "small"
    place.mkdir()
    prefix = [] if os.geteuid() == 0 else ["sudo"]
    subprocess.run([*prefix, "mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", place], check=True)
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


def events(run: Path) -> list[dict[str, Any]]:
    """Return them; the run that the disk ended has torn its last."""
    return list(read_events(run))


@pytest.mark.parametrize("size", ["12m"])
@pytest.mark.parametrize("on_full_disk", ["stop", "wait"])
def test_training_onto_a_disk_that_fills_up(
    small_disk: Path,
    tmp_path: Path,
    tiny_folder: Path,
    shape: Any,
    write_dataset: Callable[..., Path],
    random_rows: list[Any],
    on_full_disk: str,
) -> None:
    """Another process takes the room while the run is under way, and gives it back."""
    tree = {
        "run_dir": str(small_disk / "run"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(write_dataset(random_rows)), "token_budget": 120, "align": 8, "buckets": 3},
        "train": {"epochs": 1000, "max_steps": 400, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
        | {"policy": "eager", "log_every": 1},
        "checkpoint": {"every_steps": 10, "on_full_disk": on_full_disk},
    }
    settings = tmp_path / "RUN.yaml"
    settings.write_text(dump_settings(RunSettings.model_validate(tree)))
    run, other = small_disk / "run", small_disk / "other"
    output = tmp_path / "output"
    with output.open("w") as out:
        command = [sys.executable, "-m", "paceline", "train", settings]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: (run / "checkpoints" / "latest").exists(), process)
        fill(other)
        if on_full_disk == "wait":
            wait_for(lambda: "The run waits" in output.read_text(), process)
            time.sleep(1)
            before = len(events(run))
            time.sleep(1)
            assert len(events(run)) == before, "it waits"
            other.unlink()
            assert process.wait(60) == 0, output.read_text()
        else:
            assert process.wait(60) == 1
            assert f"go on with `paceline train {run} --resume`" in output.read_text()
            other.unlink()
            done = paceline("train", run, "--resume")
            assert done.returncode == 0, done.stderr
    finally:
        process.kill()
        process.wait()
    assert [event["step"] for event in events(run) if event["event"] == "step"][-1] == 399


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.01)
