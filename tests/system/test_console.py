"""A run in a real terminal of several sizes, read back from the screen; and the same run into a file."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from paceline.config import DrafterSettings, RunSettings
from paceline.config_file import dump_settings

pytestmark = pytest.mark.system

STEPS = 60


@pytest.fixture
def settings(
    tmp_path: Path,
    tiny_folder: Path,
    shape: DrafterSettings,
    write_dataset: Callable[..., Path],
    random_rows: list[tuple[list[int], int]],
) -> Path:
    """A run of some seconds, in a file."""
    held_out = write_dataset([([5 + i % 90 for i in range(k, k + 20)], 3) for k in range(8)], "held")
    tree: dict[str, Any] = {
        "run_dir": str(tmp_path / "runs" / "one"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(write_dataset(random_rows)), "token_budget": 120, "align": 8, "buckets": 3},
        "train": {"epochs": 50, "max_steps": STEPS, "context_slots": 100, "anchor_slots": 16}
        | {"anchors_per_sample": 4, "policy": "eager", "dtype": "float32", "log_every": 1, "batches_per_step": 4},
        "evaluate": {"held_out": str(held_out), "every_steps": 20},
        "observe": {"sample_s": 0.2},
    }
    path = tmp_path / "run.yaml"
    path.write_text(dump_settings(RunSettings.model_validate(tree)))
    return path


class Screen:
    """A terminal of tmux's in which a command runs."""

    def __init__(self, socket: Path, width: int, height: int, command: list[str]) -> None:
        self._tmux = ["tmux", "-u", "-S", str(socket), "-f", "/dev/null"]
        # The shell stays, so that what was shown last can be read.
        shown = f"{shlex.join(command)}; echo status $?; exec cat"
        self._run("new-session", "-d", "-x", str(width), "-y", str(height), shown)

    def _run(self, *arguments: str) -> str:
        # What this process may have of another terminal's size, from readline, would count more than the real one.
        own = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        command = [*self._tmux, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=own).stdout

    def read(self, *, scrolled: bool = False) -> list[str]:
        """Return the lines on the screen, those that have scrolled away too if wanted."""
        return self._run("capture-pane", "-p", *(["-S", "-"] if scrolled else [])).splitlines()

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=30)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    made: list[Screen] = []

    def make(*arguments: Any) -> Screen:
        made.append(Screen(tmp_path / "tmux", *arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12)])
def test_on_a_terminal_there_is_one_panel(
    screen: Callable[..., Screen], settings: Path, width: int, height: int
) -> None:
    terminal = screen(width, height, [sys.executable, "-m", "paceline", "train", str(settings)])
    seen, until = [], time.monotonic() + 120
    while not (lines := terminal.read()) or not any(line.startswith("status ") for line in lines):
        assert time.monotonic() < until, "\n".join(lines)
        seen.append(lines)
        time.sleep(0.05)  # between two looks at the screen
    assert "status 0" in lines
    panels = [look for look in seen if any(re.match(r"step [\d,]+/60 [━─]*", line) for line in look)]
    assert len(panels) > 3, "the run was seen while it was under way"
    for look in panels:
        assert max(map(cell_len, look)) <= width
        # A picture may be read while it is drawn; never are there two.
        assert len([line for line in look if re.match(r"step [\d,]+/60 [━─]*", line)]) == 1
    everything = "\n".join("\n".join(look) for look in panels)
    assert re.search(r"^(target replica|target) 0 .*running +\d+ % +\d+ %", everything, re.MULTILINE)
    assert "eta 0:0" in everything
    assert "tokens/s" in everything
    # Above the panel every line stands once, and the last picture stays.
    whole = terminal.read(scrolled=True)
    joined = "".join(whole) if width < 60 else "\n".join(whole)
    for steps in (20, 40, 60):
        assert joined.count(f"held out after step {steps}: loss") == 1
    assert len([line for line in whole if line.startswith("step 60/60")]) == 1


def test_in_a_file_there_are_lines_of_words_and_values(settings: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", str(settings)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  step ")]
    assert lines[-1][1] == "60/60"
    for words in lines:
        slots = ["slot-1", "slot-2", "slot-3"]  # of blocks of 4
        said = ["step", "epoch", "loss", "accept", *slots, "lr", "norm", "tokens/s", "blocks/s", "eta"]
        assert words[::2] == said
    assert done.stdout.count("target-replica-0 busy ") >= 1
