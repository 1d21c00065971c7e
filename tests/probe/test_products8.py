"""The probe of fp8: its body on a CPU, and what the profile makes of what it found."""

from typing import Any

import pytest
import torch

from paceline.probe import products8, summary
from paceline.probe.examine import Result
from paceline.probe.finding import Bench
from paceline.runtime.profile import Rates

CPU, NAME = torch.device("cpu"), "a GPU"
BENCH = Bench(devices=1, cache="", runs="", scratch="")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products8, "devices", lambda bench: [CPU])
    monkeypatch.setattr(products8, "device_name", lambda device: NAME)
    monkeypatch.setattr(products8, "warm_compiler", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_targets_product_is_near_and_not_equal() -> None:
    assert 0.01 < products8.product_apart(CPU) <= products8.CLOSE


def test_a_product_that_is_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products8, "in_fp8", lambda matrix: matrix._replace(weight_NK=matrix.weight_NK * 1.1))
    assert products8.tried(CPU, ()) == "a target's product in fp8 is off by 0.10 of its size, 0.06 is allowed"


def test_a_step_is_in_fp8_and_is_held_against_plain_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def small(device: torch.device, policy: Any) -> Any:
        made.append(policy)
        drafter = products8.DRAFTER.model_copy(update={"layers": 1, "intermediate_size": 128})
        train = products8.TRAIN.model_copy(update={"context_slots": 128, "anchor_slots": 8, "anchors_per_sample": 4})
        step = step_of(device, "eager", drafter, train)
        assert step.settings.fp8 == "on"
        return step

    step_of = products8.step_of
    monkeypatch.setattr(products8, "step_of", small)
    assert products8.tried(CPU) == ""
    assert made == ["compiled", "captured"]


@pytest.mark.usefixtures("a_gpu")
def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(device: torch.device, policy: str) -> None:
        raise ArithmeticError("wrong values")

    monkeypatch.setattr(products8, "step_of", no)
    found = products8.step_and_target(BENCH)
    assert (found.verdict, found.numbers["works"]) == ("refused", {NAME: False})
    assert found.numbers["why"][NAME].startswith("a compiled step in fp8: ArithmeticError: wrong values")


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_without_it_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    found = products8.step_and_target(BENCH)
    assert (found.verdict, found.numbers["works"]) == ("ok", {NAME: False})
    assert found.observed == "a GPU: compute capability 8.6, and fp8 needs 8.9"


@pytest.mark.usefixtures("a_gpu")
def test_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products8, "tried", lambda device: "")
    found = products8.step_and_target(BENCH)
    assert (found.verdict, found.numbers["works"]) == ("ok", {NAME: True})


@pytest.mark.parametrize(
    ("works", "fp8", "on", "says"),
    [
        (True, 1200.0, True, "it gives right values, and is faster: 1200 TFLOP/s, and 1000 in bfloat16"),
        (True, 1199.0, False, "is not 1.2 times as fast: 1199 TFLOP/s, and 1000 in bfloat16"),
        (True, None, False, "its rate was not measured"),
        (False, 1400.0, False, "wrong"),
        (None, 1400.0, False, "the probe `fp8` says nothing of it (died: it   crashed)"),
    ],
)
def test_what_the_profile_makes_of_it(works: bool | None, fp8: float | None, on: bool, says: str) -> None:
    numbers = {} if works is None else {"works": {NAME: works}, "why": {NAME: "wrong"}}
    result = Result("fp8", "died", "it \x1b crashed", "", "", "", 1.0, numbers)
    found = summary._fp8(NAME, result, {NAME: Rates(bf16_tflops=1000.0, fp8_tflops=fp8, memory_gb_s=1.0)})
    assert found.works == on
    assert says in found.reason
