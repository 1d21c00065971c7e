"""The schedules as functions of the step, and the optimizers against torch's own."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import TrainSettings
from paceline.train.flat import Flat
from paceline.train.optim import Optimizer, adamw_pass, learning_rate


def test_warm_up_then_cosine() -> None:
    settings = TrainSettings(lr=1.0, warmup_share=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) in (9, 10)
    assert rates[55] == pytest.approx(0.6)  # half way of the cosine
    assert 0.2 < rates[99] < 0.21
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_warm_up_then_stable_then_decay() -> None:
    settings = TrainSettings(lr=1.0, schedule="wsd", warmup_share=0.1, decay_share=0.2, min_lr_ratio=0.5)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:81] == pytest.approx([1.0] * 71)
    assert rates[90] == pytest.approx(0.75)
    assert rates[99] == pytest.approx(0.525)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_one_step_is_a_step(schedule: str) -> None:
    assert learning_rate(0, 1, TrainSettings.model_validate({"lr": 0.5, "schedule": schedule})) == 0.5


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 40, bias=False), nn.LayerNorm(40), nn.Linear(40, 8), nn.Linear(24, 40, bias=False)
    )


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.grad is None:
            parameter.grad = drawn
        else:
            parameter.grad.copy_(drawn)


def flat(model: nn.Module) -> Flat:
    """Every weight by itself but for the two alike, which lie end to end."""
    names = [name for name, _ in model.named_parameters()]
    return Flat(model, {"joined": ("0.weight", "3.weight")} | {name: (name,) for name in names if name[0] in "12"})


def settings(optimizer: str) -> TrainSettings:
    return TrainSettings.model_validate({"optimizer": optimizer, "weight_decay": 0.1, "betas": [0.8, 0.95]})


def torchs_own(model: nn.Module, optimizer: str) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    plain = torch.optim.AdamW([{"params": norms, "weight_decay": 0.0}], betas=(0.8, 0.95))
    if optimizer == "muon":
        muon = torch.optim.Muon(
            matrices, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, plain]
    return [torch.optim.AdamW(matrices, weight_decay=0.1, betas=(0.8, 0.95)), plain]


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_equals_torchs_own(name: str, one_pass: bool) -> None:
    ours, theirs = net(), net()
    laid = flat(ours)
    copy = torch.zeros(laid.matrix_entries, dtype=torch.bfloat16)
    optimizer = Optimizer(laid, settings(name), copy_S=copy, one_pass=one_pass)
    references = torchs_own(theirs, name)
    for step in range(6):
        lr = 1e-2 * (step + 1)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for parameter in ours.parameters():
            assert parameter.grad is not None
            parameter.grad *= 3.0**step  # sums, whose weight differs from step to step
        optimizer.divisor.fill_(3.0**step)
        optimizer.lr.fill_(lr)
        optimizer.step()
        for reference in references:
            for group in reference.param_groups:
                group["lr"] = lr
            reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Muon iterates in bfloat16; products of a batch of matrices may round otherwise than of one.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=3e-4 if name == "muon" else 1e-6)
    assert torch.equal(copy, laid.weights_P[: len(copy)].bfloat16())
    assert float(copy.abs().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_pass_is_adamw_in_every_format(dtype: torch.dtype) -> None:
    """Against the formula in float64; what is rounded is only what is stored."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients, mean, square = (torch.randn(200, generator=generator).to(dtype) for _ in range(4))
    square = square.abs()
    lr, decay, divisor, count, betas = 1e-2, 0.1, 7.0, 5, (0.9, 0.95)
    g, w, m, v = (t.double() for t in (gradients / 1, weights, mean, square))
    g = g / divisor
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
    corrected = (m / (1 - betas[0] ** count)) / ((v / (1 - betas[1] ** count)).sqrt() + 1e-8)
    w = w * (1 - lr * decay) - lr * corrected
    rate, root = lr / (1 - betas[0] ** count), (1 - betas[1] ** count) ** 0.5
    scalars = tuple(torch.tensor(value) for value in (0.0, divisor, rate, root, 1 - lr * decay))
    copy = torch.zeros(200, dtype=torch.bfloat16)
    adamw_pass(weights, gradients, (mean, square), copy, scalars, betas)  # type: ignore[arg-type]
    bound = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-6}[dtype]  # scalars are float32
    for ours, truth in ((weights, w), (mean, m), (square, v)):
        torch.testing.assert_close(ours.double(), truth, rtol=bound, atol=1e-7)
    assert torch.equal(copy, weights.bfloat16())


def state_of(optimizer: Optimizer, model: nn.Module) -> list[torch.Tensor]:
    tensors: list[Any] = [*model.parameters(), *(optimizer.muon.buffers if optimizer.muon else [])]
    for state in optimizer.adamw.state.values():
        tensors += state.values()
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(name: str, bad: float, one_pass: bool) -> None:
    model = net()
    optimizer = Optimizer(flat(model), settings(name), one_pass=one_pass)
    optimizer.lr.fill_(1e-2)
    set_gradients(model, 0)
    optimizer.step()
    before = state_of(optimizer, model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(bad)
    optimizer.skip.fill_(1)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(optimizer, model), strict=True))
    optimizer.skip.fill_(0)
    set_gradients(model, 1)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, state_of(optimizer, model), strict=True))
