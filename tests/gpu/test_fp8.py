"""Products of training in fp8 on a CUDA device: against float64 at a run's shapes, and in a captured step."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES, Shape
from paceline.bench.weights import random_drafter, random_ends
from paceline.config import DrafterSettings, RunSettings, TrainSettings
from paceline.drafter.float8 import linear8, transposed
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.probe.finding import Bench
from paceline.probe.runner import Call, run_probes
from paceline.recipes.train import train
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.runtime.profile import Fp8, make_profile, save_profile, this_machine
from paceline.target.products import has_fp8
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DEVICE = torch.device("cuda:0")
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def new_enough() -> None:
    if not has_fp8(DEVICE):
        pytest.skip("no fp8 products here")


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("size", [(128, 256), (96, 208), (16, 4112), (6144, 20480)])
def test_bytes_are_transposed(size: tuple[int, int]) -> None:
    values = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    turned = transposed(values.view(E4M3))
    assert turned.is_contiguous()
    assert turned.dtype == E4M3
    assert torch.equal(turned.view(torch.uint8), values.t())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [(16384, 1024, 1536), (128, 64, 48)])
def test_a_product_and_its_gradients_are_near_those_of_float64(size: tuple[int, int, int], compiled: bool) -> None:
    T, K, N = size
    generator = torch.Generator(DEVICE).manual_seed(1)

    def drawn(*sizes: int) -> Tensor:
        spread = torch.randn(sizes[0], 1, generator=generator, device=DEVICE).exp()
        return (torch.randn(sizes, generator=generator, device=DEVICE) * spread).bfloat16()

    x, weight, dy = drawn(T, K), drawn(N, K) * 0.02, drawn(T, N) * 1e-4
    leaves = [x.requires_grad_(), weight.detach().requires_grad_()]
    call = torch.compile(linear8, fullgraph=True, dynamic=False) if compiled else linear8
    y = call(*leaves)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    x, weight, dy = (tensor.detach().double() for tensor in (*leaves, dy))
    for name, own, truth in zip(("y", "dx", "dW"), found, (x @ weight.T, dy @ weight, dy.T @ x), strict=True):
        # 3.7 % follow from e4m3 alone; the tensor cores' own sums over 16,384 tokens may add some.
        assert off(own, truth) <= 0.05, name


def losses(policy: Policy, fp8: str, steps: int = 24) -> list[float]:
    shape = SHAPES["small"]
    warm_compiler("cuda:0")

    def body() -> list[float]:
        torch.cuda.set_device(DEVICE)
        settings = shape.train_settings("bfloat16").model_copy(update={"fp8": fp8})
        ends = random_ends(shape, DEVICE, torch.bfloat16)
        step = DrafterStep(random_drafter(shape, DEVICE), ends, settings, policy=policy)
        step.warm()
        batches, found = feature_batches(shape, DEVICE, torch.bfloat16), []
        with forbid_recompiles():
            for index in range(steps):
                step.load(batches[index % 2])
                step.micro()
                step.update(3e-4)
                found.append((step.micro_sums[0] / step.micro_sums[1]).item())
                step.clear()
        assert step.recompiles == 0
        return found

    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        return pool.submit(body).result()


def test_a_captured_step_learns_as_in_bfloat16() -> None:
    plain, eight = losses("captured", "off"), losses("captured", "on")
    assert eight[0] == pytest.approx(plain[0], rel=5e-3)
    assert plain[-1] < 0.8 * plain[0], "nothing was learnt: the comparison says nothing"
    learnt = [6 * found[0] - sum(found[-6:]) for found in (eight, plain)]
    assert learnt[0] == pytest.approx(learnt[1], rel=0.1)  # 0.035 was seen
    assert eight != plain


@pytest.mark.parametrize("fp8", ["off", "on"])
def test_a_step_of_the_comparison_with_bfloat16_is_right_and_learns(fp8: str) -> None:
    """At the sizes of benchmarks/fp8_quality.py, where three heads share keys, as no other shape here has it."""
    own = DrafterSettings(
        block_size=8,
        layers=4,
        taps=(1, 8, 14, 20, 27),
        mask_token_id=5,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=1e5,
    )
    sizes = {"context_slots": 4096, "anchor_slots": 768, "anchors_per_sample": 48}
    shape = Shape("smollm2", own, 576, 49_152, *sizes.values(), lengths=(340,) * 12, tied=True)
    warm_compiler("cuda:0")

    def body() -> list[float]:
        torch.cuda.set_device(DEVICE)
        train = TrainSettings.model_validate({**sizes, "logits_mib": 1024, "fp8": fp8, "policy": "captured"})
        ends = random_ends(shape, DEVICE, torch.bfloat16)
        step = DrafterStep(random_drafter(shape, DEVICE), ends, train, policy="captured")
        step.warm()  # which holds it against plain code
        batch, found = feature_batches(shape, DEVICE, torch.bfloat16)[0], []
        for _ in range(24):
            step.load(batch)
            step.micro()
            step.update(1e-3)
            found.append((step.micro_sums[0] / step.micro_sums[1]).item())
            step.clear()
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(body).result()
    assert found[0] == pytest.approx(10.8, abs=0.3)  # ln 49,152: nothing is learnt yet
    assert found[-1] < 0.95 * found[0]


def test_the_doctors_probe_finds_that_it_works() -> None:
    (result,) = run_probes([Call("paceline.probe.products8:step_and_target", 180.0)], Bench(1, "", "", ""))
    finding = result[0]
    assert finding.verdict == "ok", finding.observed
    assert finding.numbers["works"] == {torch.cuda.get_device_name(DEVICE): True}


def test_a_run_on_auto_is_in_fp8_where_the_profile_says_so(
    tmp_path: Path,
    tiny_folder: Path,
    shape: DrafterSettings,
    write_dataset: Callable[..., Path],
    random_rows: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = torch.cuda.get_device_name(DEVICE)
    fp8 = {name: Fp8(works=True, reason="it gives right values, and is faster")}
    profile = make_profile(this_machine(), compiles=True, captures=True, flex_attention={}, fp8=fp8)
    path = tmp_path / "machine.json"
    monkeypatch.setattr("paceline.recipes.train_checks.profile_path", lambda: path)  # where tests have none
    save_profile(profile, path)
    settings = RunSettings.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "target": {"model": str(tiny_folder), "fp8": "auto"},
            "drafter": {**shape.model_dump(), "block_size": 16},
            "data": {"dataset": str(write_dataset(random_rows)), "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"max_steps": 3, "context_slots": 128, "anchor_slots": 16, "anchors_per_sample": 4, "fp8": "auto"},
            "pipeline": {"targets": ["cuda:0"], "drafters": ["cuda:0"]},
        }
    )
    summary = train(settings, console=Console(json=True))
    assert summary["fp8"] == {"train": "on", "target": "on"}
    told = [event for event in read_events(tmp_path / "run") if event["event"] in ("target_path", "no_fp8")]
    assert [(event["event"], event.get("fp8")) for event in told] == [("target_path", True)]
