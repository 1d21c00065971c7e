"""A compiled step that computes something else than plain code is refused before it trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import blocks
from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import RunError
from paceline.train import check
from paceline.train import step as step_module
from paceline.train.step import DrafterStep

V, H = 300, 32
SHAPE = DrafterSettings(
    block_size=4,
    layers=2,
    taps=(1, 2),
    mask_token_id=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    rope_theta=1e4,
)


def make(
    dtype: str = "float32", policy: Any = "eager", context: int = 64, anchors: int = 20, **more: Any
) -> DrafterStep:
    embed = torch.randn(V, H, generator=torch.Generator().manual_seed(0)) * 0.05
    settings = {"epochs": 1, "context_slots": context, "anchor_slots": anchors, "anchors_per_sample": 1}
    train = TrainSettings.model_validate(settings | {"dtype": dtype} | more)
    return DrafterStep(Drafter(SHAPE, H).initialise(0), FrozenEnds(embed, embed), train, policy=policy)


def assert_empty(step: DrafterStep) -> None:
    assert not any(bool(tensor.any()) for tensor in step.buffers.tensors())
    assert not any(bool(tensor.any()) for tensor in step.shared())  # gradients too, as no micro-batch was run


@pytest.mark.parametrize(("context", "anchors"), [(64, 20), (64, 3), (8, 16), (1, 1), (700, 40)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_right_passes_at_any_shape_and_leaves_nothing_behind(dtype: str, context: int, anchors: int) -> None:
    step = make(dtype, context=context, anchors=anchors)
    before = [weight.clone() for weight in step.drafter.parameters()]
    step._check()
    assert not any(weight.grad is not None and weight.grad.isnan().any() for weight in step.drafter.parameters())
    assert all(torch.equal(a, b) for a, b in zip(step.drafter.parameters(), before, strict=True))


def test_contents_go_into_the_tensors_that_a_step_has() -> None:
    step = make("bfloat16")
    addresses = [tensor.data_ptr() for tensor in step.buffers.tensors()]
    made = check.contents(step.buffers, V)
    step.buffers.copy_(made.buffers)
    for name in ("features_CD", "positions_C", "start_A", "anchor_A", "position_A", "token_A", "labels_AB", "valid_AB"):
        assert getattr(step.buffers, name).any()
        assert torch.equal(getattr(step.buffers, name), getattr(made.buffers, name))
    step.buffers.mask_()
    assert_empty(step)
    assert [tensor.data_ptr() for tensor in step.buffers.tensors()] == addresses  # graphs read from there


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policy captured run on a CPU: nothing is compiled, and a captured unit of work is itself."""
    monkeypatch.setattr(torch, "compile", lambda function, **rest: function)
    monkeypatch.setattr(step_module, "Captured", lambda work, **rest: work)
    monkeypatch.setattr(step_module, "new_pool", lambda device: None)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("wrong_first", [None, True, False])
def test_what_is_captured_must_repeat_what_was_checked(
    monkeypatch: pytest.MonkeyPatch, wrong_first: bool | None
) -> None:
    step = make("bfloat16", "captured")
    before = [weight.clone() for weight in step.drafter.parameters()]
    if wrong_first is not None:

        def captured(work: Any, **rest: Any) -> Any:
            def spoil() -> None:
                work()
                if getattr(work, "args", None) == (wrong_first,):
                    step.gradients *= 1.5

            return spoil

        monkeypatch.setattr(step_module, "Captured", captured)
        with pytest.raises(RunError, match="a replay's gradient differs"):
            step.warm()
        return
    step.warm()
    assert_empty(step)
    assert all(torch.equal(a, b) for a, b in zip(step.drafter.parameters(), before, strict=True))


def one_slot_more(step: DrafterStep) -> None:
    def wrong() -> Dense:
        own = step.buffers
        start_A = (own.start_A - 1).clamp_min(0)
        present_AB = torch.ones_like(own.valid_AB)
        return Dense(blocks.block_mask(start_A[None], own.anchor_A[None], present_AB[None], len(own.positions_C)))

    step._dense = wrong  # type: ignore[method-assign]


def neighbours_see_each_other(step: DrafterStep) -> None:
    right = step._dense

    def wrong() -> Dense:
        mask, B = right().mask_GQK.clone(), SHAPE.block_size
        own = mask[:, :, -mask.shape[1] :]
        own |= own.roll(B, 2)
        return Dense(mask)

    step._dense = wrong  # type: ignore[method-assign]


def through_head(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Any:
    def break_it(step: DrafterStep) -> None:
        right = step._head_loss
        step._head_loss = lambda *args: change(*right(*args))

    return break_it


def wrong_positions(step: DrafterStep) -> None:
    right = step._turns
    step._turns = lambda: (right()[0].roll(1, 0), right()[1].roll(1, 0))  # type: ignore[method-assign]


def stale_weights(step: DrafterStep) -> None:
    with torch.no_grad():
        step._working.layers[1].kv_proj.mul_(2)  # type: ignore[union-attr,operator]


def spoilt(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[1, 2] = torch.nan
    return gradient


BREAKS: dict[str, tuple[Callable[[DrafterStep], None], str]] = {
    "a mask of one slot too many": (one_slot_more, "a hidden state|the gradient"),
    "blocks that see their neighbours": (neighbours_see_each_other, "a hidden state|the gradient"),
    "positions of the slot before": (wrong_positions, "a hidden state|the gradient"),
    "weights that are not the drafter's": (stale_weights, "a hidden state|the gradient"),
    "a loss twice as large": (through_head(lambda loss, hits, grad: (loss * 2, hits, grad)), "the loss"),
    "hits that are lost": (through_head(lambda loss, hits, grad: (loss, hits & False, grad)), "which tokens are best"),
    "hits everywhere": (through_head(lambda loss, hits, grad: (loss, hits | True, grad)), "which tokens are best"),
    "a gradient half as large": (through_head(lambda loss, hits, grad: (loss, hits, grad / 2)), "the gradient"),
    "a loss that is no number": (
        through_head(lambda loss, hits, grad: (loss * torch.nan, hits, grad)),
        "the loss .* nan",
    ),
    "a gradient with one NaN": (
        through_head(lambda loss, hits, grad: (loss, hits, spoilt(grad))),
        "the gradient .* nan",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_refused_by_name(name: str) -> None:
    step = make("bfloat16")
    break_it, said = BREAKS[name]
    break_it(step)
    with pytest.raises(RunError, match=f"must compute what plain code does, but on cpu ({said})"):
        step._check()


def test_with_fp8_it_is_fp8_that_is_to_go_first() -> None:
    with pytest.raises(RunError, match=r"nan of the plain .* Set train\.fp8 to off, or train\.policy to eager\."):
        check.hold({"the loss": (float("nan"), 1.0)}, device=torch.device("cpu"), fp8=True)
