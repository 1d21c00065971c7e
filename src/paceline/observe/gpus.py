"""What the driver says of GPUs, through NVML: memory and how busy they are. Nothing here waits for a GPU or wakes one.

CUDA numbers the devices that CUDA_VISIBLE_DEVICES leaves, NVML all of the machine; both know a device's UUID.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pynvml
import torch

# Dense bfloat16 operations a second with float32 sums, by the name that the driver gives: NVIDIA's data sheets, where
# those name the rate with sparsity half of it; GeForce: the white papers of Ampere (GA102), Ada and Blackwell.
_PEAKS = {
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA GH200 480GB": 989.5e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H800": 989.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
}


def peak_flops(name: str) -> float | None:
    """Return a GPU's dense bfloat16 operations a second by its name, None where they are not known."""
    return _PEAKS.get(name)


def gpus_of(devices: Sequence[str]) -> list[str]:
    """Return the GPUs among devices, each once and with its number: `cuda` is `cuda:0`."""
    found = [torch.device(name) for name in devices]
    numbers = sorted({device.index or 0 for device in found if device.type == "cuda"})
    return [f"cuda:{number}" for number in numbers]


def describe_gpus(devices: Sequence[str]) -> list[dict[str, Any]]:
    """Return name, memory and peak of the GPUs among devices, as torch names them."""
    found = []
    for device in gpus_of(devices):
        made = torch.cuda.get_device_properties(device)
        peak = peak_flops(made.name)
        found.append({"device": device, "name": made.name, "memory_bytes": made.total_memory, "peak_flops": peak})
    return found


def _uuid(device: str) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class GpuReader:
    """Reads the GPUs among some devices. Without a driver, or one that knows them, it finds none."""

    def __init__(self, devices: Sequence[str], *, uuid: Callable[[str], str] = _uuid, nvml: Any = pynvml) -> None:
        """`uuid` returns a CUDA device's without a prefix."""
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        names = gpus_of(devices)
        if not names:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        for device in names:
            for kind in ("GPU", "MIG"):  # a part of a GPU has another prefix
                with suppress(nvml.NVMLError):
                    self._handles[device] = nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid(device)}")
                    break

    def read(self) -> list[dict[str, Any]]:
        """Return memory and utilisation of each GPU; what its driver does not tell is None."""
        return [self._one(device, handle) for device, handle in self._handles.items()]

    def _one(self, device: str, handle: Any) -> dict[str, Any]:
        name = self._asked(self._nvml.nvmlDeviceGetName, handle)
        memory = self._asked(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._asked(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        return {
            "device": device,
            "name": name.decode() if isinstance(name, bytes) else name,
            "memory_used_bytes": memory and int(memory.used),
            "memory_total_bytes": memory and int(memory.total),
            "utilisation": rates and rates.gpu / 100,
        }

    def _asked(self, what: Callable[[Any], Any], handle: Any) -> Any:
        try:
            return what(handle)
        except self._nvml.NVMLError:
            return None
