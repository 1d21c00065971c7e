"""Probes of the machine without compiling: torch and its GPUs, cores and memory, limits, compiler, disk, ports."""

import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.probe.finding import Bench, Finding, tell
from paceline.records import many
from paceline.runtime.profile import driver_version

GIB = 1 << 30
DISK_BYTES, DISK_CHUNK, DISK_S = 128 << 20, 8 << 20, 8.0
LOW_ROOM, LOW_MB_S = 5 * GIB, 30.0
LOW_FILES, LOW_FREE_SHARE = 1024, 0.5
STARTED = ("_dynamo", "_inductor", "_functorch", "fx")  # of torch: what every process that compiles imports
SETTINGS = (
    "OMP_WAIT_POLICY",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
)


def torch_and_gpus(bench: Bench) -> Finding:
    """Import torch, list the GPUs, and run a kernel on each; `bench.devices` is not known yet."""
    import torch

    cuda = torch.version.cuda
    numbers: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": cuda,
        "driver": driver_version(),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "devices": [],
    }
    text = f"torch {torch.__version__}, Python {numbers['python']}"
    if cuda is None:
        return Finding("ok", f"{text}, built for CPU", numbers)
    text += f", CUDA {cuda}, driver {numbers['driver'] or 'not found'}, Triton {numbers['triton'] or 'not found'}"
    if not torch.cuda.is_available():
        there = numbers["driver"] or Path("/dev/nvidia0").exists()
        return Finding("degraded" if there else "ok", f"{text}; no GPU can be used", numbers)
    numbers["arch_list"] = torch.cuda.get_arch_list()
    flaws: list[str] = []
    for index in range(torch.cuda.device_count()):
        numbers["devices"].append(_device(index, numbers["arch_list"], flaws))
    names = {device["name"] for device in numbers["devices"]}
    text += f"; {len(numbers['devices'])} × {' and '.join(sorted(names))}"
    return Finding("refused" if flaws else "ok", "; ".join([text, *flaws]), numbers)


