"""The `dflash` package's own decoding loop, for a bench: the same target weights, a drafter that was exported to it.

The package is no dependency: `pip install --no-deps dflash` brings it.
"""

import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline.checkpoint.drafter import DrafterMeta
from paceline.drafter.model import Drafter
from paceline.formats.zlab import export_zlab
from paceline.records import Completion


def peer_version() -> str | None:
    """Return the version of dflash that can be imported here, or None."""
    try:
        import dflash.model  # noqa: F401
    except ImportError:
        return None
    try:
        return version("dflash")
    except PackageNotFoundError:
        return "unknown"


class DflashLoop:
    """The peer's loop over a stock target and an exported drafter."""

    def __init__(self, target: Any, drafter: Drafter, meta: DrafterMeta) -> None:
        """Export the drafter and load it with the peer's class."""
        import dflash.model

        self._module: Any = dflash.model
        if target.device.type != "cuda":  # its statistics wait for a CUDA device before they read a clock
            self._module._cuda_time = time.perf_counter
        with TemporaryDirectory() as folder:
            place = Path(folder) / "drafter"
            export_zlab(drafter, meta, place, dtype=target.dtype, card="", max_shard_bytes=2**40)
            loaded = dflash.model.DFlashDraftModel.from_pretrained(
                place, dtype=target.dtype, attn_implementation="sdpa"
            )
        self._drafter, self._target = loaded.to(target.device).eval(), target

    def complete(self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int], *, plain: bool) -> Completion:
        """Return the greedy completion; plain is the same loop with blocks of one token."""
        done = self._module.dflash_generate(
            self._drafter,
            self._target,
            torch.tensor([list(prompt)], device=self._target.device),
            tokens,
            list(stop_ids) or None,
            block_size=1 if plain else None,
            return_stats=True,
        )
        new = tuple(done.output_ids[0, len(prompt) :].tolist())
        finish = "stop" if new[-1] in stop_ids else "length"
        return Completion(tuple(prompt), new, finish, () if plain else tuple(done.acceptance_lengths))
