"""What small cards need, on a CUDA device: captured steps with each setting against the plain one, and their memory."""

import gc
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.bench.features import feature_batches
from paceline.bench.shapes import Shape
from paceline.config import DrafterSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.runtime.compiling import OneShape, warm_compiler
from paceline.train.eight_bit import BLOCK, maps
from paceline.train.memory import StepMemory, step_memory
from paceline.train.moments import CHUNK
from paceline.train.optim import adamw_pass_8bit
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DEVICE = torch.device("cuda:0")
SHAPE = Shape(
    "card",
    DrafterSettings(
        block_size=16,
        layers=5,
        taps=(1, 2, 3),
        mask_token_id=3,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate_size=6144,
        rope_theta=1e4,
    ),
    hidden_size=2048,
    vocab_size=64_000,
    context_slots=4096,
    anchor_slots=512,
    anchors_per_sample=128,
)
SETTINGS: dict[str, dict[str, str]] = {
    "plain": {},
    "recompute": {"recompute": "layers"},
    "8bit": {"moments": "8bit"},
    "offload": {"offload": "moments"},
    "8bit, offload": {"moments": "8bit", "offload": "moments"},
    "all": {"recompute": "layers", "moments": "8bit", "offload": "moments"},
}
STEPS = 4
LR = 2e-4  # an update then is far from overshooting


@dataclass(frozen=True)
class Ran:
    """What a case left: its losses, first gradients, weights and moments at the end, and memory.

    Ten processes on one machine keep a few of these each, so of tensors only what tells them apart is kept.
    """

    losses: list[float]
    some_gradients: Tensor  # one in 64
    gradients: str
    weights: str
    state: dict[str, str]
    recompiles: int
    peak: int
    said: StepMemory


def digest(tensor: Tensor) -> str:
    entries = tensor.detach().cpu().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(entries).hexdigest()


def in_thread(call: Callable[[], Ran]) -> Ran:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        return pool.submit(call).result()


@cache
def ran(name: str) -> Ran:
    """Train some captured steps; the third of them is not applied."""
    warm_compiler("cuda:0")
    train = SHAPE.train_settings("bfloat16").model_copy(update={"lr": LR, **SETTINGS[name]})

    def body() -> Ran:
        torch.cuda.set_device(DEVICE)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(DEVICE)
        generator = torch.Generator().manual_seed(1)
        embed = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator).bfloat16() * 0.05
        drafter = Drafter(SHAPE.drafter, SHAPE.hidden_size).initialise(0).to(DEVICE)
        step = DrafterStep(drafter, FrozenEnds(embed, embed.clone()), train, policy="captured")
        torch.cuda.reset_peak_memory_stats(DEVICE)
        step.warm()
        batches = feature_batches(SHAPE, torch.device("cpu"), torch.bfloat16)[-2:]  # labels are random: learnt by heart
        losses: list[float] = []
        some_gradients, gradients = torch.zeros(0), ""
        for at in range(STEPS):
            step.clear()
            for batch in batches:
                step.load(batch)
                step.micro()
            if at == 0:
                some_gradients, gradients = step.gradients[::64].cpu(), digest(step.gradients)
            step.limit(float("inf"), 0.0 if at == 2 else float("inf"))
            step.update(LR)
            losses.append(float(step.sums[0] / step.sums[1]))
            assert float(step.optimizer.skip) == (at == 2)
        step.optimizer.wait()
        peak = torch.cuda.max_memory_allocated(DEVICE) - before
        sizes = {"hidden_size": SHAPE.hidden_size, "vocab_size": SHAPE.vocab_size}
        return Ran(
            losses,
            some_gradients,
            gradients,
            digest(step._flat.weights_P),
            {key: digest(tensor) for key, tensor in step.optimizer.state().items()},
            step.recompiles,
            peak,
            step_memory(SHAPE.drafter, train, **sizes, tied=False),
        )

    return in_thread(body)


def test_layers_run_again_give_the_same_gradients_within_rounding() -> None:
    plain, again = ran("plain"), ran("recompute")
    apart = again.some_gradients - plain.some_gradients
    assert float(apart.norm() / plain.some_gradients.norm()) < 0.02
    assert again.losses == pytest.approx(plain.losses, rel=0.02)
    assert again.recompiles == 0


