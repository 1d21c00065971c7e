"""GPUs as the driver's library tells of them, with a stand-in for the library; and with the real one where it is."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.observe import gpus
from paceline.observe.gpus import GpuReader, gpus_of, peak_flops


class NVMLError(Exception):
    pass


class Library:
    """A machine of three GPUs, by UUID; the second tells nothing but its name, the third is a part of one."""

    NVMLError = NVMLError

    def __init__(self, driver: bool = True) -> None:
        self._driver = driver

    def nvmlInit(self) -> None:
        if not self._driver:
            raise NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-aaa", "GPU-bbb", "MIG-ccc"):
            raise NVMLError(uuid)
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> Any:
        return f"card {handle}".encode() if handle == "GPU-aaa" else f"card {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "GPU-bbb":
            raise NVMLError
        return SimpleNamespace(used=3, total=8, free=5)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle != "GPU-aaa":
            raise NVMLError
        return SimpleNamespace(gpu=75, memory=10)


def uuid(device: str) -> str:
    """CUDA sees the machine's GPUs in another order, as with CUDA_VISIBLE_DEVICES."""
    return {"cuda:0": "ccc", "cuda:1": "aaa", "cuda:2": "bbb"}[device]


def test_a_device_is_found_by_its_uuid_and_what_is_not_told_is_none() -> None:
    reader = GpuReader(["cuda:2", "cpu", "cuda", "cuda:1", "cuda:1"], uuid=uuid, nvml=Library())
    assert reader.read() == [
        {
            "device": "cuda:0",
            "name": "card MIG-ccc",
            "memory_used_bytes": 3,
            "memory_total_bytes": 8,
            "utilisation": None,
        },
        {
            "device": "cuda:1",
            "name": "card GPU-aaa",
            "memory_used_bytes": 3,
            "memory_total_bytes": 8,
            "utilisation": 0.75,
        },
        {
            "device": "cuda:2",
            "name": "card GPU-bbb",
            "memory_used_bytes": None,
            "memory_total_bytes": None,
            "utilisation": None,
        },
    ]


def test_without_a_driver_and_on_a_cpu_there_is_nothing_to_read() -> None:
    assert GpuReader(["cuda:0"], uuid=uuid, nvml=Library(driver=False)).read() == []
    assert GpuReader(["cpu"], uuid=uuid, nvml=None).read() == []
    assert GpuReader(["cuda:0"], uuid=lambda device: "of nobody", nvml=Library()).read() == []


def test_devices_are_named_once_and_with_their_number() -> None:
    assert gpus_of(["cuda:3", "cpu", "cuda", "cuda:0"]) == ["cuda:0", "cuda:3"]


def test_peaks_are_known_by_whole_names() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_flops("A card of tomorrow") is None


@pytest.mark.gpu
def test_the_driver_agrees_with_cuda() -> None:
    (told,) = GpuReader(["cuda:0"]).read()
    (described,) = gpus.describe_gpus(["cuda:0"])
    assert told["name"] == described["name"] == torch.cuda.get_device_name(0)
    before = told["memory_used_bytes"]
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    (told,) = GpuReader(["cuda:0"]).read()
    # Others may use the device too, and a part of one counts in its own way; so only roughly.
    assert told["memory_used_bytes"] - before > 0.9 * held.nbytes
    assert told["memory_total_bytes"] == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.05)
    assert told["utilisation"] is None or 0 <= told["utilisation"] <= 1


# The driver's library as NVIDIA's nvml.h declares it, of a machine with one GPU.
DRIVER = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
static int gpu;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "not found"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &gpu;
    return strcmp(uuid, "GPU-11111111-2222-3333-4444-555555555555") ? 6 : 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    strncpy(name, "NVIDIA H200", length);
    return device == &gpu ? 0 : 2;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    *memory = (memory_t){150754820096ULL, 150754820096ULL - 7ULL * 1073741824, 7ULL * 1073741824};
    return device == &gpu ? 0 : 2;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
    *rates = (utilization_t){83, 40};
    return device == &gpu ? 0 : 2;
}
"""
READ = """
import json
from paceline.observe.gpus import GpuReader
uuids = {"cuda:0": "99999999-2222-3333-4444-555555555555", "cuda:1": "11111111-2222-3333-4444-555555555555"}
print(json.dumps(GpuReader(["cuda:0", "cuda:1"], uuid=uuids.get).read()))
"""


def test_the_real_binding_calls_the_driver_s_library_as_it_is_declared(tmp_path: Path) -> None:
    """nvidia-ml-py itself, over a library with the functions and structures of nvml.h."""
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    for path, found in ((str(tmp_path), True), ("", False)):
        told = subprocess.run(
            [sys.executable, "-c", READ],
            env=os.environ | {"LD_LIBRARY_PATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        one = {"device": "cuda:1", "name": "NVIDIA H200", "memory_used_bytes": 7 * 2**30}
        one |= {"memory_total_bytes": 150754820096, "utilisation": 0.83}
        # A machine that has a driver does not know these GPUs.
        assert json.loads(told.stdout) == ([one] if found else [])
