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
from paceline.drafter.fused_head import FrozenHead8, fused_head_loss

_TILE = 128  # rows of a tile of the products: a chunk of whole ones wastes none

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
    head: Tensor | FrozenHead8,
    labels_N: Int[Tensor, " N"],
    weights_N: Float[Tensor, " N"],
    *,
    logits_bytes: int,
    cap: float = 0.0,
    chunk: Callable[..., HeadLoss] = head_loss,
) -> tuple[Float[Tensor, ""], Bool[Tensor, " N"], Float[Tensor, "N H"]]:
    """Return what `head_loss` does, for any number of rows: at most `logits_bytes` of logits exist at a time.

    `chunk` is `head_loss`, its compiled form, or `fused_head_loss`, which a head in fp8 needs; it sees chunks of one
    size wherever a size divides N.
    """
    rows = chunk_rows(len(hidden_NH), max(1, logits_bytes // _row_bytes(head, fused=chunk is fused_head_loss)))
    losses, hits_N = [], torch.empty_like(labels_N, dtype=torch.bool)
    grad_NH = torch.empty_like(hidden_NH)
    for at in range(0, len(hidden_NH), rows):
        part = slice(at, at + rows)
        loss, hits_N[part], grad_NH[part] = chunk(hidden_NH[part], head, labels_N[part], weights_N[part], cap)
        losses.append(loss)
    return torch.stack(losses).sum(), hits_N, grad_NH


def _row_bytes(head: Tensor | FrozenHead8, *, fused: bool) -> int:
    """Return the bytes of a row of logits: as numbers of the softmax, or where these are never written, as they come.

    In fp8 they come in bfloat16, and their gradient lies beside them.
    """
    if isinstance(head, FrozenHead8):
        return 3 * len(head.weight_WH)
    return len(head) * (head.dtype if fused else torch.promote_types(head.dtype, torch.float32)).itemsize


def chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk: as many as may be, but a divisor of all if one is at least half as large.

    Of several divisors it is one of whole tiles, if there is one, and so is what divides nothing.
    """
    if rows <= most:
        return rows
    divisors = [size for size in range(most, (most - 1) // 2, -1) if rows % size == 0]
    whole = [size for size in divisors if size % _TILE == 0]
    return next(iter(whole + divisors), most // _TILE * _TILE or most)
