"""What becomes of `train.fp8: auto` and `target.fp8: auto`: on where `paceline doctor` saw it work, else off."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.recipes.plan_memory import target_folder
from paceline.records import UserError
from paceline.runtime.profile import MachineProfile, Policy, load_profile, profile_path, this_machine


def choose_fp8(
    settings: RunSettings, hidden_size: int, policy: Policy, console: Console, *, before: Mapping[str, str] | None
) -> RunSettings:
    """Return the settings without an auto that is off; a target's that is on stays auto, for the model may not take it.

    `before` is what a run that goes on has computed with, and does again: what is learnt stays the same, whatever the
    doctor has found since.

    Raises:
        UserError: that cannot be had any more.
    """
    if "auto" not in (settings.train.fp8, settings.target.fp8):
        return settings
    if before is not None:
        _check_still(settings, before, hidden_size, policy)
        chosen = {key: (before[key] == "on", "as before the run went on") for key in ("train", "target")}
    else:
        profile, missing = load_profile(profile_path(), this_machine())
        chosen = {
            "train": _of_train(settings, hidden_size, policy, profile, missing),
            "target": _of_target(settings, policy, profile, missing),
        }
    return _with(settings, chosen, console, target_on="auto")


def fp8_of(chosen: RunSettings) -> dict[str, str]:
    """Return what a run computes with, on or off, from the settings that `choose_fp8` gave."""
    return {"train": chosen.train.fp8, "target": "off" if chosen.target.fp8 == "off" else "on"}


def planned_fp8(run: RunSettings, path: Path | None, console: Console) -> RunSettings:
    """Return the settings with on or off for auto, for a machine whose profile is at `path`, or for this one.

    Which of its GPUs a role will have is not known, so it has to work on all of them.
    """
    if "auto" not in (run.train.fp8, run.target.fp8):
        return run
    profile, missing = load_profile(path or profile_path(), None if path else this_machine())
    policy: Policy = run.train.policy if run.train.policy != "auto" else profile.policy if profile else "eager"
    gpus = {device.name: None for device in profile.machine.devices} if profile else {}
    on_gpus = list(_in_profile(gpus, profile, missing))
    chosen = {
        "train": _first(_train_rules(run, policy), _odd_sizes(run, _hidden_size(run)), on_gpus),
        "target": _first(_target_rules(run, policy), on_gpus),
    }
    return _with(run, chosen, console, target_on="on")


def _with(
    settings: RunSettings, chosen: Mapping[str, tuple[bool, str]], console: Console, *, target_on: str
) -> RunSettings:
    parts = {}
    for key, (on, reason) in chosen.items():
        section = getattr(settings, key)
        if section.fp8 == "auto":
            console.line(f"  {key}.fp8 {'on' if on else 'off'}: {reason}")
            value = "off" if not on else target_on if key == "target" else "on"
            parts[key] = section.model_copy(update={"fp8": value})
    return settings.model_copy(update=parts)


def _check_still(settings: RunSettings, before: Mapping[str, str], hidden_size: int, policy: Policy) -> None:
    from paceline.recipes.train_fp8 import check_train_fp8
    from paceline.target.replica import pace_of

    if settings.train.fp8 == "auto" and before["train"] == "on":
        on = settings.train.model_copy(update={"fp8": "on"})
        check_train_fp8(settings.model_copy(update={"train": on}), hidden_size, policy)
    if settings.target.fp8 == "auto" and before["target"] == "on":
        for device in settings.pipeline.targets:
            pace_of(settings.target.model_copy(update={"fp8": "on"}), device, policy)


def _of_train(
    settings: RunSettings, hidden_size: int, policy: Policy, profile: MachineProfile | None, missing: str
) -> tuple[bool, str]:
    devices = _on_devices(settings, "drafters", profile, missing)
    return _first(_train_rules(settings, policy), _odd_sizes(settings, hidden_size), devices)


def _of_target(settings: RunSettings, policy: Policy, profile: MachineProfile | None, missing: str) -> tuple[bool, str]:
    return _first(_target_rules(settings, policy), _on_devices(settings, "targets", profile, missing))


def _first(*reasons: Iterable[str]) -> tuple[bool, str]:
    """Return whether it is on, and the first reason why not."""
    why_not = next((reason for some in reasons for reason in some), "")
    return not why_not, why_not or "`paceline doctor` saw it work, and faster, on these GPUs"


def _train_rules(settings: RunSettings, policy: Policy) -> Iterable[str]:
    if settings.train.dtype != "bfloat16":
        yield f"train.dtype is {settings.train.dtype}, and fp8 goes with bfloat16"
    if policy == "eager":
        yield "the policy is eager, and fp8 goes with a compiled step"


def _odd_sizes(settings: RunSettings, hidden_size: int) -> Iterable[str]:
    from paceline.drafter.e4m3 import TILE8
    from paceline.drafter.float8 import product_sizes

    sizes = product_sizes(settings.drafter, settings.train, hidden_size)
    yield from (f"{name}, {size:,}, is no multiple of {TILE8}" for name, size in sizes.items() if size % TILE8)


def _hidden_size(run: RunSettings) -> int:
    """Return the target's hidden size; of one that cannot be read here 0, which fits."""
    from paceline.target.load import load_config

    try:
        folder = target_folder(run.target)
        return int(load_config(folder).hidden_size) if folder else 0
    except (UserError, AttributeError):
        return 0


def _target_rules(settings: RunSettings, policy: Policy) -> Iterable[str]:
    if settings.target.dtype != "bfloat16":
        yield f"target.dtype is {settings.target.dtype}, and fp8 goes with bfloat16"
    if settings.target.fast == "off":
        yield "target.fast is off, and fp8 is a part of the fast path"
    if policy == "eager":
        yield "the policy is eager, and fp8 is faster only where it is compiled"


def _on_devices(settings: RunSettings, role: str, profile: MachineProfile | None, missing: str) -> Iterable[str]:
    from paceline.runtime.devices import device_name

    devices = getattr(settings.pipeline, role)
    yield from (f"{device} (pipeline.{role}) is no GPU" for device in devices if not device.startswith("cuda"))
    yield from _in_profile(map(device_name, dict.fromkeys(devices)), profile, missing)


def _in_profile(names: Iterable[str], profile: MachineProfile | None, missing: str) -> Iterable[str]:
    if profile is None:
        yield missing
        return
    if not profile.machine.devices:
        yield "the machine profile has no GPU"
    for name in names:
        found = profile.fp8.get(name)
        if found is None or not found.works:
            yield f"on {name} {found.reason if found else 'the doctor has not tried it'}"
