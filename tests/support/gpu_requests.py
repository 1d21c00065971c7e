"""Requests for an engine on a CUDA device, and their completions as a run makes them."""

import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from paceline.decode.engine import Engine
from paceline.decode.requests import Request
from paceline.records import Completion

DEVICE = torch.device("cuda:0")
VOCAB = 1000


def requests(count: int = 80) -> list[Request]:
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 300))] for _ in range(count)]
    return [Request(i, prompt, chance.randint(1, 60)) for i, prompt in enumerate(prompts)]


def complete(engine: Engine, asked: list[Request]) -> dict[int | str, Completion]:
    """As in a run: in a thread of its own."""

    def work() -> dict[int | str, Completion]:
        torch.cuda.set_device(DEVICE)
        return {r.key: c for r, c in engine.run(asked)}

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let what waits for the device raise while the block lasts."""
    with warnings.catch_warnings(action="ignore"):  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
