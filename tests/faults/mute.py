"""Lets standard output be a full disk from a step on, and breaks a step behind it, which the drafter's thread tells."""

import os
import runpy
from pathlib import Path
from typing import Any

from paceline.train.step import DrafterStep


def inject(at: int) -> None:
    """Break standard output at the update number `at`, and the next step."""
    runpy.run_path(str(Path(__file__).with_name("poison.py")))["inject"](steps={at + 1: "nan"})
    update, calls = DrafterStep.update, iter(range(10**9))

    def breaking(self: DrafterStep, *args: Any) -> None:
        if next(calls) == at:
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        update(self, *args)

    DrafterStep.update = breaking
