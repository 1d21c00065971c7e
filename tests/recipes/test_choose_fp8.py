"""What becomes of fp8: auto, rule by rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.config import DrafterSettings, RunSettings
from paceline.observe.console import Console
from paceline.recipes import choose_fp8 as module
from paceline.recipes.choose_fp8 import choose_fp8, fp8_of, planned_fp8
from paceline.records import UserError
from paceline.runtime.profile import Device, Fp8, MachineKey, MachineProfile, make_profile

FAST, SLOW = "NVIDIA H200", "NVIDIA A100"
NAMES = {"cuda:0": FAST, "cuda:1": FAST, "cuda:2": SLOW}


def profile() -> MachineProfile:
    devices = tuple(Device(name=name, capability="9.0", memory_gib=140.0) for name in dict.fromkeys(NAMES.values()))
    found = {FAST: Fp8(works=True, reason="it is faster"), SLOW: Fp8(works=False, reason="it has none")}
    return make_profile(
        MachineKey(torch="2.11", driver="580", devices=devices),
        compiles=True,
        captures=True,
        flex_attention={},
        fp8=found,
    )


@pytest.fixture
def settings(shape: DrafterSettings) -> Callable[..., RunSettings]:
    def make(*, fp8: str = "auto", **changes: dict[str, Any]) -> RunSettings:
        tree: dict[str, Any] = {
            "run_dir": "run",
            "target": {"model": "m", "fp8": fp8},
            "drafter": shape.model_dump(),
            "data": {"dataset": "d"},
            "train": {"fp8": fp8},
            "pipeline": {"targets": ["cuda:0"], "drafters": ["cuda:1"]},
        }
        for section, values in changes.items():
            tree[section] |= values
        return RunSettings.model_validate(tree)

    return make


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAMES[str(device)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "load_profile", lambda path, here: (profile(), ""))


def chosen(run: RunSettings, policy: Any = "captured", hidden: int = 64, **more: Any) -> dict[str, str]:
    return fp8_of(choose_fp8(run, hidden, policy, Console(json=True), before=None, **more))


@pytest.mark.parametrize(
    ("changes", "policy", "hidden", "train", "target"),
    [
        ({}, "captured", 64, "on", "on"),
        ({}, "compiled", 64, "on", "on"),
        ({}, "eager", 64, "off", "off"),
        ({}, "captured", 72, "off", "on"),  # no multiple of 16
        ({"train": {"context_slots": 8200}}, "captured", 64, "off", "on"),
        ({"train": {"dtype": "float32"}}, "captured", 64, "off", "on"),
        ({"target": {"dtype": "float32"}}, "captured", 64, "on", "off"),
        ({"target": {"fast": "off"}}, "captured", 64, "on", "off"),
        ({"pipeline": {"drafters": ["cpu"]}}, "compiled", 64, "off", "on"),
        ({"pipeline": {"targets": ["cuda:0", "cpu"]}}, "captured", 64, "on", "off"),
        ({"pipeline": {"drafters": ["cuda:1", "cuda:2"]}}, "captured", 64, "off", "on"),  # one kind of two has none
        ({"pipeline": {"targets": ["cuda:2"]}}, "captured", 64, "on", "off"),
        ({"train": {"fp8": "off"}}, "captured", 64, "off", "on"),
        ({"target": {"fp8": "off"}}, "captured", 64, "on", "off"),
    ],
)
def test_each_rule(settings: Any, changes: dict[str, Any], policy: str, hidden: int, train: str, target: str) -> None:
    assert chosen(settings(**changes), policy, hidden) == {"train": train, "target": target}


def test_without_a_profile_it_is_off_and_says_what_to_do(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = "There is no machine profile at x. Run `paceline doctor`."
    monkeypatch.setattr(module, "load_profile", lambda path, here: (None, missing))
    assert fp8_of(choose_fp8(settings(), 64, "captured", Console(), before=None)) == {"train": "off", "target": "off"}
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"train.fp8 off: {missing} target.fp8 off: {missing}"


def test_a_machine_that_was_never_tried(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = profile().model_copy(update={"fp8": {}})
    monkeypatch.setattr(module, "load_profile", lambda path, here: (bare, ""))
    assert chosen(settings()) == {"train": "off", "target": "off"}


@pytest.mark.parametrize("fp8", ["off", "on"])
def test_what_is_not_auto_stays(settings: Any, fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_profile", None)
    run = settings(fp8=fp8)
    assert choose_fp8(run, 64, "eager", Console(json=True), before=None) is run


def test_a_run_that_goes_on_keeps_what_it_began_with(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_profile", lambda path, here: (None, "none"))
    for before in ({"train": "on", "target": "off"}, {"train": "off", "target": "on"}):
        assert fp8_of(choose_fp8(settings(), 64, "captured", Console(json=True), before=before)) == before
    with pytest.raises(UserError, match="train.fp8: on needs train.policy compiled or captured"):
        choose_fp8(settings(), 64, "eager", Console(json=True), before={"train": "on", "target": "off"})
    on_a_cpu = settings(pipeline={"targets": ["cpu"], "drafters": ["cpu"]})
    with pytest.raises(UserError, match="target.fp8: on is a part of the fast path"):
        choose_fp8(on_a_cpu, 64, "eager", Console(json=True), before={"train": "off", "target": "on"})


def test_a_target_that_is_on_may_still_not_take_it(settings: Any) -> None:
    assert choose_fp8(settings(), 64, "captured", Console(json=True), before=None).target.fp8 == "auto"


def test_a_plan_asks_all_gpus_of_the_profile(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = settings()
    planned = planned_fp8(run, None, Console(json=True))
    assert (planned.train.fp8, planned.target.fp8) == ("off", "off")  # of two kinds one has none
    found = profile()
    one = found.model_copy(update={"machine": found.machine.model_copy(update={"devices": found.machine.devices[:1]})})
    monkeypatch.setattr(module, "load_profile", lambda path, here: (one, ""))
    planned = planned_fp8(run, None, Console(json=True))
    assert (planned.train.fp8, planned.target.fp8) == ("on", "on")
    odd = planned_fp8(settings(train={"context_slots": 8200}), None, Console(json=True))
    assert (odd.train.fp8, odd.target.fp8) == ("off", "on")


def test_auto_goes_with_any_format_and_policy(settings: Any) -> None:
    run = settings(train={"dtype": "float32", "policy": "eager"}, target={"dtype": "float32", "fast": "off"})
    assert chosen(run, "eager") == {"train": "off", "target": "off"}
