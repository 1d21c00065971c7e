"""The target's embedding and head, which the drafter uses and never trains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FrozenEnds:
    """What turns tokens into the drafter's input and its output into logits; one tensor where the target ties them.

    A target that scales its embeddings or caps its logits softly has its drafter do so, too.
    """

    embed_VH: Tensor
    head_VH: Tensor
    scale: float = 1.0
    cap: float = 0.0  # 0: none

    def embed(self, ids: Int[Tensor, "G Q"]) -> Float[Tensor, "G Q H"]:
        """Return embedding rows as the target's first layer reads them: raw, or scaled where it scales them."""
        rows_GQH = F.embedding(ids, self.embed_VH)
        return rows_GQH if self.scale == 1 else rows_GQH * self.scale

    def logits(self, hidden: Float[Tensor, "*G H"]) -> Float[Tensor, "*G V"]:
        """Return logits in the head's dtype. The target's final norm is not applied: the drafter has its own."""
        return soft_cap(F.linear(hidden.to(self.head_VH.dtype), self.head_VH), self.cap)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FrozenEnds":
        """Return the ends on a device in a dtype; a tied tensor stays one tensor."""
        embed_VH = self.embed_VH.to(device=device, dtype=dtype)
        tied = self.head_VH is self.embed_VH
        head_VH = embed_VH if tied else self.head_VH.to(device=device, dtype=dtype)
        return FrozenEnds(embed_VH, head_VH, self.scale, self.cap)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return logits that come near `cap` and never pass it; 0 leaves them as they are."""
    return torch.tanh(logits / cap) * cap if cap else logits
