"""The optimizers as they run inside a CUDA graph, and the learning rate as a pure function of the step.

Nothing here reads a device value on the host: the rate and whether a step applies are tensors. Optimizers are fused or
written out; torch's foreach ones ask `is_compiling()`, which is true in every thread while one compiles (torch 2.13).

Shapes: P entries of all weights that AdamW updates, S of the matrices, which may have a copy in another format, R
blocks of I = 256 entries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from paceline.config import TrainSettings
from paceline.runtime.compiling import OneShape
from paceline.train.eight_bit import Maps, maps, plain, quantized
from paceline.train.flat import Flat
from paceline.train.moments import Moments

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
    Those of matrices may have 8 bits or lie in host memory (see `moments`): that pass, compiled or not, does it then.
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
        # Torch's own knows moments of the weights' format that lie beside them.
        special = settings.moments != "float32" or settings.offload != "off"
        self.muon: Muon | None = None
        if settings.optimizer == "muon":
            self.muon = Muon(matrices, momentum=settings.betas[1], weight_decay=settings.weight_decay)
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}] * (self.muon is None and not special)
        groups.append({"params": norms, "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(
            groups, lr=self.lr, betas=settings.betas, fused=True, capturable=device.type == "cuda"
        )
        # What a gradient scaler sets: fused AdamW then divides and skips by itself, its step count included.
        self.adamw.found_inf = self.skip  # type: ignore[attr-defined]
        self.adamw.grad_scale = self.divisor  # type: ignore[attr-defined]
        # Moments as flat as the weights, and a count for each weight, which checkpoints have.
        S, P = flat.matrix_entries, len(flat.weights_P)
        updated = [name for name, p in flat.parameters.items() if p.ndim <= 1 or not self.muon]
        self._steps = torch.zeros(len(updated), dtype=torch.float32, device=device)
        self._counts = dict(zip(updated, self._steps, strict=True))

        def called(run: Callable[..., None]) -> Callable[..., None]:
            return OneShape(run, instead=run, alarm=alarm) if one_pass else run

        plain = called(adamw_pass)
        self._regions = [_Region(S, P, 0.0, Moments(flat.weights_P[S:], "float32", offload=False), plain)]
        if self.muon is None:
            offload = settings.offload == "moments"
            moments = Moments(flat.weights_P[:S], settings.moments, offload=offload, compiled=one_pass)
            eight = settings.moments == "8bit"
            run, more = (called(adamw_pass_8bit), (maps(device),)) if eight else (plain, ())
            self._regions.insert(0, _Region(0, S, settings.weight_decay, moments, run, more))
        self._in_passes = one_pass or special
        self._fill_torchs_own()

    def _fill_torchs_own(self) -> None:
        """Let torch's own optimizer work on these moments and counts."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._flat.parameters.items()}
        kept = self._adamw_state()
        for parameter in (p for group in self.adamw.param_groups for p in group["params"]):
            kinds = ("step", "exp_avg", "exp_avg_sq")
            self.adamw.state[parameter] = {kind: kept[f"{kind}.{names[parameter]}"] for kind in kinds}

    def _adamw_state(self) -> dict[str, Tensor]:
        kept = {f"step.{name}": count for name, count in self._counts.items()}
        for region in self._regions:
            kept |= region.moments.state(self._flat, region.start)
        return kept

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        runs = {region.run for region in self._regions}
        return sum(run.recompiles for run in runs if isinstance(run, OneShape))

    def state(self) -> dict[str, Tensor]:
        """Return what a step leaves for the next, as `kind.weight`: live tensors, some in host memory."""
        kept = self._adamw_state()
        if self.muon is not None:
            names = [name for name, p in self._flat.parameters.items() if p.ndim > 1]
            kept |= {f"momentum.{name}": buffer for name, buffer in zip(names, self.muon.buffers, strict=True)}
        return kept

    def wait(self) -> None:
        """Wait until host memory holds what the steps so far have left there."""
        for region in self._regions:
            region.moments.wait()

    def step(self) -> None:
        """Apply the gradients at rate `lr`, unless `skip` is 1."""
        if self.muon is not None:
            self.muon.step(self.lr, self.skip, self.divisor)
        if self._in_passes:
            self._run_passes()
        else:
            self.adamw.step()
        if not self._in_passes or self.muon is not None:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copy up to date with the weights."""
        if self._copy_S is not None:
            self._copy_S.copy_(self._flat.weights_P[: len(self._copy_S)])

    @torch.no_grad()
    def _run_passes(self) -> None:
        first, second = self._betas
        self._steps += 1 - self.skip
        # In float64, which near 1 they need, and out of the pass, which would work them out for every entry.
        count, lr = self._steps[0].double(), self.lr.double()
        rate = (lr / (1 - first**count)).float()
        root = (1 - second**count).sqrt().float()
        for region in self._regions:
            scalars = (self.skip, self.divisor, rate, root, (1 - lr * region.decay).float())
            copy_P = self._copy_S if region.start == 0 else None
            seen = region.moments.seen
            for place, moments in region.moments.each():
                there = slice(region.start + place.start, region.start + place.stop)
                region.run(
                    seen(self._flat.weights_P[there]),
                    seen(self._flat.gradients_P[there]),
                    moments,
                    None if copy_P is None else seen(copy_P[there]),
                    scalars,
                    self._betas,
                    *region.more,
                )


@dataclass(frozen=True, slots=True, eq=False)
class _Region:
    """Weights from one entry to another that are updated alike: `run` is a pass, `more` what only that one takes."""

    start: int
    stop: int
    decay: float
    moments: Moments
    run: Callable[..., None]
    more: tuple[object, ...] = ()


Scalars = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def adamw_pass(
    weights_P: Float[Tensor, " P"],
    gradients_P: Float[Tensor, " P"],
    moments: tuple[Float[Tensor, " P"], Float[Tensor, " P"]],
    copy_P: Float[Tensor, " P"] | None,
    scalars: Scalars,
    betas: tuple[float, float],
) -> None:
    """Update weights and moments in place as torch's AdamW does, and write the weights' copy: one pass over memory.

    `moments` are mean and square. `scalars` are whether to skip, what gradients are divided by, the rate over the
    mean's bias correction, the root of the square's, and what weight decay leaves of a weight. Computed in float32 or
    wider, whatever the formats are.
    """
    wide = torch.promote_types(weights_P.dtype, torch.float32)
    old_mean, old_square = (moment.to(wide) for moment in moments)
    apply, mean, square = _updated(weights_P, gradients_P, old_mean, old_square, copy_P, scalars, betas)
    moments[0].copy_(torch.where(apply, mean, old_mean))
    moments[1].copy_(torch.where(apply, square, old_square))


def adamw_pass_8bit(
    weights_RI: Float[Tensor, "R I"],
    gradients_RI: Float[Tensor, "R I"],
    moments: tuple[UInt8[Tensor, "R I"], Float[Tensor, " R"], UInt8[Tensor, "R I"], Float[Tensor, " R"]],
    copy_RI: Float[Tensor, "R I"] | None,
    scalars: Scalars,
    betas: tuple[float, float],
    maps: Maps,
) -> None:
    """Do what `adamw_pass` does over moments of 8 bits (see `eight_bit`): codes and scales of mean and square.

    A weight is updated by its moments as they are before they are stored. Everything comes a block a row: of views made
    in here the compiler does not see that a block's largest moment and what else is done with it are one pass, and
    writes both moments of all entries in between, in float32.
    """
    wide = torch.promote_types(weights_RI.dtype, torch.float32)
    old_mean, old_square = (plain(moments[at], moments[at + 1], maps[at]).to(wide) for at in (0, 2))
    apply, mean, square = _updated(weights_RI, gradients_RI, old_mean, old_square, copy_RI, scalars, betas)
    for at, moment in ((0, mean), (2, square)):
        codes_RI, scales_R = quantized(moment.float(), maps[at + 1])
        moments[at].copy_(torch.where(apply, codes_RI, moments[at]))
        moments[at + 1].copy_(torch.where(apply, scales_R, moments[at + 1]))


def _updated(
    weights: Tensor,
    gradients: Tensor,
    old_mean: Tensor,
    old_square: Tensor,
    copy: Tensor | None,
    scalars: Scalars,
    betas: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Update weights and their copy; return whether that was to be done, and the new moments. All have one shape."""
    skip, divisor, rate, root, kept = scalars
    old = weights.to(old_mean.dtype)
    gradient = gradients.to(old_mean.dtype) / divisor
    mean = torch.lerp(old_mean, gradient, 1 - betas[0])
    square = old_square * betas[1] + gradient * gradient * (1 - betas[1])
    updated = old * kept - rate * mean / (square.sqrt() / root + _ADAM_EPS)
    apply = skip == 0
    new = torch.where(apply, updated, old).to(weights.dtype)
    weights.copy_(new)
    if copy is not None:
        copy.copy_(new)
    return apply, mean, square


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
