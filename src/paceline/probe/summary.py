"""Makes the machine's profile of what the probes saw."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.probe.examine import Result
from paceline.runtime.profile import Device, Disk, Fp8, MachineKey, MachineProfile, Rates, driver_version, make_profile

CAPTURES = ("capture-worker", "capture-while-allocating", "capture-while-drawing")
FASTER = 1.2  # times bfloat16's rate: below, products in fp8 do not pay for what they round


def profile_of(results: Sequence[Result]) -> MachineProfile:
    """Return the profile; what no probe saw working does not work."""
    by_name = {result.name: result for result in results}

    def fine(name: str) -> bool:
        return by_name[name].verdict == "ok"

    def numbers(name: str) -> dict[str, Any]:
        return by_name[name].numbers

    machine = _machine(numbers("torch"))
    tried = fine("torch") or not machine.devices  # with GPUs that torch cannot use, the CPU was tried instead
    rates = {name: Rates(**found) for name, found in numbers("rates").get("rates", {}).items()}
    captures = all(map(fine, CAPTURES)) and by_name["replay-equals-eager"].verdict in ("ok", "degraded")
    return make_profile(
        machine,
        compiles=tried and fine("compile-worker"),
        captures=captures,
        flex_attention=numbers("flex-attention").get("works", {}),
        peer_gb_s=tuple(map(tuple, numbers("peer-copies").get("gb_s", ()))),
        rates=rates,
        fp8={device.name: _fp8(device.name, by_name["fp8"], rates) for device in machine.devices},
        disks=tuple(Disk(**{key: one[key] for key in Disk.model_fields}) for one in numbers("disk").get("disks", ())),
    )


def _fp8(name: str, result: Result, rates: Mapping[str, Rates]) -> Fp8:
    """Return whether a kind of GPU is to compute in fp8 where that is left to the machine."""
    works = result.numbers.get("works", {}).get(name)
    if works is None:
        return Fp8(
            works=False, reason=_line(f"the probe `fp8` says nothing of it ({result.verdict}: {result.observed})")
        )
    if not works:
        return Fp8(works=False, reason=_line(result.numbers["why"][name]))
    rate = rates.get(name)
    if rate is None or rate.fp8_tflops is None:
        return Fp8(works=False, reason="it gives right values, but its rate was not measured")
    both = f"{rate.fp8_tflops:.4g} TFLOP/s, and {rate.bf16_tflops:.4g} in bfloat16"
    if rate.fp8_tflops < FASTER * rate.bf16_tflops:
        return Fp8(works=False, reason=f"it gives right values, but is not {FASTER:g} times as fast: {both}")
    return Fp8(works=True, reason=f"it gives right values, and is faster: {both}")


def _line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", text)


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
