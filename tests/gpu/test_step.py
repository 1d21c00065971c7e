"""The step on a CUDA device, in a worker thread: policies give the same losses, a captured one stays as it is."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline import blocks
from paceline.bench.features import feature_batches
from paceline.bench.shapes import Shape
from paceline.config import DrafterSettings
from paceline.drafter.attention import TILE, Dense, attend, sparse
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import StepReport
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.train.flat import Flat
from paceline.train.loop import alone, train_loop
from paceline.train.optim import Optimizer
from paceline.train.step import DrafterStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("traceable"),
]

DEVICE = torch.device("cuda:0")
SHAPE = Shape(
    "test",
    DrafterSettings(
        block_size=16,
        layers=2,
        taps=(1, 2),
        mask_token_id=3,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        rope_theta=1e4,
    ),
    hidden_size=256,
    vocab_size=1000,
    context_slots=1024,
    anchor_slots=32,
    anchors_per_sample=16,
)


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        return pool.submit(call).result()


def train(policy: Policy, dtype: str, steps: int = 12) -> tuple[list[StepReport], DrafterStep]:
    warm_compiler("cuda:0")

    def body() -> tuple[list[StepReport], DrafterStep]:
        torch.cuda.set_device(DEVICE)
        wire = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        generator = torch.Generator(device=DEVICE).manual_seed(1)
        embed = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, device=DEVICE, generator=generator).to(wire) * 0.05
        drafter = Drafter(SHAPE.drafter, SHAPE.hidden_size).initialise(0).to(DEVICE)
        settings = SHAPE.train_settings(dtype).model_copy(update={"lr": 1e-3})
        step = DrafterStep(drafter, FrozenEnds(embed, embed), settings, policy=policy)
        step.warm()
        torch.manual_seed(0)
        batches = feature_batches(SHAPE, DEVICE, wire)
        reports: list[StepReport] = []
        with forbid_recompiles():
            stream = (batches[i % len(batches)] for i in range(steps))
            train_loop(step, alone(stream), total_steps=steps, on_step=reports.append)
        return reports, step

    return in_thread(body)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 3e-2)])
def test_every_policy_gives_the_same_losses(dtype: str, tolerance: float) -> None:
    expected, _ = train("eager", dtype)
    assert expected[-1].loss < expected[0].loss
    for policy in ("compiled", "captured"):
        reports, step = train(policy, dtype)
        assert step.recompiles == 0
        assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], rel=tolerance)
        assert [r.blocks for r in reports] == [r.blocks for r in expected]


def test_a_captured_run_is_the_compiled_one_replayed() -> None:
    compiled, one = train("compiled", "bfloat16")
    captured, two = train("captured", "bfloat16")
    # The order of atomic additions in flex_attention's backward is not fixed, so not bit for bit.
    assert [r.loss for r in captured] == pytest.approx([r.loss for r in compiled], rel=5e-3)
    for a, b in zip(one.drafter.parameters(), two.drafter.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-3)


def test_reserved_memory_is_flat_after_warm_up_and_nothing_is_compiled_again() -> None:
    reports, step = train("captured", "bfloat16", steps=8)
    before = torch.cuda.memory_reserved(DEVICE)

    def more() -> None:
        torch.cuda.set_device(DEVICE)
        batches = feature_batches(SHAPE, DEVICE, torch.bfloat16)
        for i in range(200):
            step.load(batches[i % len(batches)])
            step.micro()
            step.update(1e-4)
            step.clear()
        torch.cuda.synchronize()

    with forbid_recompiles():
        in_thread(more)
    assert step.recompiles == 0
    assert torch.cuda.memory_reserved(DEVICE) <= before + (64 << 20)
    assert len(reports) == 8


@pytest.mark.parametrize("policy", ["compiled", "captured"])
def test_a_step_that_is_not_to_apply_changes_nothing(policy: Policy) -> None:
    _, step = train(policy, "bfloat16", steps=3)
    kept = [p.clone() for p in step.drafter.parameters()]
    moments = [t.clone() for s in step.optimizer.adamw.state.values() for t in s.values()]

    def once(apply: float) -> None:
        torch.cuda.set_device(DEVICE)
        step.apply.fill_(apply)
        step.load(feature_batches(SHAPE, DEVICE, torch.bfloat16)[0])
        step.micro()
        step.update(1e-3)
        step.clear()
        torch.cuda.synchronize()

    with forbid_recompiles():
        in_thread(lambda: once(0.0))
        assert all(torch.equal(p, k) for p, k in zip(step.drafter.parameters(), kept, strict=True))
        now = [t for s in step.optimizer.adamw.state.values() for t in s.values()]
        assert all(torch.equal(a, b) for a, b in zip(now, moments, strict=True))
        for limits in ((1e-6, math.inf), (math.inf, 1e-9)):  # below the loss, and below the gradient norm
            step.limit(*limits)
            in_thread(lambda: once(1.0))
            assert bool(step.optimizer.skip)
            assert all(torch.equal(p, k) for p, k in zip(step.drafter.parameters(), kept, strict=True))
            now = [t for s in step.optimizer.adamw.state.values() for t in s.values()]
            assert all(torch.equal(a, b) for a, b in zip(now, moments, strict=True))
        step.limit(math.inf, math.inf)
        in_thread(lambda: once(1.0))
    assert not bool(step.optimizer.skip)
    assert not any(torch.equal(p, k) for p, k in zip(step.drafter.parameters(), kept, strict=True))


@pytest.mark.parametrize("policy", ["compiled", "captured"])
def test_micro_batches_behind_the_first_add_and_the_first_overwrites(policy: Policy) -> None:
    _, step = train(policy, "bfloat16", steps=2)

    def gradients(*which: int) -> torch.Tensor:
        torch.cuda.set_device(DEVICE)
        step.clear()
        step.gradients.fill_(math.nan)  # nothing of an earlier step is read
        batches = feature_batches(SHAPE, DEVICE, torch.bfloat16)
        for index in which:
            step.load(batches[index])
            step.micro()
        torch.cuda.synchronize()
        leaves = step._flat.leaves(step.gradients).values()  # between them nothing is written
        return torch.cat([leaf.flatten() for leaf in leaves])

    with forbid_recompiles():
        one, other, both = (in_thread(lambda which=which: gradients(*which)) for which in ((0,), (1,), (0, 1)))
    assert one.isfinite().all()
    # The order of atomic additions in flex_attention's backward is not fixed.
    assert float((both - one - other).norm() / both.norm()) < 5e-3
    assert float((both - one).norm() / both.norm()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_one_pass_update_is_torchs_and_reads_everything_once(dtype: torch.dtype) -> None:
    """Moments and weights after three steps, and one kernel for matrices and one for norms."""
    warm_compiler("cuda:0")
    settings = SHAPE.train_settings("bfloat16").model_copy(update={"weight_decay": 0.1})

    def made(one_pass: bool) -> tuple[Flat, Optimizer, torch.Tensor]:
        drafter = Drafter(SHAPE.drafter, SHAPE.hidden_size).initialise(0).to(DEVICE, dtype)
        flat = Flat(drafter, {name: (name,) for name, _ in drafter.named_parameters()})
        copy = torch.zeros(flat.matrix_entries, dtype=torch.bfloat16, device=DEVICE)
        return flat, Optimizer(flat, settings, copy_S=copy, one_pass=one_pass), copy

    def stepped(flat: Flat, optimizer: Optimizer) -> None:
        torch.cuda.set_device(DEVICE)
        generator = torch.Generator(device=DEVICE).manual_seed(1)
        optimizer.lr.fill_(1e-3)
        for _ in range(3):
            flat.gradients_P.normal_(generator=generator)
            optimizer.divisor.fill_(3.0)
            optimizer.step()
        torch.cuda.synchronize()

    (flat, ours, copy), (other, theirs, _) = made(True), made(False)
    in_thread(lambda: stepped(flat, ours))
    in_thread(lambda: stepped(other, theirs))
    assert torch.equal(copy, flat.weights_P[: len(copy)].bfloat16())
    bound = 2e-6 if dtype == torch.float32 else 2**-7  # bfloat16: what is stored is rounded, three times
    for name, mine in ours.state().items():
        truth = theirs.state()[name].double()
        assert float((mine.double() - truth).norm() / truth.norm()) < bound, name
    for name, mine in flat.named(flat.weights_P).items():
        truth = other.named(other.weights_P)[name].double()
        assert float((mine.double() - truth).norm() / truth.norm()) < bound, name
    one = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[one], acc_events=True) as profile:  # else torch 2.11 warns of cycles
        ours.step()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "triton" in event.name]
    assert len(kernels) == 2, kernels


def test_gradients_of_sparse_attention_equal_those_of_dense() -> None:
    C, B, A = 4 * TILE, 16, 2 * TILE // 16
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    start = torch.tensor([0] * 7 + [200] * 6 + [0] * (A - 13), device=DEVICE)
    anchor = torch.tensor([*range(20, 160, 20), *range(220, 400, 30), *[0] * (A - 13)], device=DEVICE)
    shapes = ((1, 4, A * B, 64), (1, 2, C + A * B, 64), (1, 2, C + A * B, 64))
    q, k, v = (torch.randn(shape, device=DEVICE, generator=generator).requires_grad_() for shape in shapes)
    mask = blocks.block_mask(start[None], anchor[None], torch.ones(1, A, B, dtype=torch.bool, device=DEVICE), C)
    weights = torch.randn(1, 4, A * B, 64, device=DEVICE, generator=generator)
    compiled = torch.compile(lambda q, k, v, tiles: attend(q, k, v, tiles), dynamic=False)
    results = []
    for call, seen in ((attend, Dense(mask)), (compiled, sparse(start, anchor, C, B))):
        out = call(q, k, v, seen)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
