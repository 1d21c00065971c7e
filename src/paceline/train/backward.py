"""Forward and backward of the drafter's twin: of all layers at once, or a layer at a time.

A layer at a time, only the input stays of a layer's forward; backward runs it again, and its weights' gradients are
taken over before those of the layer in front of it are made. The last layer is not run again: its backward comes first,
so what it keeps would be there anyway. Layers between the first and the last are alike: one compiled function serves
them, in forward and in backward, which therefore compute the same bits. The context is kept, which is little.

Shapes: C context slots, D = m * H feature width, U distinct inputs of slots, N slots with a loss, H width.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline.drafter.attention import Visibility
from paceline.drafter.joined import Joined, JoinedLayer, Turns

# Weights and their gradients. Who takes them empties the list, so that they are gone while the next are made.
Part = tuple[list[nn.Parameter], list[Tensor]]
Backward = Callable[[Float[Tensor, "N H"]], Iterator[Part]]
Compiled = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def at_once(hidden_NH: Float[Tensor, "N H"], leaves: list[nn.Parameter]) -> Backward:
    """Return the backward of hidden states that one graph made of all leaves."""

    def backward(grad_NH: Tensor) -> Iterator[Part]:
        yield leaves, list(torch.autograd.grad(hidden_NH, leaves, grad_NH))

    return backward


def collect(part: Part, summed: Mapping[nn.Parameter, Tensor], *, first: bool) -> None:
    """Add gradients to the sums of their weights, or write them over these if they are the `first`, and let them go."""
    leaves, gradients = part
    run = torch._foreach_copy_ if first else torch._foreach_add_
    for matrices in (True, False):  # of one format each: torch is slow with a mixture
        places = [at for at, leaf in enumerate(leaves) if (leaf.ndim > 1) is matrices]
        if places:
            run([summed[leaves[at]] for at in places], [gradients[at] for at in places])
    gradients.clear()


class ByLayers:
    """The twin, a layer at a time; `blocks` is (A, B), and `compiled` makes of each function what is called."""

    def __init__(self, twin: Joined, blocks: tuple[int, int], compiled: Compiled) -> None:
        self._twin = twin
        self._layers = [layer for layer in twin.layers if isinstance(layer, JoinedLayer)]
        L = len(self._layers)
        kinds = [(at == 0, at == L - 1) for at in range(L)]
        functions = {kind: compiled(_layer(twin, blocks, *kind)) for kind in dict.fromkeys(kinds)}
        self._through, self._context = [functions[kind] for kind in kinds], compiled(twin.context)

    def forward(
        self,
        features_CD: Float[Tensor, "C D"],
        embeds_UH: Float[Tensor, "U H"],
        turns: Turns,
        visibility: Visibility,
    ) -> tuple[Float[Tensor, "N H"], Backward]:
        """Return the hidden states, and what makes the gradients of all leaves of theirs, once."""
        context_CH = self._context(features_CD)
        seen_CH = context_CH.detach().requires_grad_()
        given = [embeds_UH]  # to each layer
        for through, layer in zip(self._through[:-1], self._layers, strict=False):
            given.append(through(layer, seen_CH, given[-1], turns, visibility).detach().requires_grad_())
        hidden_NH = self._through[-1](self._layers[-1], seen_CH, given[-1], turns, visibility)
        made = [hidden_NH]  # of the layer whose backward is next

        def backward(grad: Tensor) -> Iterator[Part]:
            summed_CH = torch.zeros_like(seen_CH)
            for at in reversed(range(len(self._layers))):
                layer, x = self._layers[at], given.pop()
                leaves = [*layer.parameters(), *([self._twin.norm] if at == len(self._layers) - 1 else [])]
                out = made.pop() if made else self._through[at](layer, seen_CH, x, turns, visibility)
                gradients = list(torch.autograd.grad(out, [*leaves, seen_CH, *([x] if at else [])], grad))
                del out, x
                grad = gradients.pop() if at else grad
                # Added in this order, as autograd does; a part of a larger tensor, which must not stay.
                summed_CH += gradients.pop()
                yield leaves, gradients
            del grad
            leaves = [self._twin.fc, self._twin.hidden_norm]
            yield leaves, list(torch.autograd.grad(context_CH, leaves, summed_CH))

        return hidden_NH, backward


def _layer(twin: Joined, blocks: tuple[int, int], first: bool, last: bool) -> Callable[..., Tensor]:
    def through(layer: JoinedLayer, context_CH: Tensor, x: Tensor, turns: Turns, visibility: Visibility) -> Tensor:
        return twin.through(layer, context_CH, x, blocks, turns, visibility, first=first, last=last)

    return through
