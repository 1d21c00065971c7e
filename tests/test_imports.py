"""The command line answers at once: neither its parsing nor settings, plans and the verb `plan` load torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import eventful, write_events

LOADED = "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)), file=sys.stderr)"


def heavy_modules(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{LOADED}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def running(*arguments: object, status: int = 0) -> str:
    return (
        f"sys.argv = {['paceline', *map(str, arguments)]!r}\n"
        "from paceline.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        f"    assert (end.code or 0) == {status}, end.code\n"
    )


@pytest.mark.parametrize(
    "module", ["paceline.cli", "paceline.config", "paceline.data.plan", "paceline.data.store", "paceline.records"]
)
def test_importing(module: str) -> None:
    assert heavy_modules(f"import {module}") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_answering(arguments: list[str]) -> None:
    assert heavy_modules(running(*arguments)) == "[]"


def test_planning(write_dataset: Callable[..., Path]) -> None:
    folder = write_dataset([([5, 6, 7, 8], 1)] * 3)
    assert heavy_modules(running("plan", folder)) == "[]"


def test_watching(tmp_path: Path) -> None:
    """Here and elsewhere."""
    (tmp_path / "events.jsonl").touch()
    for more in ([], ["--via", "env"]):
        assert heavy_modules(running("watch", tmp_path, "--once", *more, status=1)) == "[]"
    without_page = (
        running("watch", tmp_path, "--once", status=1) + "assert not {'starlette', 'uvicorn'} & set(sys.modules)"
    )
    assert heavy_modules(without_page) == "[]", "who wants no page needs no extra"


def test_reporting(tmp_path: Path) -> None:
    run = write_events(tmp_path / "run", eventful(40))
    assert heavy_modules(running("report", run)).splitlines()[-1] == "[]"


def test_refusing_settings(tmp_path: Path) -> None:
    said = heavy_modules(running("train", tmp_path / "nowhere.yaml", status=2))
    assert said.splitlines() == [
        f"error: There is no settings file {tmp_path / 'nowhere.yaml'}. Write one with `paceline init`.",
        "[]",
    ]


def test_the_check_itself() -> None:
    assert heavy_modules("import torch") == "['torch']"
