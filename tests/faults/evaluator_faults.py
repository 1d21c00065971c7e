"""Faults of the evaluator in this process (see child.py)."""

import threading
from typing import Any

import torch

from paceline.pipeline.evaluator import Evaluator
from paceline.pipeline.handover import Handover
from paceline.runtime import pulse


def inject(kind: str, at: int = -1) -> None:
    """Break the evaluation of the state after `at` steps, and let none be left out.

    `kind`: raise; hang, spin (in Python, or inside torch); none.
    """
    claim, evaluate = Handover.claim, Evaluator._evaluate

    def waiting(self: Handover, steps: int) -> bool:
        with (
            self._changed,
            pulse.waiting("the evaluator"),
        ):  # as if evaluating took no time: which states are evaluated depends on no clock
            self._changed.wait_for(lambda: not self._due(steps) or self._job is None or self._left or self._stopped)
        return claim(self, steps)

    def breaking(self: Evaluator, job: Any) -> None:
        if job.steps != at:
            evaluate(self, job)
            return
        self.doing = f"evaluating the drafter after step {job.steps}"
        if kind == "raise":
            raise RuntimeError("device lost")
        if kind == "hang":
            threading.Event().wait()
        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)

    Handover.claim, Evaluator._evaluate = waiting, breaking
