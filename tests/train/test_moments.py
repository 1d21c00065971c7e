"""Moments in 8 bits against a plain loop, and those in host memory against those beside the weights."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.config import TrainSettings
from paceline.records import RunError
from paceline.train import moments as moments_module
from paceline.train.eight_bit import BLOCK, dynamic_map, in_blocks, maps, plain, quantized
from paceline.train.flat import Flat
from paceline.train.moments import Moments, moments_bytes
from paceline.train.optim import Optimizer

LR, DECAY, BETAS = 1e-2, 0.1, (0.8, 0.95)


def values_of(signed: bool) -> list[float]:
    """The map, told as the paper does: an exponent in unary, and what bits are left as equal parts of 0.1 to 1."""
    told = [0.0, 1.0]
    for zeros in range(7):
        parts = 2 ** (6 - zeros) * (1 if signed else 2)
        for part in range(parts):
            value = (0.1 + 0.9 * (part + 0.5) / parts) / 10**zeros
            told += [value, -value] if signed else [value]
    return sorted(told)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_finer_steps_where_values_are_small(signed: bool) -> None:
    assert dynamic_map(signed=signed).tolist() == pytest.approx(values_of(signed), rel=1e-12)
    assert len(set(values_of(signed))) == 256


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_nearest_values(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20 * BLOCK, generator=generator) * torch.logspace(-9, 4, 20 * BLOCK)
    x = x if signed else x.square()
    x[:BLOCK] = 0
    x[BLOCK : 2 * BLOCK] *= 1e-30  # below the smallest scale
    at = 0 if signed else 2
    made = maps(x.device)
    codes, scales = quantized(in_blocks(x), made[at + 1])
    blocks = x.double().numpy().reshape(-1, BLOCK)
    wanted = np.maximum(np.abs(blocks).max(1), 1e-12)
    assert np.allclose(scales.numpy(), wanted, rtol=1e-6)
    values = np.array(values_of(signed))
    away = np.abs(blocks[:, :, None] / wanted[:, None, None] - values).min(-1)
    again = plain(codes, scales, made[at]).double().numpy().reshape(-1, BLOCK)
    assert np.allclose(np.abs(again - blocks) / wanted[:, None], away, atol=1e-6)
    assert not plain(codes, scales, made[at])[0].any()


class Net(nn.Module):
    """Matrices with as many entries as blocks have and with others, and norms."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"q": (16, 64), "k": (9, 20), "v": (9, 20), "o": (20, 33), "norm": (20,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))


def made(**changes: Any) -> tuple[Flat, Optimizer]:
    compiled = changes.pop("compiled", False)
    tree = {"weight_decay": DECAY, "betas": BETAS} | changes
    flat = Flat(Net(), {"q": ("q",), "kv": ("k", "v"), "o": ("o",), "norm": ("norm",)})
    copy = torch.zeros(flat.matrix_entries, dtype=torch.bfloat16)
    optimizer = Optimizer(flat, TrainSettings.model_validate(tree), copy_S=copy, one_pass=compiled)
    optimizer.lr.fill_(LR)
    return flat, optimizer


