"""What decoding needs of a target; `paceline.target.model.DecodingTarget` has it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class RowStore(Protocol):
    """A key/value cache of independent rows."""

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows onto other rows."""


@runtime_checkable
class Target(Protocol):
    """A language model with a row cache and tapped layers; shapes as in DecodingTarget."""

    device: torch.device
    stop_ids: tuple[int, ...]
    max_positions: int
    vocab_size: int

    def new_cache(self, rows: int, slots: int) -> Any:
        """Return an empty RowStore."""

    def prefill(self, ids_RT: Tensor, last_R: Tensor, cache: Any, rows_R: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read right-padded prompts into rows; return the logits at each one's last token, and all features."""

    def forward(
        self,
        ids_RT: Tensor,
        positions_RT: Tensor,
        cache: Any,
        *,
        first_row: int,
        reach: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of the new tokens."""
