"""The check of compiled steps on a CUDA device: how far errors are from bounds, and that what is wrong is seen."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.bench.shapes import Shape
from paceline.config import DrafterSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import RunError
from paceline.runtime.compiling import Policy, warm_compiler
from paceline.train import check
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DEVICE = torch.device("cuda:0")
SHAPE = Shape(
    "test",
    DrafterSettings(
        block_size=16,
        layers=3,
        taps=(1, 2),
        mask_token_id=3,
        heads=8,
        kv_heads=2,
        head_dim=128,
        intermediate_size=2048,
        rope_theta=1e6,
    ),
    hidden_size=1024,
    vocab_size=20_016,
    context_slots=2048,
    anchor_slots=128,
    anchors_per_sample=64,
)


def make(policy: Policy, dtype: str, fp8: str) -> DrafterStep:
    wire = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    embed = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, device=DEVICE, generator=generator).to(wire) * 0.03
    settings = SHAPE.train_settings(dtype).model_copy(update={"fp8": fp8})
    drafter = Drafter(SHAPE.drafter, SHAPE.hidden_size).initialise(0).to(DEVICE)
    return DrafterStep(drafter, FrozenEnds(embed, embed), settings, policy=policy)


def in_thread(call: Any) -> Any:
    def body() -> Any:
        torch.cuda.set_device(DEVICE)
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(body).result()


@pytest.mark.parametrize("policy", ["compiled", "captured"])
@pytest.mark.parametrize(("dtype", "fp8"), [("float32", "off"), ("bfloat16", "off"), ("bfloat16", "on")])
def test_a_right_step_is_far_from_the_bounds(
    monkeypatch: pytest.MonkeyPatch, dtype: str, fp8: str, policy: Policy
) -> None:
    warm_compiler("cuda:0")
    if fp8 == "on" and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("this GPU has no products in fp8")
    seen: list[dict[str, tuple[float, float]]] = []
    hold = check.hold
    monkeypatch.setattr(check, "hold", lambda found, **rest: (seen.append(dict(found)), hold(found, **rest)))
    step = make(policy, dtype, fp8)
    in_thread(step.warm)
    assert len(seen) == (2 if policy == "captured" else 1)
    for found in seen:
        for name, (error, bound) in found.items():
            print(f"{policy}, {dtype}, fp8 {fp8}: {name} {error:.2g} of {bound:.2g}")
            assert error <= 0.8 * bound, name


@pytest.mark.parametrize("fp8", ["off", "on"])
def test_kernels_that_see_wrong_slots_are_refused(fp8: str) -> None:
    warm_compiler("cuda:0")
    step = make("compiled", "bfloat16", fp8)
    right = step._visibility

    def wrong() -> Any:
        start_A = step.buffers.start_A.clone()
        # Blocks that see anything see twice as much.
        step.buffers.start_A.copy_((2 * start_A - step.buffers.anchor_A).clamp_min(0))
        made = right()
        step.buffers.start_A = start_A
        return made

    step._visibility = wrong  # type: ignore[method-assign]
    with pytest.raises(RunError, match="must compute what plain code does"):
        in_thread(step.warm)
