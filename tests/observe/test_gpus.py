"""GPUs as the driver's library tells of them, with a stand-in for the library; and with the real one where it is."""

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
