"""Weighted cross-entropy through the target's frozen head.

The head needs no gradient, so logits, loss, hits and the gradient of the hidden states come out of one pass over
chunks of rows: there is never more than one chunk of logits, and nothing of it is left to a backward.

Shapes: N rows (slots of all blocks), R rows of a chunk, H width, V vocabulary.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.drafter.ends import soft_cap

HeadLoss = tuple[Float[Tensor, ""], Bool[Tensor, " R"], Float[Tensor, "R H"]]


@torch.no_grad()
def head_loss(
    hidden_RH: Float[Tensor, "R H"],
    head_VH: Float[Tensor, "V H"],
    labels_R: Int[Tensor, " R"],
    weights_R: Float[Tensor, " R"],
    cap: float = 0.0,
) -> HeadLoss:
    """Return the sum of weight * cross-entropy (nats), which rows' best token is the label, and the sum's gradient.

    `cap` is at which the target's logits are softly capped, 0 for not at all.
    The gradient is that of `hidden_RH`. Matrix products run in the head's dtype, the softmax in float32 or wider;
    autocast is not to be on.
    """
    wide = torch.promote_types(head_VH.dtype, torch.float32)
    labels_R1, weights_R1 = labels_R[:, None], weights_R[:, None].to(wide)
    logits_RV = soft_cap((hidden_RH.to(head_VH.dtype) @ head_VH.T).to(wide), cap)
    log_probs_RV = logits_RV.log_softmax(-1)
    loss = -(log_probs_RV.gather(1, labels_R1) * weights_R1).sum()
    hits_R = log_probs_RV.argmax(-1) == labels_R
    grad_RV = log_probs_RV.exp_()
    grad_RV.scatter_add_(1, labels_R1, torch.full_like(weights_R1, -1))
    if cap:
        grad_RV.mul_(1 - (logits_RV / cap) ** 2)
    grad_RH = grad_RV.mul_(weights_R1).to(head_VH.dtype) @ head_VH
    return loss, hits_R, grad_RH.to(hidden_RH.dtype)


def frozen_head_loss(
    hidden_NH: Float[Tensor, "N H"],
    head_VH: Float[Tensor, "V H"],
    labels_N: Int[Tensor, " N"],
    weights_N: Float[Tensor, " N"],
    *,
    logits_bytes: int,
    cap: float = 0.0,
    chunk: Callable[[Tensor, Tensor, Tensor, Tensor, float], HeadLoss] = head_loss,
) -> tuple[Float[Tensor, ""], Bool[Tensor, " N"], Float[Tensor, "N H"]]:
    """Return what `head_loss` does, for any number of rows: at most `logits_bytes` of logits exist at a time.

    `chunk` is `head_loss` or its compiled form; it sees chunks of one size wherever that size divides N.
    """
    row_bytes = len(head_VH) * torch.promote_types(head_VH.dtype, torch.float32).itemsize
    rows = chunk_rows(len(hidden_NH), max(1, logits_bytes // row_bytes))
    losses, hits_N = [], torch.empty_like(labels_N, dtype=torch.bool)
    grad_NH = torch.empty_like(hidden_NH)
    for at in range(0, len(hidden_NH), rows):
        part = slice(at, at + rows)
        loss, hits_N[part], grad_NH[part] = chunk(hidden_NH[part], head_VH, labels_N[part], weights_N[part], cap)
        losses.append(loss)
    return torch.stack(losses).sum(), hits_N, grad_NH


def chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk: as many as may be, but a divisor of all if one is at least half as large."""
    most = min(rows, most)
    return next((size for size in range(most, (most - 1) // 2, -1) if rows % size == 0), most)