def gradient(flat: Flat, step: int) -> torch.Tensor:
    """Return gradients of very different sizes, zeros where no weight is."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(len(flat.weights_P), generator=generator) * 10 ** (torch.arange(len(flat.weights_P)) % 7 - 6.0)
    there = torch.zeros(len(drawn), dtype=torch.bool)
    for part in flat.named(there).values():
        part.fill_(True)
    return drawn * there


def nearest(value: float, scale: float, values: list[float]) -> float:
    return scale * min(values, key=lambda step: abs(value / scale - step))


def test_eight_bits_are_adamw_whose_moments_are_rounded_between_steps() -> None:
    """One matrix of four blocks, an entry at a time."""
    flat, optimizer = made(moments="8bit")
    weights = flat.named(flat.weights_P)["q"]
    w = weights.flatten().double().tolist()
    m, v = [0.0] * len(w), [0.0] * len(w)
    signed, unsigned = values_of(True), values_of(False)
    for step in range(1, 4):
        flat.gradients_P.copy_(gradient(flat, step))
        g = flat.named(flat.gradients_P)["q"].flatten().double().tolist()
        for at in range(len(w)):
            m[at] = BETAS[0] * m[at] + (1 - BETAS[0]) * g[at]
            v[at] = BETAS[1] * v[at] + (1 - BETAS[1]) * g[at] ** 2
            ratio = (m[at] / (1 - BETAS[0] ** step)) / (math.sqrt(v[at] / (1 - BETAS[1] ** step)) + 1e-8)
            w[at] = w[at] * (1 - LR * DECAY) - LR * ratio
        for first in range(0, len(w), 256):
            for moment, values in ((m, signed), (v, unsigned)):
                scale = max(map(abs, moment[first : first + 256]))
                moment[first : first + 256] = [nearest(x, scale, values) for x in moment[first : first + 256]]
        optimizer.step()
    torch.testing.assert_close(weights.flatten().double(), torch.tensor(w, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    # Norms have few entries, and their moments stay as they are.
    full, ordinary = made()
    for step in range(1, 4):
        full.gradients_P.copy_(gradient(full, step))
        ordinary.step()
    assert torch.equal(full.named(full.weights_P)["norm"], flat.named(flat.weights_P)["norm"])
    assert not torch.equal(full.named(full.weights_P)["q"], weights)


def bits(flat: Flat, optimizer: Optimizer) -> list[torch.Tensor]:
    copy = optimizer._copy_S
    assert copy is not None
    return [tensor.clone() for tensor in (flat.weights_P, copy, *optimizer.state().values())]


@pytest.mark.parametrize("form", ["float32", "8bit"])
@pytest.mark.parametrize("chunk", [256, 768, 2**24])
def test_moments_in_host_memory_change_no_bit(monkeypatch: pytest.MonkeyPatch, form: str, chunk: int) -> None:
    monkeypatch.setattr(moments_module, "CHUNK", chunk)
    (flat, beside), (other, away) = made(moments=form), made(moments=form, offload="moments")
    if form == "float32":
        flat, beside = made()
        beside._in_passes = True  # instead of torch's own, whose rounding differs
    for step in range(4):
        for each, optimizer in ((flat, beside), (other, away)):
            each.gradients_P.copy_(gradient(each, step))
            optimizer.skip.fill_(step == 2)
            optimizer.step()
        assert beside.state().keys() == away.state().keys()
        assert all(torch.equal(a, b) for a, b in zip(bits(flat, beside), bits(other, away), strict=True))
    assert all(part.abs().sum() for part in away.state().values() if part.is_floating_point())


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("form", [pytest.param("float32", marks=pytest.mark.slow), "8bit"])
def test_compiled_in_chunks_they_are_the_same(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(moments_module, "CHUNK", 768)
    (flat, beside), (other, away) = (made(moments=form, offload=where, compiled=True) for where in ("off", "moments"))
    for step in range(3):
        for each, optimizer in ((flat, beside), (other, away)):
            each.gradients_P.copy_(gradient(each, step))
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(bits(flat, beside), bits(other, away), strict=True))


@pytest.mark.parametrize("offload", ["off", "moments"])
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_no_code_and_no_scale(offload: str, bad: float) -> None:
    flat, optimizer = made(moments="8bit", offload=offload)
    flat.gradients_P.copy_(gradient(flat, 0))
    optimizer.step()
    before = bits(flat, optimizer)
    flat.gradients_P.fill_(bad)
    optimizer.skip.fill_(1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(flat, optimizer), strict=True))


def test_what_is_saved_goes_by_weight_or_by_what_shares_a_block() -> None:
    kept = made(moments="8bit")[1].state()
    matrices = set[str]()
    for leaf, shape in {"q": (16, 64), "kv": (18, 20), "o": (20, 33)}.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert kept[f"{kind}_codes.{leaf}"].shape == shape
            assert kept[f"{kind}_codes.{leaf}"].dtype == torch.uint8
            assert kept[f"{kind}_scales.{leaf}"].shape == (-(-math.prod(shape) // 256),)
            matrices |= {f"{kind}_codes.{leaf}", f"{kind}_scales.{leaf}"}
    steps = {f"step.{name}" for name in ("q", "k", "v", "o", "norm")}
    assert kept.keys() == matrices | steps | {"exp_avg.norm", "exp_avg_sq.norm"}
    assert moments_bytes("8bit", 1024) == 2 * (1024 + 4 * 4)
    assert moments_bytes("float32", 1024) == 2 * 4 * 1024


def test_host_memory_that_is_not_to_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, real = torch.zeros(2**20), torch.zeros

    def zeros(size: int, **more: Any) -> torch.Tensor:
        if size >= 2**20:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return real(size, **more)

    monkeypatch.setattr(moments_module, "CHUNK", 256)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(RunError, match=r"needs 0\.0 GiB of page-locked host memory.*not enough memory.*train\.moments"):
        Moments(weights, "float32", offload=True)
    with pytest.raises(RunError, match=r"not enough memory\)\. Set train\.offload to off\."):
        Moments(weights, "8bit", offload=True)


def test_muon_has_none_of_it() -> None:
    for change in ({"moments": "8bit"}, {"offload": "moments"}):
        with pytest.raises(ValueError, match="need optimizer: adamw"):
            TrainSettings.model_validate({"optimizer": "muon"} | change)


@pytest.mark.parametrize("compiled", [True, False])
def test_what_an_update_of_eight_bits_makes_in_passing_is_that_of_a_chunk(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Whatever a compiler leaves in between: in float32 it is as large as the moments that eight bits save."""
    monkeypatch.setattr(moments_module, "CHUNK", 768)
    moments = Moments(torch.zeros(7 * BLOCK), "8bit", offload=False, compiled=compiled)
    rows = [[part.shape for part in parts] for _, parts in moments.each()]
    assert rows == [[(each, BLOCK), (each,)] * 2 for each in (3, 3, 1)]
    whole = Moments(torch.zeros(7 * BLOCK), "float32", offload=False, compiled=compiled)
    assert len(list(whole.each())) == (1 if compiled else 3)
