"""AdamW's moments in 8 bits: an entry is a code, and each block of 256 in a row has a scale, its largest size.

The codes are dynamic tree quantization (Dettmers et al., arXiv 2110.02861), as in bitsandbytes and torchao: each of the
seven powers of ten below the scale has twice as many values as the next smaller one. The square has no sign, so its map
has twice as many of them. What is stored is the nearest value of the map.

Shapes: S entries, R = S / 256 blocks, I = 256 entries of a block.
"""

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

BLOCK = 256
_POWERS = 7
_LEAST = 1e-12  # a scale, so that a block of zeros is not divided by zero

# The map's values and the middles between them, of the mean (with a sign) and of the square.
Maps = tuple[Float[Tensor, "256"], Float[Tensor, "255"], Float[Tensor, "256"], Float[Tensor, "255"]]


def maps(device: torch.device) -> Maps:
    """Return both maps on a device."""
    made: list[Tensor] = []
    for signed in (True, False):
        values = dynamic_map(signed=signed)
        made += [values, (values[:-1] + values[1:]) / 2]
    mean, mean_middles, square, square_middles = (part.float().to(device) for part in made)
    return mean, mean_middles, square, square_middles


def dynamic_map(*, signed: bool) -> Float[Tensor, "256"]:
    """Return the 256 values that codes stand for, ascending, in float64."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for power in range(_POWERS):
        # As many equal parts of this power of ten, each by its middle.
        count = 2**power * (1 if signed else 2)
        size = 10.0 ** (power + 1 - _POWERS)
        middles = size * (0.1 + 0.9 * (torch.arange(count, dtype=torch.float64) + 0.5) / count)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def in_blocks(x_S: Shaped[Tensor, " S"]) -> Shaped[Tensor, "R I"]:
    """Return entries a block a row."""
    return x_S.view(-1, BLOCK)


def quantized(
    x_RI: Float[Tensor, "R I"], middles: Float[Tensor, "255"]
) -> tuple[UInt8[Tensor, "R I"], Float[Tensor, " R"]]:
    """Return codes and scales of float32 values."""
    scales_R = x_RI.abs().amax(-1).clamp_min(_LEAST)
    codes_RI = torch.bucketize(x_RI / scales_R[:, None], middles, out_int32=True, right=True)
    return codes_RI.to(torch.uint8), scales_R


def plain(
    codes_RI: UInt8[Tensor, "R I"], scales_R: Float[Tensor, " R"], values: Float[Tensor, "256"]
) -> Float[Tensor, "R I"]:
    """Return what codes and scales stand for, in float32."""
    return values[codes_RI.int()] * scales_R[:, None]
