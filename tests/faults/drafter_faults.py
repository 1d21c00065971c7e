"""Faults of drafter ranks and of the loader in this process (see child.py)."""

import threading
from typing import Any

import torch

from paceline.data import loader
from paceline.train.step import DrafterStep


def inject(kind: str, at: int, *, where: str, rank: int = 0) -> None:
    """Break a rank at its call number `at` of DrafterStep's method `where`, or the `loader` at micro-batch `at`.

    `kind`: raise; hang, spin (in Python, or inside torch).
    """
    owner, name = (loader, "build") if where == "loader" else (DrafterStep, where)
    whole, calls = getattr(owner, name), [0]

    def breaking(*args: Any, **more: Any) -> Any:
        mine = where == "loader" or threading.current_thread().name == f"drafter rank {rank}"
        calls[0] += mine
        if not mine or calls[0] != at + 1:
            return whole(*args, **more)
        if kind == "raise":
            raise RuntimeError("device lost")
        if kind == "hang":
            threading.Event().wait()
        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)

    setattr(owner, name, breaking)
