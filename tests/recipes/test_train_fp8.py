"""Where training in fp8 is refused."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from paceline.config import DrafterSettings, RunSettings
from paceline.recipes.train_fp8 import check_train_fp8
from paceline.records import UserError


def settings(shape: DrafterSettings, drafters: tuple[str, ...] = ("cuda:0",), **train: Any) -> RunSettings:
    tree = {
        "run_dir": "run",
        "target": {"model": "m"},
        "drafter": shape.model_dump(),
        "data": {"dataset": "d"},
        "train": {"fp8": "on", **train},
        "pipeline": {"drafters": drafters},
    }
    return RunSettings.model_validate(tree)


def a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.parametrize("train", [{"dtype": "float32"}, {"policy": "eager"}])
def test_it_goes_with_bfloat16_and_a_compiler(shape: DrafterSettings, train: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="fp8: on needs dtype: bfloat16 and a policy other than eager, got "):
        settings(shape, **train)


def test_a_cpu_is_refused(shape: DrafterSettings) -> None:
    with pytest.raises(UserError, match=r"^train.fp8: on needs CUDA devices in pipeline.drafters, got cpu\. Set train"):
        check_train_fp8(settings(shape, drafters=("cpu",)), 64, "compiled")


def test_an_old_gpu_an_eager_step_and_odd_sizes_are_refused(
    shape: DrafterSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, (8, 6))
    with pytest.raises(UserError, match=r"train.fp8: on needs a GPU of compute capability 8.9 or newer, and cuda:0"):
        check_train_fp8(settings(shape), 64, "compiled")
    a_gpu(monkeypatch, (9, 0))
    check_train_fp8(settings(shape), 64, "compiled")
    with pytest.raises(UserError, match="needs train.policy compiled or captured, and auto became eager"):
        check_train_fp8(settings(shape), 64, "eager")
    with pytest.raises(UserError, match="the target's hidden size must be a multiple of 16, got 72"):
        check_train_fp8(settings(shape), 72, "captured")


def test_off_asks_for_nothing(shape: DrafterSettings) -> None:
    check_train_fp8(settings(shape, drafters=("cpu",), fp8="off"), 72, "eager")
