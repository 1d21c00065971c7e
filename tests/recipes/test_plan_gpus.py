"""`plan --gpus`: from a RUN.yaml and a machine's profile to the best split."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.runtime.profile import Device, Fp8, MachineKey, Rates, make_profile, save_profile

GPU = Device(name="NVIDIA H200", capability="9.0", memory_gib=139.8)
RATES = Rates(bf16_tflops=797.0, fp8_tflops=1400.0, memory_gb_s=4000.0)


@pytest.fixture
def run_yaml(tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path]) -> Path:
    rows = [([5 + at % 100 for at in range(length)], 2) for length in (20, 24, 28, 32) * 4]
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder)},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(write_dataset(rows)), "token_budget": 128, "align": 32, "buckets": 1},
        "train": {"anchors_per_sample": 4, "context_slots": 128, "anchor_slots": 32},
    }
    path = tmp_path / "RUN.yaml"
    path.write_text(dump_settings(RunSettings.model_validate(tree)))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., Path]:
    def save(*, rates: Rates | None = RATES, peers: bool = True, fp8: bool | None = None) -> Path:
        made = make_profile(
            MachineKey(torch="2.11.0+cu130", driver="580", devices=(GPU, GPU)),
            compiles=True,
            captures=True,
            flex_attention={},
            peer_gb_s=((None, 394.0), (390.0, None)) if peers else (),
            rates={"NVIDIA H200": rates} if rates else {},
            fp8={} if fp8 is None else {"NVIDIA H200": Fp8(works=fp8, reason="it was tried")},
        )
        save_profile(made, tmp_path / "machine.json")
        return tmp_path / "machine.json"

    return save


def plan(*arguments: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert (done.exit_code == 0) == (status == 0), done.output
    return done if status == 0 else str(done.exception)


def test_the_best_split_is_the_one_with_the_most_samples(run_yaml: Path, profile: Callable[..., Path]) -> None:
    done = plan(run_yaml, "--gpus", 4, "--profile", profile(), "--json")
    found = json.loads(done.stdout)["gpus"]
    assert [(one["targets"], one["drafters"]) for one in found["splits"]] == [(1, 3), (2, 2), (3, 1), (4, 4)]
    assert found["best"] == max(found["splits"], key=lambda one: one["samples_per_s"])
    assert found["peer_gb_s"] == 390.0, "the slowest pair"
    load = found["load"]
    assert (load["tokens"], load["samples"], load["micro_samples"]) == (26.0, 4.0, 4.0)


def test_measured_rates_take_the_place_of_the_predicted_ones(run_yaml: Path, profile: Callable[..., Path]) -> None:
    given = ("--target-rate", 2600, "--step-rate", 320)
    found = json.loads(plan(run_yaml, "--gpus", 2, "--profile", profile(), *given, "--json").stdout)["gpus"]
    split, both = found["splits"]
    assert split["target_side"] == pytest.approx(100.0), "2,600 tokens/s are 100 samples of 26"
    assert split["drafter_side"] == pytest.approx(40.0, rel=1e-3), "32 slots take 0.1 s, for four samples"
    assert (split["limit"], found["best"]) == ("drafters", split)
    assert both["samples_per_s"] == pytest.approx(4 / (4 / 200 + 0.1), rel=1e-3), "the second rank has nothing to do"


def test_the_table_fits_a_narrow_terminal(run_yaml: Path, profile: Callable[..., Path]) -> None:
    text = plan(run_yaml, "--gpus", 8, "--profile", profile(peers=False)).output
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "8 GPUs, predicted from the machine profile of 20" in text
    assert "best: " in text
    assert "nobody measured copies between GPUs here" in text


def test_one_gpu_is_no_gpus(run_yaml: Path, profile: Callable[..., Path]) -> None:
    text = plan(run_yaml, "--gpus", 1, "--profile", profile()).output
    assert "  1 GPU, predicted from the machine profile of 20" in text
    assert not re.search(r"(?<![\d.,])1 \w+s\b", text), "one of anything"


def test_what_is_missing_is_said(run_yaml: Path, profile: Callable[..., Path], tmp_path: Path) -> None:
    assert "has none of a GPU. Run `paceline doctor`" in plan(
        run_yaml, "--gpus", 2, "--profile", profile(rates=None), status=2
    )
    nowhere = tmp_path / "none.json"
    assert "There is no machine profile at" in plan(run_yaml, "--gpus", 2, "--profile", nowhere, status=2)
    settings = plan(run_yaml, "--profile", nowhere, status=2)
    assert "--profile goes with --gpus" in settings
    folder = json.loads(plan(run_yaml, "--json").stdout)["datasets"][0]["folder"]
    assert "Give a RUN.yaml" in plan(folder, "--gpus", 2, status=2)
    away = plan(run_yaml, "target.model=nobody/nothing", "--gpus", 2, "--profile", profile(), status=2)
    assert "is not on this machine" in away


def told_of(*arguments: object) -> tuple[dict[str, Any], str]:
    """What a plan for two GPUs has as data, and its line about the targets."""
    asked = (*arguments, "--gpus", 2)
    (line,) = re.findall(r"^  targets (.*)$", plan(*asked).output, re.MULTILINE)
    return json.loads(plan(*asked, "--json").stdout), line


def test_targets_off_the_fast_path_are_predicted_as_such_and_it_is_said(
    run_yaml: Path, profile: Callable[..., Path]
) -> None:
    machine = profile()
    found, said = told_of(run_yaml, "--profile", machine)
    assert said == "on the fast path, compiled"
    assert found["padding_share"] > 0
    plain, said = told_of(run_yaml, "target.fast=off", "--profile", machine)
    assert said == "by transformers' own forward: target.fast is off"
    assert plain["gpus"]["pace"] == {"fast": False, "compiled": False, "fp8": False, "targets": said}
    # Of a matrix product's rate 0.78 and 0.58 were measured, and transformers' own forward computes padding, too.
    ratio = 0.78 / 0.58 / (1 - found["padding_share"])
    assert plain["gpus"]["seconds"]["target"] / found["gpus"]["seconds"]["target"] == pytest.approx(ratio)
    assert plain["gpus"]["seconds"]["micro"] == found["gpus"]["seconds"]["micro"]
    eager, said = told_of(run_yaml, "train.policy=eager", "--profile", machine)
    assert said == "on the fast path, not compiled (policy eager)"
    assert eager["gpus"]["seconds"]["target"] / found["gpus"]["seconds"]["target"] == pytest.approx(0.78 / 0.58)
    given = plan(run_yaml, "--gpus", 2, "--profile", machine, "--target-rate", 99).output
    assert "\n  targets " not in given, "their rate was measured"


def test_a_family_that_the_fast_path_does_not_know_is_named(
    run_yaml: Path, profile: Callable[..., Path], tmp_path: Path, tiny_folder: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "olmo2", "architectures": None}))
    _, said = told_of(run_yaml, f"target.model={folder}", "--profile", profile())
    assert said == "by transformers' own forward: olmo2 is not known to the fast path"


def test_auto_is_what_the_profile_says(run_yaml: Path, profile: Callable[..., Path]) -> None:
    auto = ("target.fp8=auto", "train.fp8=auto")
    for fp8, same in ((True, "on"), (False, "off"), (None, "off")):
        place = profile(fp8=fp8)
        found, _ = told_of(run_yaml, *auto, "--profile", place)
        wanted, _ = told_of(run_yaml, f"target.fp8={same}", f"train.fp8={same}", "--profile", place)
        assert found["gpus"]["seconds"] == wanted["gpus"]["seconds"]
        assert (found["memory"], found["target"]) == (wanted["memory"], wanted["target"])


def test_products_in_fp8_are_predicted_from_their_own_rate(run_yaml: Path, profile: Callable[..., Path]) -> None:
    before, _ = told_of(run_yaml, "--profile", profile())
    asked = ("target.fp8=on", "train.fp8=on", "--profile", profile())
    found, said = told_of(run_yaml, *asked)
    assert said == "on the fast path, compiled, in fp8"
    for name, ratio in (("target", 797 * 0.78 / (1400 * 0.68)), ("micro", 797 * 0.72 / (1400 * 0.65))):
        assert found["gpus"]["seconds"][name] / before["gpus"]["seconds"][name] == pytest.approx(ratio)
    assert found["gpus"]["seconds"]["update"] == before["gpus"]["seconds"]["update"]
    profile(rates=RATES.model_copy(update={"fp8_tflops": None}))
    told = plan(run_yaml, *asked, "--gpus", 2, status=2)
    given = ("--target-rate", 2600, "--step-rate", 320)
    assert json.loads(plan(run_yaml, *asked, *given, "--gpus", 2, "--json").stdout)["gpus"]["best"]
    assert told.startswith("target.fp8: on is predicted from the rate of products in fp8, but the machine profile has")


def test_replicas_on_several_gpus_leave_the_others_to_drafters(run_yaml: Path, profile: Callable[..., Path]) -> None:
    asked = ("target.devices_per_replica=2", "pipeline.targets=[cpu, cpu]", "--profile", profile())
    found = json.loads(plan(run_yaml, *asked, "--gpus", 5, "--json").stdout)
    splits = found["gpus"]["splits"]
    assert [(one["targets"], one["drafters"], one["colocated"]) for one in splits] == [(1, 3, False), (2, 1, False)]
    alone = json.loads(plan(run_yaml, "--profile", profile(), "--gpus", 5, "--json").stdout)["gpus"]
    # Five layers, three of them behind the embedding's: the slower stage makes three fifths.
    assert found["gpus"]["seconds"]["target"] == pytest.approx(alone["seconds"]["target"] * 3 / 5)
    text = plan(run_yaml, *asked, "--gpus", 5).output
    assert re.search(r"best: \d for targets, 2 for each replica, \d for drafters", text)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "need 3, got 2. Plan for more, or lower it" in plan(run_yaml, *asked, "--gpus", 2, status=2)
    few = ("target.devices_per_replica=6", "pipeline.targets=[cpu, cpu, cpu, cpu, cpu, cpu]")
    assert "must not exceed the layers up to the deepest tap (5), got 6" in plan(run_yaml, *few, status=2)


def test_the_memory_of_each_device_is_that_of_its_layers(run_yaml: Path) -> None:
    found = json.loads(plan(run_yaml, "target.devices_per_replica=2", "pipeline.targets=[cpu, cpu]", "--json").stdout)
    first, last = found["target"]["devices"]
    layer = 2 * (64 * (64 + 2 * 32 + 64 + 3 * 128) + 2 * 64 + 2 * 16)  # bfloat16: products, norms, norms of heads
    assert first["weights"] == 2 * layer + 2 * 128 * 64
    assert last["weights"] == 3 * layer
    assert (first["features"], last["features"]) == (0, 3 * 128 * 3 * 64 * 2), "of three micro-batches of 128 tokens"
    assert found["target"]["weights"] == first["weights"] + last["weights"]
    assert found["target"]["replicas"] == {"cpu": 2}
