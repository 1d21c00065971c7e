"""The fast path of a plain decoder: real tokens only, fused products, taps written where the drafter reads them.

Samples lie end to end, padded to a whole number of tiles and not to one another. Every layer is two functions of
tensors, before attention and behind it (see layers), with attention over all samples between them. Compiled, they are
compiled once for all layers and for any number of tokens. The two products that end in the residual stream add to it
themselves, outside of what is compiled; only in fp8 products cannot add, and what is compiled does.

Other kernels round otherwise than transformers' own: features differ by about as much as the format's rounding. What
lies beside a sample changes its features by no more than that: a token is computed from its own sample alone, but torch
chooses the kernels of products, and attention how it splits its sums, by how many tokens there are.

Shapes: T real tokens, P tokens with padding, H width, E head width, D = m * H.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.blocks import context_positions
from paceline.records import TokenBatch
from paceline.runtime.compiling import OneShape, own_copy
from paceline.target.layers import Weights, enter, leave, plain_layers, quantize_layers, widen
from paceline.target.products import add_product_
from paceline.target.stages import Sent, Stages, sent
from paceline.target.varlen import KERNELS, Ends, kernel_for, samples_apart

_TILE = 128  # tokens: what products are computed in, so that padding to it costs no more than their own


class FastTrunk:
    """A plain decoder up to its deepest tap, over real tokens only."""

    def __init__(self, trunk: Any, taps: Sequence[int], stages: Stages | None = None) -> None:
        """Take over the weights of a decoder that `why_not_plain` has nothing against; see plain_layers. Its layers are
        on one device or on those of `stages`."""
        self._trunk, self._taps, self._stages = trunk, tuple(taps), stages
        self._layers = plain_layers(trunk)
        weight = trunk.embed_tokens.weight
        self._device, self._dtype, self._width = weight.device, weight.dtype, weight.shape[1]
        windows, head_dim = any(self._layers.windows), self._layers.shape.head_dim
        devices = stages.devices if stages else (weight.device,)
        self._last = devices[-1]
        kernels = {kernel_for(device, weight.dtype, head_dim, windows=windows) for device in devices}
        self.kernel = min(kernels, key=KERNELS.index)  # that all devices have
        self._is_compiled = self._in_fp8 = False
        self._enter: list[Callable[..., Any]] = [enter] * len(devices)  # of each stage
        self._behind: list[Callable[..., Any]] = [widen] * len(devices)  # attention; in fp8 `leave`

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        return sum(part.recompiles for part in (*self._enter, *self._behind) if isinstance(part, OneShape))

    def quantize(self) -> None:
        """Put the products in fp8, before anything is compiled; the decoder's own modules work no more."""
        quantize_layers(self._trunk, self._layers)
        self._in_fp8, self._behind = True, [leave] * len(self._behind)

    def compile(self, alarm: Callable[[str], None], who: str = "") -> None:
        """Let what follows run compiled, apart from others in this process that are not `who`.

        The next `features` compiles, which must happen alone (see Gate).
        """
        self._is_compiled = True
        behind = leave if self._in_fp8 else widen
        for stage in range(len(self._enter)):  # each of which has one thread at a time
            name = f"{who}, stage {stage}" if self._stages else who
            self._enter[stage] = OneShape(own_copy(enter, name), instead=enter, alarm=alarm)
            self._behind[stage] = OneShape(own_copy(behind, name), instead=behind, alarm=alarm)

    @torch.no_grad()
    def features(self, tokens: TokenBatch, room_TD: Float[Tensor, "T D"] | None = None) -> Float[Tensor, "T D"]:
        """Return a micro-batch's features, samples end to end, in `room_TD` if it is given, rounded to its format.

        Whatever the micro-batch's layout, only real tokens are computed.
        """
        # Not in inference mode: torch.compile does not take the tensors that are made there.
        with self._stages.through() if self._stages else nullcontext():
            return self._computed(tokens, room_TD)

    def _computed(self, tokens: TokenBatch, room_TD: Tensor | None) -> Tensor:
        layers, used, stage = self._layers, tokens.num_tokens, 0
        ids_P, positions_P, ends = self._laid_out(tokens)
        x_PH = self._trunk.embed_tokens(ids_P)
        cos_PE, sin_PE = (part[0] for part in self._trunk.rotary_emb(x_PH[None], position_ids=positions_P[None]))
        features_TD = room_TD
        if features_TD is None:
            features_TD = x_PH.new_empty(used, len(self._taps) * self._width, device=self._last)
        taken: list[Sent] = []
        filled = 0  # columns
        for index, (weights, window) in enumerate(zip(layers.weights, layers.windows, strict=True)):
            if self._stages:
                stage = self._stages.stage_of(index)
                x_PH, cos_PE, sin_PE, edges = self._stages.carry(stage, x_PH, cos_PE, sin_PE, ends.edges)
                ends = Ends(ends.lengths, edges)
            q, k, v = self._enter[stage](
                self._counted(x_PH), weights, self._counted(cos_PE), self._counted(sin_PE), layers.shape
            )
            read = samples_apart(q, k, v, ends, window=window, scale=layers.shape.scale, kernel=self.kernel)
            del q, k, v  # before the MLP, which needs the room
            x_PH = self._left(stage, x_PH, read.flatten(1), weights)
            if index in self._taps:
                last = stage == len(self._enter) - 1
                # What is taken later than now is a copy: the next layer adds to x itself.
                taken.append(sent(x_PH[:used] if last else x_PH[:used].clone(), self._last))
                while taken and last:  # from now on what was sent before is waited for
                    features_TD[:, filled : filled + self._width].copy_(taken.pop(0).arrived())
                    filled += self._width
        return features_TD

    def _left(self, stage: int, x_PH: Tensor, read_PX: Tensor, weights: Weights) -> Tensor:
        """Return a layer's output of its input, which is overwritten, and of what attention read."""
        behind, shape = self._behind[stage], self._layers.shape
        if self._in_fp8:
            return cast(Tensor, behind(self._counted(x_PH), self._counted(read_PX), weights, shape))
        x_PH = add_product_(x_PH, read_PX, weights.out)
        return add_product_(x_PH, behind(self._counted(x_PH), weights, shape), weights.down)

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
