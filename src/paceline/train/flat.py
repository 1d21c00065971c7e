"""A module's weights and gradients, each in one buffer: matrices first, then norms.

Ranks then sum one tensor, and norm, clipping and update are one operation each. What is joined in a leaf lies end to
end, so that a leaf is a view too, and its gradient is. Leaves begin at multiples of 256 entries: vectorised kernels
want 64, and moments in 8 bits have a scale for each block of 256, which so belongs to one leaf. The entries between
leaves are zeros in weights and gradients and stay so.

Shapes: P entries of all weights, S of the matrices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ALIGNED = 256  # entries


def padded(sizes: Iterable[int]) -> int:
    """Return the entries that leaves of such sizes take in a buffer."""
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class Flat:
    """The two buffers. Parameters keep their names and become views of the first, their gradients of the second.

    `leaves` says which parameters lie end to end under which name; each is in one of them.
    """

    def __init__(self, module: nn.Module, leaves: Mapping[str, Sequence[str]]) -> None:
        parameters = dict(module.named_parameters())
        sizes = {name: sum(parameters[member].numel() for member in members) for name, members in leaves.items()}
        # Stable: otherwise in the order of the leaves.
        order = sorted(leaves, key=lambda name: parameters[leaves[name][0]].ndim <= 1)
        self._leaves = {
            name: (tuple(leaves[name]), _leaf_shape([parameters[m] for m in leaves[name]])) for name in order
        }
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._starts: dict[str, int] = {}
        end = self.matrix_entries = 0
        for name in order:
            self._starts[name] = end
            end += padded([sizes[name]])
            if len(self._leaves[name][1]) > 1:
                self.matrix_entries = end
        first = next(iter(parameters.values()))
        self.parameters = parameters
        self.weights_P: Float[Tensor, " P"] = torch.zeros(end, dtype=first.dtype, device=first.device)
        for name, view in self.named(self.weights_P).items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view
        self.gradients_P = torch.zeros_like(self.weights_P)
        for name, view in self.named(self.gradients_P).items():
            parameters[name].grad = view

    def leaves(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the leaves of a buffer that lies as the weights do, or as their matrices do, which are all then."""
        return {
            name: flat[start : start + math.prod(shape)].view(shape)
            for name, (_, shape) in self._leaves.items()
            if (start := self._starts[name]) < len(flat)
        }

    def named(self, flat: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Return the parameters' parts of a buffer that lies as the weights do from entry `first` on, to its end."""
        parts: dict[str, Tensor] = {}
        for name, (members, _) in self._leaves.items():
            at = self._starts[name] - first
            if not 0 <= at < len(flat):
                continue
            for member in members:
                shape = self._shapes[member]
                parts[member] = flat[at : at + shape.numel()].view(shape)
                at += shape.numel()
        return parts

    def blocks(self, flat: Tensor, size: int) -> dict[str, Tensor]:
        """Return the leaves' parts of a buffer that has an entry for each `size` of theirs, as `leaves` does of all."""
        return {
            name: flat[start : start - (-math.prod(shape) // size)]
            for name, (_, shape) in self._leaves.items()
            if (start := self._starts[name] // size) < len(flat)
        }


def _leaf_shape(members: Sequence[Tensor]) -> tuple[int, ...]:
    return (sum(len(member) for member in members), *members[0].shape[1:])
