"""The fast path of a plain decoder: real tokens only, fused products, taps written where the drafter reads them.

Samples lie end to end, padded to a whole number of tiles and not to one another. Every layer is two functions of
tensors, before attention and behind it (see layers), with attention over all samples between them. Compiled, they are
compiled once for all layers and for any number of tokens.

Other kernels round otherwise than transformers' own: features differ by about as much as the format's rounding. What
lies beside a sample changes its features by no more than that: a token is computed from its own sample alone, but torch
chooses the kernels of products, and attention how it splits its sums, by how many tokens there are.

Shapes: T real tokens, P tokens with padding, H width, E head width, D = m * H.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.blocks import context_positions
from paceline.records import TokenBatch
from paceline.runtime.compiling import OneShape, own_copy
from paceline.target.layers import enter, leave, plain_layers, quantize_layers
from paceline.target.varlen import Ends, kernel_for, samples_apart

_TILE = 128  # tokens: what products are computed in, so that padding to it costs no more than their own


class FastTrunk:
    """A plain decoder up to its deepest tap, over real tokens only."""

    def __init__(self, trunk: Any, taps: Sequence[int]) -> None:
        """Take over the weights of a decoder that `why_not_plain` has nothing against; see plain_layers."""
        self._trunk, self._taps = trunk, tuple(taps)
        self._layers = plain_layers(trunk)
        weight = trunk.embed_tokens.weight
        self._device, self._dtype, self._width = weight.device, weight.dtype, weight.shape[1]
        windows = any(self._layers.windows)
        self.kernel = kernel_for(weight.device, weight.dtype, self._layers.shape.head_dim, windows=windows)
        self._is_compiled = False
        self._enter: Callable[..., Any] = enter
        self._leave: Callable[..., Any] = leave

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        return sum(part.recompiles for part in (self._enter, self._leave) if isinstance(part, OneShape))

    def quantize(self) -> None:
        """Put the products in fp8; the decoder's own modules work no more."""
        quantize_layers(self._trunk, self._layers)

    def compile(self, alarm: Callable[[str], None], who: str = "") -> None:
        """Let what follows run compiled, apart from others in this process that are not `who`.

        The next `features` compiles, which must happen alone (see Gate).
        """
        self._is_compiled = True
        self._enter = OneShape(own_copy(enter, who), instead=enter, alarm=alarm)
        self._leave = OneShape(own_copy(leave, who), instead=leave, alarm=alarm)

    @torch.no_grad()
    def features(self, tokens: TokenBatch, room_TD: Float[Tensor, "T D"] | None = None) -> Float[Tensor, "T D"]:
        """Return a micro-batch's features, samples end to end, in `room_TD` if it is given, rounded to its format.

        Whatever the micro-batch's layout, only real tokens are computed.
        """
        # Not in inference mode: torch.compile does not take the tensors that are made there.
        layers, used = self._layers, tokens.num_tokens
        ids_P, positions_P, ends = self._laid_out(tokens)
        x_PH = self._trunk.embed_tokens(ids_P)
        cos_PE, sin_PE = (part[0] for part in self._trunk.rotary_emb(x_PH[None], position_ids=positions_P[None]))
        features_TD = x_PH.new_empty(used, len(self._taps) * self._width) if room_TD is None else room_TD
        for index, (weights, window) in enumerate(zip(layers.weights, layers.windows, strict=True)):
            q, k, v = self._enter(
                self._counted(x_PH), weights, self._counted(cos_PE), self._counted(sin_PE), layers.shape
            )
            read = samples_apart(q, k, v, ends, window=window, scale=layers.shape.scale, kernel=self.kernel)
            del q, k, v  # before the MLP, which needs the room
            x_PH = cast(Tensor, self._leave(self._counted(x_PH), self._counted(read.flatten(1)), weights, layers.shape))
            if index in self._taps:
                at = self._taps.index(index) * self._width
                features_TD[:, at : at + self._width].copy_(x_PH[:used])
        return features_TD

    def _laid_out(self, tokens: TokenBatch) -> tuple[Tensor, Tensor, Ends]:
        """Return ids and positions on the device, padded with zeros, and where samples end, without waiting for it."""
        used = tokens.num_tokens
        padded = -(-used // _TILE) * _TILE
        ids_P = torch.zeros(padded, dtype=torch.int64)
        ids_P[:used] = tokens.input_ids.flatten()[tokens.places_T]
        positions_P = torch.zeros(padded, dtype=torch.int64)
        positions_P[:used] = context_positions(tokens.lengths)
        edges = torch.tensor([0, *tokens.lengths]).cumsum(0, dtype=torch.int32)
        there = tuple(self._sent(part) for part in (ids_P, positions_P, edges))
        return there[0], there[1], Ends(tokens.lengths, there[2])

    def _counted(self, tensor: Tensor) -> Tensor:
        return _any_count(tensor) if self._is_compiled else tensor

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor.to(self._device)


def _any_count(tensor: Tensor) -> Tensor:
    """Let a compiled function take any number of rows of this tensor: else each would be compiled anew."""
    torch._dynamo.mark_dynamic(tensor, 0)
    return tensor
