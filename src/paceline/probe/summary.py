"""Makes the machine's profile of what the probes saw."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.probe.examine import Result
from paceline.runtime.profile import Device, Disk, MachineKey, MachineProfile, Rates, driver_version, make_profile

CAPTURES = ("capture-worker", "capture-while-allocating", "capture-while-drawing")


def profile_of(results: Sequence[Result]) -> MachineProfile:
    """Return the profile; what no probe saw working does not work."""
    by_name = {result.name: result for result in results}

    def fine(name: str) -> bool:
        return by_name[name].verdict == "ok"

    def numbers(name: str) -> dict[str, Any]:
        return by_name[name].numbers

    machine = _machine(numbers("torch"))
    tried = fine("torch") or not machine.devices  # with GPUs that torch cannot use, the CPU was tried instead
    captures = all(map(fine, CAPTURES)) and by_name["replay-equals-eager"].verdict in ("ok", "degraded")
    return make_profile(
        machine,
        compiles=tried and fine("compile-worker"),
        captures=captures,
        flex_attention=numbers("flex-attention").get("works", {}),
        peer_gb_s=tuple(map(tuple, numbers("peer-copies").get("gb_s", ()))),
        rates={name: Rates(**found) for name, found in numbers("rates").get("rates", {}).items()},
        disks=tuple(Disk(**{key: one[key] for key in Disk.model_fields}) for one in numbers("disk").get("disks", ())),
    )


def _machine(numbers: dict[str, Any]) -> MachineKey:
    """Return what the profile holds for, also where torch could not say it."""
    devices = tuple(
        Device(name=one["name"], capability=one["capability"], memory_gib=one["memory_gib"])
        for one in numbers.get("devices", ())
    )
    driver = numbers["driver"] if "driver" in numbers else driver_version()
    return MachineKey(torch=str(numbers.get("torch") or _installed()), driver=driver, devices=devices)


def _installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
