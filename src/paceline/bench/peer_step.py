"""A peer's step, measured in a process of its own like ours: forward, loss, backward, clipping, AdamW."""

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from paceline.bench.features import feature_batches
from paceline.bench.peers import TESTED, PeerName, peer_batch
from paceline.bench.shapes import Shape
from paceline.bench.specforge_peer import VARIANTS, SpecForge
from paceline.bench.speculators_peer import Speculators
from paceline.bench.timing import gib, round_times, step_figures, wait
from paceline.bench.weights import random_drafter, random_ends
from paceline.bench.work import CLIP, RATE, Work, asked
from paceline.records import RunError

WARM_STEPS = 3  # compile, and let kernels that are chosen by trial be chosen


class PeerOptimizer:
    """Fused AdamW over a peer's weights, or over float32 copies of them; gradients are clipped by their norm first.

    Peers' own optimizers do the same with more passes over memory; this one is for all of them.
    """

    def __init__(self, weights: list[nn.Parameter], *, master: bool, clip: bool) -> None:
        self._weights, self._clip = weights, clip
        self._stepped = [nn.Parameter(w.detach().float()) for w in weights] if master else weights
        self._adamw = torch.optim.AdamW(self._stepped, lr=RATE, fused=True)

    def step(self) -> None:
        """Clip, step, and forget gradients."""
        if self._clip:
            nn.utils.clip_grad_norm_(self._weights, CLIP, foreach=True)
        if self._stepped is not self._weights:
            for weight, copy in zip(self._weights, self._stepped, strict=True):
                copy.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._stepped is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self._weights), list[Tensor](self._stepped))


def peer_variants(name: PeerName) -> list[str]:
    """Return the settings that a peer is measured with, as rows call them."""
    return list(VARIANTS) if name == "specforge" else ["defaults"]


def measure_peer(work: Work, name: PeerName, variant: str) -> dict[str, Any]:
    """Return a row of figures; run it in a process of its own.

    Raises:
        RunError: the peer's step failed; its cause is told.
    """
    try:
        return _measure(work, name, variant)
    except Exception as error:
        raise RunError(
            f"The step of {name} ({variant}) failed: {type(error).__name__}: {str(error) or '<empty message>'}"
        ) from error


def _measure(work: Work, name: PeerName, variant: str) -> dict[str, Any]:
    device = torch.device(work.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    peer = _build(name, variant, work.shape, device, dtype)
    master = work.optimizer_state == "fp32-master" and dtype != torch.float32
    optimizer = PeerOptimizer(peer.trained, master=master, clip=work.clip)
    made = feature_batches(work.shape, device, dtype)
    batches = [peer_batch(batch, device) for batch in made]

    def one(index: int) -> Tensor:
        loss = peer.loss(batches[index])
        loss.backward()
        optimizer.step()
        return loss.detach()

    first = one(0).item()
    for _ in range(WARM_STEPS - 1):
        one(0)
    wait(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)  # kernels that are chosen by trial take what no later step does
    times, count = round_times(one, len(batches), work.steps, device)
    return {
        "who": f"{name} {TESTED[name]}",
        "policy": variant,
        "shape": work.shape.name,
        "peak_gib": gib(torch.cuda.max_memory_allocated(device)) if cuda else None,
        **step_figures(work.shape, made, statistics.median(times), device),
        "ratio_to_best_peer": None,
        "recompiles": None,
        "first_loss": round(first, 5),
        "batches": len(batches),
        "steps": count,
        **asked(work, ours=False),
    }


def _build(
    name: PeerName, variant: str, shape: Shape, device: torch.device, dtype: torch.dtype
) -> SpecForge | Speculators:
    drafter, ends = random_drafter(shape, device), random_ends(shape, device, dtype)
    if name == "specforge":
        return SpecForge(shape, drafter, ends, dtype, VARIANTS[variant])
    return Speculators(shape, drafter, ends, dtype)
