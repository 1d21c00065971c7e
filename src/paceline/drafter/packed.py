"""Features as bytes: e4m3 and, for each token and tap, a power of two as its scale, of which only the exponent is kept.

A token is a row: all its values, tap after tap, and then a byte a tap. Widening is exact in any format that has e4m3's
values and the scales; what is lost is lost in packing, at most a sixteenth of a value or 2^-17 of the largest of its
tap. Values that are not finite, and those of 1.75 * 2^127 and beyond, come back as not finite with all of their token
and tap.

Shapes: T tokens, m taps, H width of the target, D = m * H feature width, P = D + m bytes of a token.
"""

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from paceline.drafter.e4m3 import E4M3, quantize_by_powers

_AT_ONCE = 1 << 24  # entries, of which some copies in float32 are there for a moment
_MANTISSA = 23  # bits of a float's, below its exponent
_BROKEN = 0xFF  # the exponent of infinity


def packed_width(features: int, taps: int) -> int:
    """Return the bytes of a token with so many features."""
    return features + taps


def is_packed(features: Tensor) -> bool:
    """Return whether features are bytes."""
    return features.dtype == torch.uint8


@torch.no_grad()
def pack(
    features_TD: Float[Tensor, "T D"], taps: int, room_TP: UInt8[Tensor, "T P"] | None = None
) -> UInt8[Tensor, "T P"]:
    """Return features as bytes, in `room_TP` if that is given."""
    T, D = features_TD.shape
    packed_TP = room_TP
    if packed_TP is None:
        packed_TP = features_TD.new_empty(T, packed_width(D, taps), dtype=torch.uint8)
    values_TD, exponents_Tm = packed_TP[:, :D].view(E4M3), packed_TP[:, D:]
    rows = max(1, _AT_ONCE // D)
    for first in range(0, T, rows):
        part = slice(first, first + rows)
        features_RH = features_TD[part].reshape(-1, D // taps)
        values_RH, scale_R1 = quantize_by_powers(features_RH)
        finite_R1 = torch.isfinite(features_RH.abs().amax(-1, keepdim=True))
        exponents_R1 = torch.where(finite_R1, scale_R1.view(torch.int32) >> _MANTISSA, _BROKEN)
        values_TD[part], exponents_Tm[part] = values_RH.view(-1, D), exponents_R1.view(-1, taps)
    return packed_TP


def put(features: Tensor, room_CD: Float[Tensor, "C D"]) -> None:
    """Copy features, as bytes or as they are, to the first of a micro-batch's slots; the others become zero."""
    used = len(features)
    if is_packed(features):
        unpack(features, room_CD[:used])
    else:
        room_CD[:used].copy_(features)
    room_CD[used:].zero_()


@torch.no_grad()
def unpack(packed_TP: UInt8[Tensor, "T P"], into_TD: Float[Tensor, "T D"]) -> None:
    """Widen features into their place, which may be on another device; nothing else is written on the way there."""
    T, D = into_TD.shape
    there_TP = packed_TP.to(into_TD.device)
    taps = there_TP.shape[1] - D
    into_TD.copy_(there_TP[:, :D].view(E4M3))
    scale_Tm = (there_TP[:, D:].int() << _MANTISSA).view(torch.float32)
    into_TD.view(T, taps, -1).mul_(scale_Tm[:, :, None].to(into_TD.dtype))


def room_like(features_CD: Float[Tensor, "C D"], taps: int) -> UInt8[Tensor, "C P"]:
    """Return what says of packed features what `features_CD` says of them as they are: place, size and format.

    It has the memory of one byte.
    """
    C, D = features_CD.shape
    return features_CD.new_empty((), dtype=torch.uint8).expand(C, packed_width(D, taps))


def broken_tokens(packed_TP: UInt8[Tensor, "T P"]) -> Bool[Tensor, " T"]:
    """Return which tokens have values that are not finite, without waiting for the device.

    No other token has a byte of that kind: as a value it would be no number, and no finite scale has this exponent.
    """
    return packed_TP.amax(dim=1) == _BROKEN
