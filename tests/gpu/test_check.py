"""The check of compiled steps on a CUDA device: how far errors are from bounds, and that what is wrong is seen."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.probe.products8 import TRAIN, step_of
from paceline.records import RunError
from paceline.runtime.compiling import Policy, warm_compiler
from paceline.target.products import has_fp8
from paceline.train import check
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DEVICE = torch.device("cuda:0")


def make(policy: Policy, dtype: str, fp8: str) -> DrafterStep:
    """The doctor's own, at which its probe of fp8 holds a machine against plain code."""
    return step_of(DEVICE, policy, train=TRAIN.model_copy(update={"dtype": dtype, "fp8": fp8}))


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
    if fp8 == "on" and not has_fp8(DEVICE):
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
