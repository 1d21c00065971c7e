"""The optimizers as they run inside a CUDA graph, and the learning rate as a pure function of the step.

Nothing here reads a device value on the host: the rate and whether a step applies are tensors. Optimizers are fused or
written out; torch's foreach ones ask `is_compiling()`, which is true in every thread while one compiles (torch 2.13).

Shapes: P entries of all weights that AdamW updates, S of those that have a copy in another format.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.config import TrainSettings
from paceline.runtime.compiling import OneShape
from paceline.train.flat import Flat

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Muon (github.com/KellerJordan/Muon)
_QUINTIC_STEPS = 5
_EPS = 1e-7
_ADAM_EPS = 1e-8  # torch's default


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
    """AdamW for all weights, or Muon for matrices and AdamW for norms, over the gradients of flat weights.

    Weight decay applies to matrices only; norms keep their scale. Muon's update is scaled to AdamW's size (arXiv
    2502.16982), so train.lr means the same for both. `lr` is the rate, float32; `divisor` is what gradients are
    divided by; where `skip` is 1, a step leaves weights, moments and counts as they are, whatever the gradients hold.
    What is in `.grad` after a step is undefined.

    `copy_S`, the matrices in another format, is brought up to date by every step. With `one_pass` AdamW is
    `adamw_pass`, compiled, which writes that copy as it goes; else it is torch's own. Both work on the same moments.
    """

    def __init__(
        self,
        flat: Flat,
        settings: TrainSettings,
        *,
        copy_S: Float[Tensor, " S"] | None = None,
        one_pass: bool = False,
        alarm: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._flat, self._copy_S, self._betas = flat, copy_S, settings.betas
        device = flat.weights_P.device
        self.lr = torch.zeros((), dtype=torch.float32, device=device)
        self.skip = torch.zeros((), dtype=torch.float32, device=device)
        self.divisor = torch.ones((), dtype=torch.float32, device=device)
        matrices = [p for p in flat.parameters.values() if p.ndim > 1]
        norms = [p for p in flat.parameters.values() if p.ndim <= 1]
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
        # Moments as flat as the weights, and a count for each weight, which checkpoints have.
        self._first = flat.matrix_entries if self.muon else 0
        self._mean_P = torch.zeros_like(flat.weights_P[self._first :])
        self._square_P = torch.zeros_like(self._mean_P)
        updated = [name for name, p in flat.parameters.items() if p.ndim <= 1 or not self.muon]
        self._steps = torch.zeros(len(updated), dtype=torch.float32, device=device)
        means, squares = (flat.named(moment, self._first) for moment in (self._mean_P, self._square_P))
        for name, count in zip(updated, self._steps, strict=True):
            self.adamw.state[flat.parameters[name]] = {
                "step": count, "exp_avg": means[name], "exp_avg_sq": squares[name],
            }  # fmt: skip
        # Weight decay, and what of the weights it applies to.
        self._regions = [(settings.weight_decay, slice(0, flat.matrix_entries))] * (not self.muon)
        self._regions += [(0.0, slice(flat.matrix_entries, len(flat.weights_P)))]
        self._pass = OneShape(adamw_pass, instead=adamw_pass, alarm=alarm) if one_pass else None

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        return self._pass.recompiles if self._pass else 0

    def state(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return what a step leaves for the next, as `kind.weight`: live tensors."""
        kept = {f"{kind}.{names[p]}": tensor for p, kinds in self.adamw.state.items() for kind, tensor in kinds.items()}
        if self.muon is not None:
            pairs = zip(self.muon.matrices, self.muon.buffers, strict=True)
            kept |= {f"momentum.{names[matrix]}": buffer for matrix, buffer in pairs}
        return kept

    def step(self) -> None:
        """Apply the gradients at rate `lr`, unless `skip` is 1."""
        if self.muon is not None:
            self.muon.step(self.lr, self.skip, self.divisor)
        if self._pass is None:
            self.adamw.step()
        else:
            self._one_pass(self._pass)
        if self._pass is None or self.muon is not None:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copy up to date with the weights."""
        if self._copy_S is not None:
            self._copy_S.copy_(self._flat.weights_P[: len(self._copy_S)])

    @torch.no_grad()
    def _one_pass(self, run: OneShape) -> None:
        first, second = self._betas
        self._steps += 1 - self.skip
        # In float64, which near 1 they need, and out of the pass, which would work them out for every entry.
        count, lr = self._steps[0].double(), self.lr.double()
        rate = (lr / (1 - first**count)).float()
        root = (1 - second**count).sqrt().float()
        for decay, region in self._regions:
            moments = slice(region.start - self._first, region.stop - self._first)
            run(
                self._flat.weights_P[region],
                self._flat.gradients_P[region],
                self._mean_P[moments],
                self._square_P[moments],
                self._copy_S if region.start == 0 else None,
                (self.skip, self.divisor, rate, root, (1 - lr * decay).float()),
                self._betas,
            )


def adamw_pass(
    weights_P: Float[Tensor, " P"],
    gradients_P: Float[Tensor, " P"],
    mean_P: Float[Tensor, " P"],
    square_P: Float[Tensor, " P"],
    copy_P: Float[Tensor, " P"] | None,
    scalars: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    betas: tuple[float, float],
) -> None:
    """Update weights and moments in place as torch's AdamW does, and write the weights' copy: one pass over memory.

    `scalars` are whether to skip, what gradients are divided by, the rate over the mean's bias correction, the root of
    the square's, and what weight decay leaves of a weight. Computed in float32 or wider, whatever the formats are.
    """
    skip, divisor, rate, root, kept = scalars
    wide = torch.promote_types(weights_P.dtype, torch.float32)
    old, old_mean, old_square = weights_P.to(wide), mean_P.to(wide), square_P.to(wide)
    gradient = gradients_P.to(wide) / divisor
    mean = torch.lerp(old_mean, gradient, 1 - betas[0])
    square = old_square * betas[1] + gradient * gradient * (1 - betas[1])
    new = old * kept - rate * mean / (square.sqrt() / root + _ADAM_EPS)
    apply = skip == 0
    weights = torch.where(apply, new, old).to(weights_P.dtype)
    weights_P.copy_(weights)
    mean_P.copy_(torch.where(apply, mean, old_mean))
    square_P.copy_(torch.where(apply, square, old_square))
    if copy_P is not None:
        copy_P.copy_(weights)


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
