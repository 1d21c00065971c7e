"""Features as bytes: how far off they are, what becomes of values that are not finite, and what they take."""

import math

import pytest
import torch

from paceline.drafter import packed
from paceline.drafter.packed import broken_tokens, is_packed, pack, packed_width, room_like, unpack

T, TAPS, H = 37, 3, 24
D = TAPS * H
E4M3 = sorted(
    {sign * (2.0**-9) * m for sign in (1, -1) for m in range(8)}
    | {sign * 2.0**e * (1 + m / 8) for sign in (1, -1) for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)}
)


def features(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return features as targets have them: taps of other sizes, a few channels many times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    made_TmH = torch.randn(T, TAPS, H, generator=generator) * torch.tensor([0.02, 1.0, 40.0])[None, :, None]
    made_TmH[:, :, 5] *= 300
    return made_TmH.flatten(1).to(dtype)


def widened(bytes_TP: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    into_TD = torch.full((len(bytes_TP), D), 7.0, dtype=dtype)
    unpack(bytes_TP, into_TD)
    return into_TD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 5 * D + 1, 1 << 24])
def test_each_value_is_the_nearest_that_its_scale_has(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a plain loop: the scale is the smallest power of two by which the largest of a tap is at most 448."""
    monkeypatch.setattr(packed, "_AT_ONCE", at_once)
    given_TD = features(dtype)
    found_TD = widened(pack(given_TD, TAPS), dtype)
    for token, (given_D, found_D) in enumerate(zip(given_TD.double(), found_TD.double(), strict=True)):
        for tap in range(TAPS):
            part = slice(tap * H, (tap + 1) * H)
            scale = 2.0 ** math.ceil(math.log2(given_D[part].abs().max() / 448))
            for value, got in zip(given_D[part].tolist(), found_D[part].tolist(), strict=True):
                assert got / scale in E4M3, (token, tap)
                assert abs(value - got) == min(abs(value - scale * one) for one in E4M3), (token, tap)


def test_the_error_is_what_is_promised() -> None:
    given_TmH = features(seed=1).view(T, TAPS, H)
    found_TmH = widened(pack(given_TmH.flatten(1), TAPS)).view(T, TAPS, H)
    largest_Tm1 = given_TmH.abs().amax(-1, keepdim=True)
    bound_TmH = torch.maximum(given_TmH.abs() / 16, largest_Tm1 * 2.0**-17)
    assert ((given_TmH - found_TmH).abs() <= bound_TmH).all()
    small_TmH = torch.cat([given_TmH[..., :5], given_TmH[..., 6:]], -1)  # beside a channel that is 300 times as large
    back_TmH = torch.cat([found_TmH[..., :5], found_TmH[..., 6:]], -1)
    relative_m = (back_TmH - small_TmH).norm(dim=(0, 2)) / small_TmH.norm(dim=(0, 2))
    assert (relative_m < 0.03).all(), "taps of any size are as exact"


def test_zeros_and_what_was_widened_come_back_the_same() -> None:
    given_TD = features()
    given_TD[3] = 0
    given_TD[4, :H] = 0
    once_TP = pack(given_TD, TAPS)
    once_TD = widened(once_TP)
    assert torch.equal(once_TD[3], torch.zeros(D))
    assert torch.equal(widened(pack(once_TD, TAPS)), once_TD)
    assert torch.equal(widened(once_TP, torch.bfloat16).float(), once_TD), "bfloat16 has every value"


@pytest.mark.parametrize("bits", [0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, 0x7FFF0000, -1])
def test_what_is_not_finite_is_seen_and_stays_so(bits: int) -> None:
    """Of NaN all kinds: GPUs make one whose bits are all ones. No negative value beside it helps."""
    given_TD = features().abs()
    given_TD.view(torch.int32)[11, H + 2] = bits
    assert not torch.isfinite(given_TD[11]).all()
    bytes_TP = pack(given_TD, TAPS)
    assert broken_tokens(bytes_TP).nonzero().flatten().tolist() == [11]
    assert not torch.isfinite(widened(bytes_TP)[11, H : 2 * H]).any()
    assert torch.isfinite(widened(bytes_TP)[[*range(11), *range(12, T)]]).all()


def test_the_largest_there_are_are_finite() -> None:
    given_TD = torch.full((T, D), 1.75 * 2.0**127, dtype=torch.bfloat16)
    bytes_TP = pack(given_TD, TAPS)
    assert not broken_tokens(bytes_TP).any()
    ones_TD = torch.full((T, D), 256.0)  # whose scale is one
    assert not broken_tokens(pack(ones_TD, TAPS)).any()


def test_a_token_takes_a_byte_a_value_and_one_a_tap() -> None:
    room_TP = torch.zeros(T, D + TAPS, dtype=torch.uint8)
    assert pack(features(), TAPS, room_TP).data_ptr() == room_TP.data_ptr()
    assert torch.equal(room_TP, pack(features(), TAPS))
    assert is_packed(room_TP)
    assert not is_packed(features())
    like_TP = room_like(features(), TAPS)
    assert (like_TP.shape, like_TP.dtype, like_TP.nbytes) == (room_TP.shape, room_TP.dtype, room_TP.nbytes)
    assert like_TP.untyped_storage().nbytes() == 1
    assert packed_width(D, TAPS) == D + TAPS
