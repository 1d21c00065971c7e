"""Faults of target replicas in this process (see child.py)."""

import threading
import time
from typing import Any

import torch

from paceline.target.replica import TargetReplica
from paceline.train.step import DrafterStep


def inject(kind: str, at: int, *, every: bool = False, steps_first: int = 0) -> None:
    """Break the replica that gets micro-batch `at` first; or, with `every`, all from then on.

    `kind`: raise (with `every`, in rehearsals too); nan, inf (features); hang, spin (in Python, or inside torch); slow
    (ten times, from then on); batch (raise at that micro-batch, whoever gets it). The fault waits until so many
    optimizer steps were made.
    """
    features, warm, update = TargetReplica._features, TargetReplica.warm, DrafterStep.update
    broken: list[TargetReplica] = []
    lock, steps = threading.Lock(), threading.Semaphore(0)

    def counted(self: DrafterStep, *args: Any) -> None:
        update(self, *args)
        steps.release()

    def is_hit(self: TargetReplica, seq: int) -> bool:
        with lock:
            if broken and (every or kind in ("slow", "batch")):
                return every or (self in broken if kind == "slow" else seq == at)
            if broken or seq != at:
                return False
            for _ in range(steps_first):
                assert steps.acquire(timeout=60)
            broken.append(self)
            return True

    def breaking(self: TargetReplica, tokens: Any) -> torch.Tensor:
        if not is_hit(self, tokens.seq):
            return features(self, tokens)
        if kind in ("raise", "batch"):
            raise RuntimeError("device lost")
        if kind == "hang":
            threading.Event().wait()
        while kind == "spin":
            torch.ones(500, 500) @ torch.ones(500, 500)
        began = time.monotonic()
        found = features(self, tokens)
        if kind == "slow":
            time.sleep(max(0.05, 9 * (time.monotonic() - began)))
        else:
            found = found.clone()  # what comes from inference mode takes no change elsewhere
            found[-1, -1] = float(kind)
        return found

    def rehearse(self: TargetReplica) -> dict[str, object]:
        if broken and every and kind == "raise":
            raise RuntimeError("device lost")
        return warm(self)

    TargetReplica._features, TargetReplica.warm, DrafterStep.update = breaking, rehearse, counted
