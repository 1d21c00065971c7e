"""`paceline bench decode` beside the real dflash package, which lies alone on the path, as `--no-deps` leaves it."""

import json
import os
from importlib.machinery import PathFinder
from pathlib import Path
from subprocess import run

import pytest
from tiny_bench import shrink
from typer.testing import CliRunner

from paceline.cli import app

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]  # the peer's own


@pytest.fixture
def dflash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = os.environ["PACELINE_INTEROP_PYTHON"]
    where = "import importlib.util as u; print(u.find_spec('dflash').submodule_search_locations[0])"
    (tmp_path / "dflash").symlink_to(
        run([python, "-Ic", where], capture_output=True, text=True, check=True).stdout.strip()
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert PathFinder.find_spec("dflash") is not None


@pytest.mark.usefixtures("dflash")
@pytest.mark.parametrize("right", [False, True])
def test_both_sides_make_the_same_completions_in_the_same_cycles(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    shrink(monkeypatch)
    options = ["--device", "cpu", "--count", "3", "--tokens", "17", "--repeats", "2", "--json"]
    done = CliRunner().invoke(app, ["bench", "decode", *options, *(["--right"] if right else [])])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["same_completions"], result["same_cycles"]) == (3, 3)
    assert result["ours"]["tau"] == result["dflash"]["tau"]
    assert (result["ours"]["tau"] == 4) == right
    assert result["ours_over_dflash"] > 0
