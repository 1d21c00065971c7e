"""Breaks steps of a run in which no save is left out, and kills its process: see poison and kill_at."""

import runpy
from pathlib import Path
from typing import Any

from paceline.checkpoint.saver import Saver


def inject(steps: dict[int, str], at: tuple[str, str, int] | None = None) -> None:
    """Break `steps`; `at` is what kill_at gets."""
    folder, between = Path(__file__).parent, Saver.between_steps

    def saved(self: Saver, *args: Any, **more: Any) -> None:
        between(self, *args, **more)
        self.settle()

    Saver.between_steps = saved
    runpy.run_path(str(folder / "poison.py"))["inject"](steps)
    if at is not None:
        runpy.run_path(str(folder / "kill_at.py"))["inject"](*at)
