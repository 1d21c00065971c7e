"""A damaged checkpoint is named by the command, the one before it is untouched and goes on, bit for bit, on request."""

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.faults

FILES = ["drafter.safetensors", "optimizer.safetensors", "state.json", "manifest.json", "latest"]


def truncate(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(1, len(content))])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


HOWS: dict[str, Callable[[Path, random.Random], object]] = {
    "truncated": truncate,
    "a bit flipped": flip,
    "emptied": lambda path, draw: path.write_bytes(b""),
    "removed": lambda path, draw: path.unlink(),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(900)
def test_every_file_of_a_checkpoint_damaged_in_every_way(lab: Any, survival: Any) -> None:
    """Seeds are kept: a red one is run again with its number."""
    whole, stopped = lab.finished(lab.settings("whole")), lab.settings("stopped")
    child = lab.train(stopped, slow_s=0.01)
    child.wait_for(lambda: lab.told(stopped, "step") >= 7)
    child.send(signal.SIGTERM)
    assert child.status() == 75, child.text()
    older, newest = sorted((stopped / "checkpoints").glob("step-*"))
    for seed, (file, how) in enumerate(((file, how) for file in FILES for how in HOWS), start=300):
        with survival.trial("checkpoint file truncated, flipped, emptied or removed", f"{seed} {file} {how}"):
            run = lab.settings(f"damaged-{seed}")
            shutil.copytree(stopped, run)
            place = run / "checkpoints" / ("" if file == "latest" else newest.name)
            HOWS[how](place / file, random.Random(seed))

            refused = lab.train(run)
            assert refused.status() == 2, refused.text()
            error = refused.text().splitlines()[-1]
            assert error.startswith("error: "), refused.text()
            assert str(place) in error
            assert "checkpoints/latest" in error or "is damaged: " in error or "has format" in error
            assert f"`paceline train {run} --resume-previous`" in error
            assert contents(run / "checkpoints" / older.name) == contents(older)

            going_on = lab.train(run, "--resume-previous")
            assert going_on.status() == 0, going_on.text()
            assert "Going on from the one after step" in going_on.text()
            lab.assert_equal(run, whole)
