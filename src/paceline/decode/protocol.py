"""What decoding needs of a target; `paceline.target.model.DecodingTarget` has it."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class RowStore(Protocol):
    """A key/value cache of independent rows."""

    def move(self, source: int, destination: int) -> None:
        """Copy row `source` onto row `destination`."""


@runtime_checkable
class Target(Protocol):
    """A language model with a row cache and tapped layers; shapes as in DecodingTarget."""

    device: torch.device
    stop_ids: tuple[int, ...]

    def new_cache(self, rows: int, slots: int) -> Any:
        """Return an empty RowStore."""

    def forward(
        self,
        ids_RT: Tensor,
        positions_RT: Tensor,
        cache: Any,
        *,
        first_row: int,
        reach: int,
        logits_at: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits and features of the new tokens."""