def _device(index: int, archs: list[str], flaws: list[str]) -> dict[str, Any]:
    """Return what a GPU is; add to the flaws when it runs no kernel."""
    import torch

    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    try:
        values = torch.arange(1024, device=device, dtype=torch.float32)
        right = values.sum().item() == 523776.0
        flaw = "" if right else "a sum is wrong"
    except Exception as error:
        flaw = tell(error)
    own = f"sm_{major}{minor}"
    if flaw:
        flaws.append(f"cuda:{index} ({own}) runs no kernel: {flaw}; this torch is built for {', '.join(archs)}")
    total = torch.cuda.get_device_properties(device).total_memory
    return {
        "name": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "memory_gib": round(total / GIB, 1),
        "in_arch_list": any(arch.rstrip("af") == own for arch in archs),  # sm_90a and sm_100f are built for one chip
        "works": not flaw,
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu_memory(bench: Bench) -> Finding:
    """Read each GPU's free memory and allocate an eighth of it."""
    import torch

    parts, numbers, low = [], [], False
    for index in range(bench.devices):
        free, total = torch.cuda.mem_get_info(index)
        held = torch.zeros(free // 8, dtype=torch.uint8, device=f"cuda:{index}")
        torch.cuda.synchronize(index)
        del held
        torch.cuda.empty_cache()
        low = low or free < total * LOW_FREE_SHARE
        parts.append(f"cuda:{index} {free / GIB:.0f} of {total / GIB:.0f} GiB free")
        numbers.append({"free_gib": round(free / GIB, 1), "total_gib": round(total / GIB, 1)})
    return Finding("degraded" if low else "ok", ", ".join(parts), {"devices": numbers})


def cores_and_memory(bench: Bench) -> Finding:
    """Read cores and memory, and the limits of the container."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    usable = min(float(cores), quota or float(cores))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _memory_limit()
    available = _available()
    text = many(cores, "core") + (f" (the container may use {quota:g})" if quota and quota < cores else "")
    text += f", {total / GIB:.0f} GiB of memory"
    text += f" (the container may use {limit / GIB:.0f})" if limit and limit < total else ""
    text += f", {available / GIB:.0f} GiB available" if available else ""
    numbers = {"cores": usable, "memory_gib": round(min(total, limit or total) / GIB, 1)}
    small = usable < 2 or min(total, limit or total, available or total) < 4 * GIB
    return Finding("degraded" if small else "ok", text, numbers)


def about_machine() -> dict[str, Any]:
    """Return what a run says of the machine that it is on; cores and memory are those that it may use."""
    cores, total = float(len(os.sched_getaffinity(0))), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": min(cores, _cpu_quota() or cores),
        "memory_bytes": min(total, _memory_limit() or total),
    }


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (text := _read(path)).isdecimal():  # version 2 says "max" where there is none
            return int(text)
    return None


def _cpu_quota() -> float | None:
    words = _read("/sys/fs/cgroup/cpu.max").split()
    if len(words) != 2:
        words = [_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(word.isdecimal() and int(word) for word in words):  # "max" or -1 where there is none
        return int(words[0]) / int(words[1])
    return None


def _available() -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def limits_and_settings(bench: Bench) -> Finding:
    """Read the limit on open files, the size of /dev/shm, and the environment variables that change a run."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    open_files = "any number of" if files == resource.RLIM_INFINITY else f"{files:,}"
    text = f"{open_files} open files, /dev/shm {shared / GIB:.1f} GiB"
    text += "".join(f", {name}={value}" for name, value in settings.items())
    few = files != resource.RLIM_INFINITY and files < LOW_FILES
    numbers = {"open_files": files, "shm_gib": round(shared / GIB, 2), "settings": settings}
    return Finding("degraded" if few else "ok", text, numbers)


def compiler(bench: Bench) -> Finding:
    """Compile a file that includes Python.h, as inductor and Triton do."""
    import sysconfig

    named = [os.environ[name] for name in ("CXX",) if os.environ.get(name)] + ["c++", "g++", "clang++"]
    found = next((name for name in named if shutil.which(name.split()[0])), None)
    if found is None:
        return Finding("refused", "there is no C++ compiler: none of c++, g++ and clang++ is on the PATH")
    with tempfile.TemporaryDirectory(dir=bench.scratch) as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <Python.h>\nint probe() { return PY_MAJOR_VERSION; }\n", encoding="utf-8")
        include = sysconfig.get_paths()["include"]
        command = [*found.split(), "-c", "-fPIC", f"-I{include}", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[0]
        return Finding("refused", f"{found} compiles no file that includes Python.h and says: {said[:200]}")
    version = subprocess.run(
        [*found.split(), "--version"], capture_output=True, text=True, errors="replace", timeout=60
    )
    return Finding("ok", f"{(version.stdout.splitlines() or [found])[0]} compiles a file that includes Python.h")


def python_modules(bench: Bench) -> Finding:
    """Look whether Python has kept what it compiled of torch, which an earlier probe imported; if not, compile it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return Finding("skipped", "torch is not installed")
    kept = Path(importlib.util.cache_from_source(torch.origin))
    if kept.exists():
        return Finding("ok", "Python keeps what it has compiled of torch")
    folders = [Path(torch.origin).parent / name for name in STARTED]
    count = sum(1 for folder in folders for _ in folder.rglob("*.py"))
    with tempfile.TemporaryDirectory(dir=bench.scratch) as place:
        began = time.perf_counter()
        command = [sys.executable, "-m", "compileall", "-q", *map(str, folders)]
        subprocess.run(command, env=os.environ | {"PYTHONPYCACHEPREFIX": place}, capture_output=True, timeout=90)
        seconds = time.perf_counter() - began
    forbidden = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{kept.parent} is not written"
    took = f"the {count:,} modules of torch's compiler alone took {seconds:.1f} s"
    return Finding("degraded", f"{forbidden}: every process compiles Python's modules anew; {took}", {"s": seconds})


def disk(bench: Bench) -> Finding:
    """Write, sync and read a file in the folders of cache, runs and temporary files, once for each file system."""
    seen: dict[int, dict[str, Any]] = {}
    for what, name in (("cache", bench.cache), ("runs", bench.runs), ("temporary", bench.scratch)):
        folder = _existing(Path(name))
        place = folder.stat().st_dev
        if place in seen:
            seen[place]["for"].append(what)
        else:
            seen[place] = {"for": [what], "folder": str(folder), **_disk_speed(folder)}
    parts, bad, slow = [], False, False
    for one in seen.values():
        speed = one["flaw"] or f"writes {one['write_mb_s']:.0f}, reads {one['read_mb_s']:.0f} MB/s"
        parts.append(f"{'/'.join(one['for'])}: {one['free_gib']:.0f} GiB free, {speed}")
        bad = bad or bool(one["flaw"])
        slow = slow or one["free_gib"] < LOW_ROOM / GIB or (one["write_mb_s"] or 0.0) < LOW_MB_S
    verdict = "refused" if bad else "degraded" if slow else "ok"
    return Finding(verdict, "; ".join(parts), {"disks": list(seen.values())})  # type: ignore[arg-type]


def _existing(folder: Path) -> Path:
    """Return the folder or the first one above it that is there."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _disk_speed(folder: Path) -> dict[str, Any]:
    """Return free room and MB/s; the file has no name, so nothing is left behind even by a killed process."""
    free = shutil.disk_usage(folder).free
    empty: dict[str, Any] = {"free_gib": round(free / GIB, 1), "write_mb_s": None, "read_mb_s": None, "flaw": ""}
    if free < 2 * DISK_BYTES:
        return empty | {"flaw": f"too little room for a trial of {DISK_BYTES >> 20} MiB"}
    chunk = os.urandom(DISK_CHUNK)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            written, began = 0, time.perf_counter()
            while written < DISK_BYTES and time.perf_counter() - began < DISK_S:
                written += file.write(chunk)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
            file.seek(0)
            began = time.perf_counter()
            while file.read(DISK_CHUNK):
                pass
            read_s = time.perf_counter() - began
    except OSError as error:
        return empty | {"flaw": f"cannot be written ({error.strerror or error})"}
    speeds = {"write_mb_s": round(written / write_s / 1e6, 1), "read_mb_s": round(written / read_s / 1e6, 1)}
    return empty | speeds


def ports(bench: Bench) -> Finding:
    """Listen on a free port of the loopback address and let a second process connect."""
    caller = (
        "import socket,sys\nwith socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10) as s:\n s.sendall(b'x')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(15.0)
        port = server.getsockname()[1]
        with subprocess.Popen([sys.executable, "-I", "-c", caller, str(port)], stderr=subprocess.PIPE) as other:
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(10.0)
                    got = connection.recv(1)
            except TimeoutError:
                other.kill()
                said = (other.communicate()[1].decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
                return Finding("refused", f"no process could connect to port {port} of 127.0.0.1; it said: {said}")
    if got != b"x":
        return Finding("refused", f"a process connected to port {port} of 127.0.0.1, but its byte did not arrive")
    return Finding("ok", f"a second process reached port {port} of 127.0.0.1", {"port": port})
