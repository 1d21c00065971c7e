"""A layer at a time, forward and backward compute what they do at once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.runtime.compiling import forbid_recompiles
from paceline.train import check
from paceline.train.step import DrafterStep

V, H = 300, 32
SHAPE = DrafterSettings(
    block_size=4,
    layers=4,
    taps=(1, 2),
    mask_token_id=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    rope_theta=1e4,
)


def make(recompute: str, layers: int = 4, *, policy: Any = "eager", dtype: str = "float32", **more: Any) -> DrafterStep:
    """Return a step whose buffers are full, with a loss in every block."""
    embed = torch.randn(V, H, generator=torch.Generator().manual_seed(0)) * 0.05
    sizes = {"context_slots": 128, "anchor_slots": 24, "anchors_per_sample": 1}
    train = TrainSettings.model_validate(sizes | {"dtype": dtype, "recompute": recompute}).model_copy(update=more)
    drafter = Drafter(SHAPE.model_copy(update={"layers": layers}), H).initialise(0)
    step = DrafterStep(drafter, FrozenEnds(embed, embed), train, policy=policy)
    if policy != "eager":
        step.warm()
    step.buffers.copy_(check.contents(step.buffers, V).buffers)
    step.buffers.valid_AB[:, 1:] = True
    return step


def sums(step: DrafterStep) -> list[torch.Tensor]:
    """Run two micro-batches, the second one other than the first, and return all that came of it."""
    step.clear()
    step.micro()
    step.buffers.token_A += 1
    step.buffers.start_A //= 2
    step.micro()
    return [tensor.clone() for tensor in (step.sums, step.prefixes, step.gradients)]


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "fp8"), [("float32", "off"), ("bfloat16", "off"), ("bfloat16", "on")])
def test_sums_and_gradients_are_the_same_bits(layers: int, dtype: str, fp8: str) -> None:
    plain, again = (sums(make(recompute, layers, dtype=dtype, fp8=fp8)) for recompute in ("off", "layers"))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert plain[2].any()


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch cut graphs as for inductor and run them as they are: no kernels, which take long to compile."""
    real = torch.compile

    def compiled(function: Any, *, options: Any, **rest: Any) -> Any:
        return real(function, backend="aot_eager_decomp_partition", **rest)

    monkeypatch.setattr(torch, "compile", compiled)
    yield
    torch._dynamo.reset()  # variants count for all functions that checks of shapes wrap


@pytest.mark.usefixtures("traceable", "graphs_alone")
def test_compiled_they_agree_within_rounding_and_layers_that_are_alike_share_what_is_compiled() -> None:
    agree("off")


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("fp8", ["off", "on"])
def test_with_kernels_they_agree_too(fp8: str) -> None:
    agree(fp8)


def agree(fp8: str) -> None:
    """In fp8 a gradient's last bit decides between two of eight: it is held as the check before the first step does."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what another test compiled would not be counted
    counters.clear()
    dtype = "float32" if fp8 == "off" else "bfloat16"
    step = make("layers", 5, policy="compiled", dtype=dtype, fp8=fp8)
    # The context, the first layer, those between, the last one, the head's loss, and the update of matrices and norms.
    assert counters["stats"]["unique_graphs"] == 7
    with forbid_recompiles():
        again = sums(step)
    assert step.recompiles == 0
    plain = sums(make("off", 5, dtype=dtype))
    bound = check.BOUNDS["fp8"].gradients if fp8 == "on" else 1e-5
    torch.testing.assert_close(again[0], plain[0], rtol=bound, atol=0)
    assert float((again[2] - plain[2]).norm() / plain[2].norm()) < bound
