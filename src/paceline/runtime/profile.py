"""What `paceline doctor` found out about a machine, kept beside the cache, and the policy that follows from it.

A profile holds for one torch, one driver and one list of GPUs. Read with another of them it is stale.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.records import UserError

FORMAT: Final = 2  # of the file; a profile of another one is made again
FILE = "machine.json"

Policy = Literal["eager", "compiled", "captured"]
Flex = Literal["forward and backward", "forward only", "none"]
Speed = Annotated[float, Field(ge=1e-6, lt=1e9, allow_inf_nan=False)]  # what times are predicted from divides by it
Size = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]  # printed as it is, so nothing that moves a cursor
Day = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT[0-9:+.]*$")]
SHOWN: Final = 60  # characters of a damaged value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Device(_Frozen):
    """One GPU."""

    name: Line
    capability: Line
    memory_gib: Size


class Disk(_Frozen):
    """One file system: what paceline keeps there, and its speed where it could be written."""

    folder: str
    free_gib: Size
    write_mb_s: Size | None
    read_mb_s: Size | None


class Rates(_Frozen):
    """How fast a kind of GPU was seen to be."""

    bf16_tflops: Speed
    fp8_tflops: Speed | None  # null where there is none
    memory_gb_s: Speed  # read and written


class Fp8(_Frozen):
    """Whether products in fp8 are worth having on a kind of GPU, and why or why not."""

    works: bool  # right and faster: what `auto` needs
    reason: Line


class MachineKey(_Frozen):
    """What a profile holds for."""

    torch: Line
    driver: Line | None
    devices: tuple[Device, ...]


class MachineProfile(_Frozen):
    """What works on this machine, as it was seen."""

    format: Literal[2] = FORMAT
    made_at: Day
    python: Line
    machine: MachineKey
    compile_in_worker: bool
    capture_in_worker: bool
    flex_attention: dict[Line, Flex]  # by kind of device: "cpu" or a GPU's name
    peer_gb_s: tuple[tuple[Speed | None, ...], ...] = ()  # from row to column; null on the diagonal or where it failed
    rates: dict[Line, Rates] = {}  # by a GPU's name
    fp8: dict[Line, Fp8] = {}  # by a GPU's name
    disks: tuple[Disk, ...] = ()
    policy: Policy
    reason: Line


def choose_policy(*, gpu: bool, compiles: bool, captures: bool) -> tuple[Policy, str]:
    """Return the fastest policy that was seen to work, and why in a sentence."""
    if not compiles:
        return "eager", "Compiling in a worker thread did not work here, so nothing is compiled or captured."
    if not gpu:
        return "compiled", "Compiling in a worker thread works here; there is no GPU, so there is nothing to capture."
    if not captures:
        return "compiled", "Compiling in a worker thread works here; capturing a step in one did not, or not reliably."
    return "captured", "Compiling and capturing in a worker thread work here, also beside another busy thread."


def make_profile(
    machine: MachineKey,
    *,
    compiles: bool,
    captures: bool,
    flex_attention: dict[Line, Flex],
    peer_gb_s: tuple[tuple[float | None, ...], ...] = (),
    rates: dict[str, Rates] | None = None,
    fp8: dict[str, Fp8] | None = None,
    disks: tuple[Disk, ...] = (),
) -> MachineProfile:
    """Return a profile made now, with its policy."""
    policy, reason = choose_policy(gpu=bool(machine.devices), compiles=compiles, captures=captures)
    return MachineProfile(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        machine=machine,
        compile_in_worker=compiles,
        capture_in_worker=captures,
        flex_attention=flex_attention,
        peer_gb_s=peer_gb_s,
        rates=rates or {},
        fp8=fp8 or {},
        disks=disks,
        policy=policy,
        reason=reason,
    )


def cache_folder() -> Path:
    """Folder for what is made once and reused: $PACELINE_CACHE, else paceline's place in the user's cache folder."""
    own, xdg = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        base = Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache"  # the XDG rules ignore relative paths
    except RuntimeError as error:
        raise UserError("no home folder was found for the cache: name a folder in PACELINE_CACHE") from error
    return base / "paceline"


def profile_path() -> Path:
    """Return where this user's profile is."""
    return cache_folder() / FILE