@pytest.mark.parametrize(("away", "beside"), [("offload", "plain"), ("8bit, offload", "8bit")])
def test_moments_in_host_memory_change_no_bit(away: str, beside: str) -> None:
    one, other = ran(away), ran(beside)
    assert 64 * len(one.some_gradients) > 3 * CHUNK  # both stages are used again
    assert one.losses == other.losses
    assert one.weights == other.weights
    assert one.state == other.state


def test_eight_bits_train_as_well_over_some_steps() -> None:
    plain, eight = ran("plain"), ran("8bit")
    assert eight.gradients == plain.gradients
    assert eight.losses == pytest.approx(plain.losses, rel=0.05)
    assert eight.losses[1] < eight.losses[0]
    assert eight.losses[2] < eight.losses[1]
    assert eight.losses[3] == pytest.approx(eight.losses[2], rel=1e-6), "the third update was not to be applied"


def test_the_compiled_pass_over_eight_bits_is_that_of_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    R = 4096
    weights, gradients = (torch.randn(R, BLOCK, generator=generator) for _ in range(2))
    gradients *= torch.logspace(-8, 2, R * BLOCK).view(R, BLOCK)
    codes = [torch.zeros(R, BLOCK, dtype=torch.uint8), torch.zeros(R)]
    moments = (*codes, *(part.clone() for part in codes))
    scalars = tuple(torch.tensor(value) for value in (0.0, 3.0, 1e-3, 0.3, 0.999))
    run = OneShape(adamw_pass_8bit, instead=adamw_pass_8bit)
    for _ in range(3):
        # Each from the state of the CPU: of a code on the edge of two, what follows would be others, too.
        here = (weights, gradients, moments)
        there = (weights.to(DEVICE), gradients.to(DEVICE), tuple(part.to(DEVICE) for part in moments))
        for (w, g, m), call in ((here, adamw_pass_8bit), (there, run)):
            call(w, g, m, None, tuple(scalar.to(w.device) for scalar in scalars), (0.9, 0.95), maps(w.device))
        torch.testing.assert_close(there[0].cpu(), weights, rtol=1e-5, atol=1e-6)
        for ours, truth in zip(there[2], moments, strict=True):
            if truth.dtype == torch.uint8:
                apart = (ours.cpu().int() - truth.int()).abs()
                assert int(apart.max()) <= 1
                assert float((apart > 0).double().mean()) < 1e-3
            else:
                torch.testing.assert_close(ours.cpu(), truth, rtol=1e-5, atol=0)


def test_the_compiled_pass_over_eight_bits_is_one_kernel_and_keeps_nothing_in_between() -> None:
    """What it kept would be the moments in float32, which eight bits are there to save."""
    R = 2**16
    weights, gradients = (torch.randn(R, BLOCK, device=DEVICE) for _ in range(2))
    moments = tuple(
        torch.zeros(R, *width, dtype=dtype, device=DEVICE)
        for width, dtype in (((BLOCK,), torch.uint8), ((), torch.float32)) * 2
    )
    scalars = tuple(torch.tensor(value, device=DEVICE) for value in (0.0, 3.0, 1e-3, 0.3, 0.999))
    given = (weights, gradients, moments, weights.bfloat16(), scalars, (0.9, 0.95), maps(DEVICE))
    run = OneShape(adamw_pass_8bit, instead=adamw_pass_8bit)
    run(*given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    one = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[one], acc_events=True) as profile:  # else torch 2.11 warns of cycles
        run(*given)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(DEVICE) - before <= 4096
    kernels = [event.name for event in profile.events() if "triton" in event.name]
    assert len(kernels) == 1, kernels


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_peak_is_within_a_tenth_of_the_estimate(name: str) -> None:
    done = ran(name)
    told = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in done.said.parts().items())
    print(f"{name}: {done.peak / 2**30:.2f} GiB, estimated {done.said.total / 2**30:.2f} ({done.said.peak}): {told}")
    assert done.peak == pytest.approx(done.said.total, rel=0.1)
