"""A micro-batch at the one shape: what a step reads, and what it is checked with.

Shapes: C context slots, A anchors, B block slots, D = m * H feature width.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Buffers:
    """One micro-batch at the one shape; slots that it does not use are masked."""

    features_CD: Tensor  # in the format that crosses the wire
    positions_C: Tensor  # int64 as all below, but for `valid_AB`
    start_A: Tensor
    anchor_A: Tensor
    position_A: Tensor
    token_A: Tensor
    labels_AB: Tensor
    valid_AB: Tensor  # bool

    @classmethod
    def empty(cls, C: int, A: int, B: int, D: int, *, wire: torch.dtype, device: torch.device) -> "Buffers":
        """Return buffers with every slot masked; `wire` is the features' format."""

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            features_CD=zeros(C, D, dtype=wire),
            positions_C=zeros(C),
            start_A=zeros(A),
            anchor_A=zeros(A),
            position_A=zeros(A),
            token_A=zeros(A),
            labels_AB=zeros(A, B),
            valid_AB=zeros(A, B, dtype=torch.bool),
        )

    def tensors(self) -> list[Tensor]:
        """Return all of them."""
        return [getattr(self, field.name) for field in fields(self)]

    def copy_(self, source: "Buffers") -> None:
        """Take over what others of the same shape hold; the tensors stay those that captured graphs read."""
        for own, other in zip(self.tensors(), source.tensors(), strict=True):
            own.copy_(other)

    def mask_(self) -> None:
        """Mask every slot."""
        for own in self.tensors():
            own.zero_()
