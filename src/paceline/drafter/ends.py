"""The target's embedding and head, which the drafter uses and never trains."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FrozenEnds:
    """What turns tokens into the drafter's input and its output into logits; one tensor where the target ties them."""

    embed_VH: Tensor
    head_VH: Tensor

    def embed(self, ids: Int[Tensor, "G Q"]) -> Float[Tensor, "G Q H"]:
        """Return raw embedding rows."""
        return F.embedding(ids, self.embed_VH)

    def logits(self, hidden: Float[Tensor, "*G H"]) -> Float[Tensor, "*G V"]:
        """Return logits in the head's dtype. The target's final norm is not applied: the drafter has its own."""
        return F.linear(hidden.to(self.head_VH.dtype), self.head_VH)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FrozenEnds":
        """Return the ends on a device in a dtype; a tied tensor stays one tensor."""
        embed_VH = self.embed_VH.to(device=device, dtype=dtype)
        tied = self.head_VH is self.embed_VH
        return FrozenEnds(embed_VH, embed_VH if tied else self.head_VH.to(device=device, dtype=dtype))
