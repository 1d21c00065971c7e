"""The two models of an evaluation, and how they decode."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.checkpoint.drafter import DrafterMeta
from paceline.decode.evaluate import decode_all
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.evaluate_asked import Asking
from paceline.records import Completion
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget


@dataclass(frozen=True, slots=True)
class Decoding:
    """A target and its drafter, loaded, and how they decode."""

    target: DecodingTarget
    drafter: Drafter
    ends: FrozenEnds
    asking: Asking
    rows: int
    dtype: str
    console: Console

    def plainly(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """Return the answers of the target alone."""

        def decode() -> Iterator[tuple[int, Completion]]:
            return generate(self.target, prompts, **self._how())

        with self.console.progress("plain decoding", len(prompts)) as tick:
            return decode_all(decode, len(prompts), tick)

    def speculatively(
        self, prompts: Sequence[Sequence[int]], drafter: Drafter | None = None, what: str = "speculative decoding"
    ) -> list[Completion]:
        """Return the answers with the drafter, or with another one."""
        who = drafter or self.drafter

        def decode() -> Iterator[tuple[int, Completion]]:
            return speculate(self.target, who, self.ends, prompts, **self._how())

        with self.console.progress(what, len(prompts)) as tick:
            return decode_all(decode, len(prompts), tick)

    def _how(self) -> dict[str, Any]:
        asking = self.asking
        return {"max_new_tokens": asking.max_new_tokens, "rows": self.rows, "sampling": asking.sampling}


def load_both(
    meta: DrafterMeta,
    weights: Mapping[str, torch.Tensor],
    facts: TargetFacts,
    asking: Asking,
    rows: int,
    dtype: str,
    device: str,
    console: Console,
) -> Decoding:
    """Return the target and a drafter of these weights on a device, in one number format."""
    numbers = getattr(torch, dtype)
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, weights).to(device, numbers)
    target = DecodingTarget(facts, meta.settings.taps, dtype=numbers, device=device)
    return Decoding(target, drafter, load_ends(facts).to(device, numbers), asking, rows, dtype, console)
