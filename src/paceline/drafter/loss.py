"""Weighted cross-entropy through the target's frozen head.

The head needs no gradient, so logits, loss, hits and the gradient of the hidden states come out of one pass over
chunks of rows: there is never more than one chunk of logits and nothing is computed again in backward.

Shapes: N rows (slots of all blocks), H width, V vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, labels_N: Tensor, weights_N: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(head_VH.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden_NH.device)
        # Joined at the end, not written in place: torch.compile up to 2.11 loses what is written into a saved tensor.
        best, gradients = [], []
        for at in range(0, len(hidden_NH), rows):
            part = slice(at, at + rows)
            labels_R, weights_R = labels_N[part, None], weights_N[part, None].to(wide)
            log_probs_RV = (hidden_NH[part].to(head_VH.dtype) @ head_VH.T).to(wide).log_softmax(-1)
            loss = loss - (log_probs_RV.gather(1, labels_R) * weights_R).sum()
            best.append(log_probs_RV.argmax(-1))
            grad_RV = log_probs_RV.exp_()
            grad_RV.scatter_add_(1, labels_R, torch.full_like(weights_R, -1))
            gradients.append((grad_RV.mul_(weights_R).to(head_VH.dtype) @ head_VH).to(hidden_NH.dtype))
        grad_NH, best_N = torch.cat(gradients), torch.cat(best)
        ctx.save_for_backward(grad_NH)
        ctx.mark_non_differentiable(best_N)
        return loss, best_N

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_NH,) = ctx.saved_tensors
        return grad_NH * grad_loss.to(grad_NH.dtype), None, None, None, None


def frozen_head_loss(
    hidden_NH: Float[Tensor, "N H"],
    head_VH: Float[Tensor, "V H"],
    labels_N: Int[Tensor, " N"],
    weights_N: Float[Tensor, " N"],
    *,
    logits_bytes: int,
) -> tuple[Float[Tensor, ""], Bool[Tensor, " N"]]:
    """Return the sum of weight * cross-entropy (nats) and which rows' best token is the label.

    Matrix products run in the head's dtype, the softmax in float32 or wider, and at most `logits_bytes` of logits
    exist at a time. The gradient of the sum reaches `hidden_NH` only.
    """
    row_bytes = len(head_VH) * torch.promote_types(head_VH.dtype, torch.float32).itemsize
    rows = max(1, logits_bytes // row_bytes)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        loss, best_N = _FrozenHeadLoss.apply(hidden_NH, head_VH, labels_N, weights_N, rows)
    return loss, best_N == labels_N
