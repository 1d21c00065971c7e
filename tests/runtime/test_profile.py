"""The machine's profile: saved whole, read back, refused with a reason when it does not hold here; its policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.runtime.profile import (
    Device,
    Disk,
    MachineKey,
    MachineProfile,
    Rates,
    choose_policy,
    load_profile,
    make_profile,
    profile_path,
    save_profile,
    this_machine,
)

H200 = Device(name="NVIDIA H200", capability="9.0", memory_gib=139.8)
HERE = MachineKey(torch="2.11.0+cu130", driver="580.159.03", devices=(H200, H200))


def profile() -> MachineProfile:
    return make_profile(
        HERE,
        compiles=True,
        captures=True,
        flex_attention={"NVIDIA H200": "forward and backward"},
        peer_gb_s=((None, 394.0), (394.0, None)),
        disks=(Disk(folder="/tmp", free_gib=5.0, write_mb_s=None, read_mb_s=None),),
    )


@pytest.mark.parametrize(
    ("gpu", "compiles", "captures", "policy"),
    [
        (True, True, True, "captured"),
        (True, True, False, "compiled"),
        (True, False, True, "eager"),
        (False, True, True, "compiled"),
        (False, True, False, "compiled"),
        (False, False, False, "eager"),
    ],
)
def test_the_policy_is_the_fastest_that_was_seen_to_work(
    gpu: bool, compiles: bool, captures: bool, policy: str
) -> None:
    chosen, reason = choose_policy(gpu=gpu, compiles=compiles, captures=captures)
    assert chosen == policy
    assert reason.endswith(".")


def test_saved_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    save_profile(profile(), path)
    assert load_profile(path, HERE) == (profile().model_copy(update={"made_at": _made_at(path)}), "")
    assert [child.name for child in path.parent.iterdir()] == ["machine.json"]


def _made_at(path: Path) -> str:
    made_at: str = json.loads(path.read_text())["made_at"]
    return made_at


def test_saving_where_nothing_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.mkdir()
    with pytest.raises(OSError):
        save_profile(profile(), path)
    assert [child.name for child in tmp_path.iterdir()] == ["machine.json"]


def test_a_missing_profile(tmp_path: Path) -> None:
    found, reason = load_profile(tmp_path / "machine.json", HERE)
    assert found is None
    assert reason == f"There is no machine profile at {tmp_path / 'machine.json'}. Run `paceline doctor`."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.13.0+cu130"}, "torch 2.11.0+cu130 and this is 2.13.0+cu130"),
        ({"driver": None}, "driver 580.159.03 and this is none"),
        ({"devices": (H200,)}, "NVIDIA H200 (9.0), NVIDIA H200 (9.0) and these are NVIDIA H200 (9.0)"),
        ({"devices": ()}, "NVIDIA H200 (9.0), NVIDIA H200 (9.0) and these are no GPU"),
    ],
)
def test_a_stale_profile(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "machine.json"
    save_profile(profile(), path)
    found, reason = load_profile(path, HERE.model_copy(update=change))
    assert found is None
    assert reason == f"The machine profile {path} is stale: it was made with {said}. Run `paceline doctor`."


def test_a_little_more_memory_is_the_same_gpu(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_profile(profile(), path)
    more = H200.model_copy(update={"memory_gib": 140.1})
    assert load_profile(path, HERE.model_copy(update={"devices": (more, more)}))[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "has format None"),
        ('{"format": 0}', "has format 0, this paceline reads 2"),
        ('{"format": 1}', "has format 1, this paceline reads 2. Run `paceline doctor`."),
        ('{"format": 2}', "is damaged at "),
    ],
)
def test_a_profile_that_is_not_ours(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    found, reason = load_profile(path, HERE)
    assert found is None
    assert said in reason
    assert reason.endswith("Run `paceline doctor`.")


def test_a_profile_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text("[" * 200_000)
    found, reason = load_profile(path, HERE)
    assert found is None
    assert "cannot be read" in reason


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf"), 1e300, 1e-300])
@pytest.mark.parametrize("which", ["bf16_tflops", "memory_gb_s", "fp8_tflops", "peer"])
def test_a_speed_that_none_can_be_is_damage(tmp_path: Path, which: str, wrong: float) -> None:
    rates = Rates(bf16_tflops=797.0, fp8_tflops=None, memory_gb_s=4000.0)
    tree = profile().model_copy(update={"rates": {"NVIDIA H200": rates}}).model_dump()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(tree))
    assert load_profile(path, HERE)[0]
    if which == "peer":
        tree["peer_gb_s"] = [[None, wrong], [394.0, None]]
    else:
        tree["rates"]["NVIDIA H200"][which] = wrong
    path.write_text(json.dumps(tree))
    found, reason = load_profile(path, HERE)
    assert found is None
    assert f"is damaged at {'peer_gb_s' if which == 'peer' else 'rates.NVIDIA H200'}" in reason


def test_it_lies_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert profile_path() == tmp_path / "machine.json"


def test_this_machine() -> None:
    here = this_machine()
    assert here.torch == torch.__version__
    assert len(here.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_reading_needs_no_torch() -> None:
    code = "import sys, paceline.runtime.profile, paceline.recipes.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("where", "wrong", "said"),
    [
        (("rates", "NVIDIA H200", "bf16_tflops"), True, "rates.NVIDIA H200.bf16_tflops, where True was found"),
        (("rates", "NVIDIA H200", "memory_gb_s"), "700", "rates.NVIDIA H200.memory_gb_s, where '700' was found"),
        (("machine", "devices", 0, "memory_gib"), -1, "machine.devices.0.memory_gib, where -1 was found"),
        (("machine", "devices", 0, "name"), "a\x1b[2J", "machine.devices.0.name, where 'a\\x1b[2J' was found"),
        (("compile_in_worker",), 1, "compile_in_worker, where 1 was found"),
        (("compile_in_worker",), False, "policy, where 'captured' was found and 'eager' follows from what was seen."),
        (("capture_in_worker",), False, "policy, where 'captured' was found and 'compiled' follows from what was"),
        (("machine", "devices"), [], "policy, where 'captured' was found and 'compiled' follows from what was seen."),
        (("policy",), "eager", "policy, where 'eager' was found and 'captured' follows from what was seen."),
        (("made_at",), "yesterday", "made_at, where 'yesterday' was found"),
        (("reason",), "two\nlines", "reason, where 'two\\nlines' was found"),
        (("policy",), "x" * 5_000, f"policy, where '{'x' * 59}… was found"),
        (("another\nkey",), 1, "another\\nkey, where 1 was found"),
        (("format",), True, "has format True, this paceline reads 2"),
        (("format",), "9" * 5_000, f"has format '{'9' * 59}…, this paceline reads 2"),
    ],
)
def test_damage_is_named_with_what_was_found(
    tmp_path: Path, where: tuple[str | int, ...], wrong: object, said: str
) -> None:
    rates = Rates(bf16_tflops=797.0, fp8_tflops=None, memory_gb_s=4000.0)
    tree = json.loads(profile().model_copy(update={"rates": {"NVIDIA H200": rates}}).model_dump_json())
    part = tree
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = wrong
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(tree))
    found, reason = load_profile(path, HERE)
    assert found is None
    assert said in reason
    assert reason.isprintable()
    assert len(reason) < 300 + len(str(path))