def save_profile(profile: MachineProfile, path: Path) -> None:
    """Write the profile whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.model_dump_json(indent=2) + "\n")
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def load_profile(path: Path, here: MachineKey | None) -> tuple[MachineProfile | None, str]:
    """Return the profile and an empty text, or None and the reason, a sentence that says what to do.

    `here` is what it has to hold for; None takes that of any machine.
    """
    again = "Run `paceline doctor`." if here else "Name one that `paceline doctor` wrote on that machine."
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
    except FileNotFoundError:
        return None, f"There is no machine profile at {path}. {again}"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"The machine profile {path} cannot be read ({error}). {again}"
    found = raw.get("format") if isinstance(raw, dict) else None
    if found is True or found != FORMAT:
        return None, f"The machine profile {path} has format {_shown(found)}, this paceline reads {FORMAT}. {again}"
    try:
        profile = MachineProfile.model_validate_json(text, strict=True)  # strict: neither true nor "700" is a speed
    except ValidationError as error:
        return None, f"The machine profile {path} is damaged at {_damage(error)}. {again}"
    found = (profile.compile_in_worker, profile.capture_in_worker)
    policy, _ = choose_policy(gpu=bool(profile.machine.devices), compiles=found[0], captures=found[1])
    if profile.policy != policy:
        return None, (
            f"The machine profile {path} is damaged at policy, where {profile.policy!r} was found and {policy!r} "
            f"follows from what was seen. {again}"
        )
    if here is not None and (changed := _changes(profile.machine, here)):
        return None, f"The machine profile {path} is stale: it was made with {changed}. {again}"
    return profile, ""


def _damage(error: ValidationError) -> str:
    """Return where the first damage is and what was found there."""
    first = error.errors(include_url=False)[0]
    where = _shown(".".join(map(str, first["loc"])) or "its top").strip("'\"")
    if first["type"] == "missing":
        return f"{where}, which is missing"
    if first["type"] == "json_invalid":  # Python reads NaN and Infinity, JSON has neither
        return f"{where}, which is not JSON"
    return f"{where}, where {_shown(first['input'])} was found"


def _shown(value: object) -> str:
    """Return a value of a file as it can be printed in a sentence."""
    text = ascii(value)  # of a whole file at most: json.loads has read it
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _changes(then: MachineKey, now: MachineKey) -> str:
    """Return in words what differs, or an empty text."""
    said = []
    if then.torch != now.torch:
        said.append(f"torch {then.torch} and this is {now.torch}")
    if then.driver != now.driver:
        said.append(f"driver {then.driver or 'none'} and this is {now.driver or 'none'}")
    if _names(then) != _names(now):
        said.append(f"{_names(then)} and these are {_names(now)}")
    return ", ".join(said)


def _names(machine: MachineKey) -> str:
    # Memory is left out: a container may see a little more or less of the same GPU.
    return ", ".join(f"{device.name} ({device.capability})" for device in machine.devices) or "no GPU"


def this_machine() -> MachineKey:
    """Return what a profile has to be made with to hold here and now."""
    import torch  # late: the doctor itself has to work where torch cannot be imported

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        major, minor = torch.cuda.get_device_capability(index)
        memory = round(properties.total_memory / 2**30, 1)
        devices.append(Device(name=properties.name, capability=f"{major}.{minor}", memory_gib=memory))
    return MachineKey(torch=torch.__version__, driver=driver_version(), devices=tuple(devices))


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None where there is none; makes no CUDA context."""
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0 and text.value:
                    return text.value.decode()
            finally:
                nvml.nvmlShutdown()
    with suppress(OSError):
        if version := Path("/sys/module/nvidia/version").read_text(encoding="utf-8").strip():
            return version
    return _ask_nvidia_smi()


def _ask_nvidia_smi() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return None
