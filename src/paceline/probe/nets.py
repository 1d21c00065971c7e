"""The small network that probes compile and capture, and how two runs of it are compared.

Shapes: N rows, D width.
"""

import math
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.probe.finding import Bench

ROWS = 16
CLOSE = 1e-3  # largest difference between two float32 runs, relative to the largest value

Forward = Callable[[Tensor], tuple[Tensor, bool]]


class Block(nn.Module):
    """Normalisation and a two-layer MLP with a residual path: what a drafter's layer does besides attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return the block's output."""
        out_ND: Tensor = x_ND + self.down(nn.functional.gelu(self.up(self.norm(x_ND))))
        return out_ND


@dataclass(frozen=True, slots=True)
class Run:
    """Loss and gradients of one forward and backward."""

    loss: Tensor
    grads: tuple[Tensor, ...]


def devices(bench: Bench) -> list[torch.device]:
    """Return the first device of every kind of GPU, or the CPU."""
    if not bench.devices:
        return [torch.device("cpu")]
    first: dict[str, torch.device] = {}
    for index in range(bench.devices):
        first.setdefault(torch.cuda.get_device_name(index), torch.device("cuda", index))
    return list(first.values())


def use(device: torch.device) -> None:
    """Make a CUDA device this thread's own: a new thread starts at device 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def make_net(device: torch.device, width: int, blocks: int = 2) -> nn.Module:
    """Return the network with weights from a generator of its own: the default one is shared by all threads."""
    net = nn.Sequential(*[Block(width) for _ in range(blocks)])
    source = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, 0.2, generator=source)
    return net.to(device)


def make_input(device: torch.device, width: int, seed: int = 0) -> Tensor:
    """Return an input of the network."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed)).to(device)


def forward_of(net: nn.Module) -> Forward:
    """Return the network's loss as a function; its second value is True only in what dynamo traced.

    Every function has a code object of its own: dynamo keeps and limits what it compiled by code object.
    """

    def forward(x_ND: Tensor) -> tuple[Tensor, bool]:
        return net(x_ND).float().square().mean(), torch.compiler.is_compiling()

    own = types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    return own


def run(net: nn.Module, forward: Forward, x_ND: Tensor) -> tuple[Run, bool]:
    """Run forward and backward; say whether compiled code ran."""
    net.zero_grad(set_to_none=True)
    loss, compiled = forward(x_ND)
    loss.backward()
    grads = tuple(p.grad.clone() for p in net.parameters() if p.grad is not None)
    return Run(loss.detach().clone(), grads), compiled


def difference(one: Run, other: Run) -> float:
    """Return the largest difference of loss and gradients, each relative to its largest value."""
    if len(one.grads) != len(other.grads):
        return float("inf")
    pairs = zip((one.loss, *one.grads), (other.loss, *other.grads), strict=True)
    apart = [((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item() for a, b in pairs]
    return max(float("inf") if math.isnan(value) else value for value in apart)


def same_bits(one: Run, other: Run) -> bool:
    """Whether loss and every gradient are equal bit for bit."""
    pairs = zip((one.loss, *one.grads), (other.loss, *other.grads), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
