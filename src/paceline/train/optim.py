"""The optimizers as they run inside a CUDA graph, and the learning rate as a pure function of the step.

Nothing here reads a device value on the host: the rate and whether a step applies are tensors. Optimizers are fused or
written out; torch's foreach ones ask `is_compiling()`, which is true in every thread while one compiles (torch 2.13).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.config import TrainSettings

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Muon (github.com/KellerJordan/Muon)
_QUINTIC_STEPS = 5
_EPS = 1e-7


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Return the rate of optimizer step `step` (from 0).

    Linear warm-up, then down to min_lr_ratio: along a cosine (`cosine`), or from where the last `decay_share` of the
    steps begins, linearly (`wsd`: warm-up, stable, decay; arXiv 2404.06395).
    """
    warmup = max(1, round(settings.warmup_share * total_steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    low = settings.min_lr_ratio
    if settings.schedule == "wsd":
        decay = max(1, round(settings.decay_share * total_steps))
        left = min(1.0, max(0.0, (total_steps - step) / decay))
        return settings.lr * (low + (1 - low) * left)
    progress = (step - warmup) / max(1, total_steps - warmup)
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


class Optimizer:
    """AdamW for all weights, or Muon for matrices and AdamW for norms, over gradients that lie in `.grad`.

    Weight decay applies to matrices only; norms keep their scale. Muon's update is scaled to AdamW's size (arXiv
    2502.16982), so train.lr means the same for both. `lr` is the rate, float32; `divisor` is what gradients are
    divided by; where `skip` is 1, a step leaves weights, moments and counts as they are, whatever the gradients hold.
    What is in `.grad` after a step is undefined.
    """

    def __init__(self, drafter: nn.Module, settings: TrainSettings) -> None:
        device = next(drafter.parameters()).device
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.skip = torch.zeros((), dtype=torch.float32, device=device)
        self.divisor = torch.ones((), dtype=torch.float32, device=device)
        matrices = [p for p in drafter.parameters() if p.ndim > 1]
        norms = [p for p in drafter.parameters() if p.ndim <= 1]
        decayed = {"params": matrices, "weight_decay": settings.weight_decay}
        kept = {"params": norms, "weight_decay": 0.0}
        self.muon: Muon | None = None
        groups = [decayed, kept]
        if settings.optimizer == "muon":
            self.muon = Muon(matrices, momentum=settings.betas[1], weight_decay=settings.weight_decay)
            groups = [kept]
        self.adamw = torch.optim.AdamW(
            groups, lr=self.lr, betas=settings.betas, fused=True, capturable=device.type == "cuda"
        )
        # What a gradient scaler sets: fused AdamW then divides and skips by itself, its step count included.
        self.adamw.found_inf = self.skip  # type: ignore[attr-defined]
        self.adamw.grad_scale = self.divisor  # type: ignore[attr-defined]

    def state(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return what a step leaves for the next, as `kind.weight`: live tensors, all there once `step` was called."""
        kept = {f"{kind}.{names[p]}": tensor for p, kinds in self.adamw.state.items() for kind, tensor in kinds.items()}
        if self.muon is not None:
            pairs = zip(self.muon.matrices, self.muon.buffers, strict=True)
            kept |= {f"momentum.{names[matrix]}": buffer for matrix, buffer in pairs}
        return kept

    def step(self) -> None:
        """Apply the gradients at rate `lr`, unless `skip` is 1."""
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(self.lr, self.skip, self.divisor)


class Muon:
    """Muon for matrices, as torch.optim.Muon with Nesterov momentum and `match_rms_adamw` computes it.

    Differs in that nothing waits for the device, matrices of one shape go through the Newton-Schulz iteration together,
    and a step can be skipped by a device flag. Source: github.com/KellerJordan/Muon; scale of arXiv 2502.16982.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], *, momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.buffers = [torch.zeros_like(matrix) for matrix in matrices]
        self.matrices = list(matrices)
        by_shape: dict[torch.Size, list[int]] = {}
        for index, matrix in enumerate(matrices):
            by_shape.setdefault(matrix.shape, []).append(index)
        self._alike = list(by_shape.values())

    @torch.no_grad()
    def step(self, lr: Float[Tensor, ""], skip: Float[Tensor, ""], divisor: Float[Tensor, ""]) -> None:
        """Apply the gradients over `divisor` at rate `lr`, unless `skip` is 1."""
        apply = skip == 0
        for indices in self._alike:
            rows, columns = self.matrices[indices[0]].shape
            scale = lr * (0.2 * math.sqrt(max(rows, columns)))
            updates = []
            for index in indices:
                summed, buffer = self.matrices[index].grad, self.buffers[index]
                assert summed is not None
                grad = summed / divisor
                moved = torch.lerp(buffer, grad, 1 - self.momentum)
                updates.append(torch.lerp(grad, moved, self.momentum))
                buffer.copy_(torch.where(apply, moved, buffer))
            for index, update in zip(indices, orthogonal(torch.stack(updates)), strict=True):
                matrix = self.matrices[index]
                new = matrix * (1 - lr * self.weight_decay) - update * scale
                matrix.copy_(torch.where(apply, new, matrix))


def orthogonal(updates_nRC: Float[Tensor, "n R C"]) -> Float[Tensor, "n R C"]:
    """Return nearly orthogonal matrices near the given ones: five steps of a quintic Newton-Schulz, in bfloat16."""
    a, b, c = _QUINTIC
    x = updates_nRC.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=_EPS)[:, None, None]
    for _ in range(_QUINTIC_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
