"""The optimizers and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from paceline.config import TrainSettings


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then a cosine down to min_lr_ratio."""
    warmup = max(1, round(settings.warmup_share * total_steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    low = settings.min_lr_ratio
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def make_optimizers(drafter: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the drafter's weights: AdamW for all, or Muon for matrices and AdamW for norms.

    Weight decay applies to matrices only; norms keep their scale. Muon's update is scaled to AdamW's size (arXiv
    2502.16982), so train.lr means the same for both.
    """
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    norms = [p for p in drafter.parameters() if p.ndim <= 1]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    kept = {"params": norms, "weight_decay": 0.0}
    if settings.optimizer == "adamw":
        return [_adamw([decayed, kept], settings)]
    muon = torch.optim.Muon([decayed], momentum=settings.betas[1], nesterov=True, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw([kept], settings)]


def _adamw(groups: list[dict[str, object]], settings: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=settings.betas, fused=True)


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Give every parameter group the rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
