"""Probes of how fast a GPU is: matrix products in bfloat16 and fp8, and copies within its memory."""

import time
from collections.abc import Callable

import torch

from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.nets import devices, use
from paceline.target.products import has_fp8

SIDE, PRODUCTS = 8192, 20
COPY_BYTES, COPIES = 1 << 30, 10


def products_and_copies(bench: Bench) -> Finding:
    """Time large matrix products and copies on the first GPU of every kind."""
    rates: dict[str, dict[str, float | None]] = {}
    said, flaws = [], []
    for device in devices(bench):
        use(device)
        name = torch.cuda.get_device_name(device)
        bf16, memory = _tera(_bf16(device), device), _memory(device)
        fp8: float | None = None
        if has_fp8(device):
            try:
                fp8 = _tera(_fp8(device), device)
            except Exception as error:
                flaws.append(f"fp8 on {name}: {tell(error)}")
        rates[name] = {"bf16_tflops": bf16, "fp8_tflops": fp8, "memory_gb_s": memory}
        said.append(
            f"{name}: {bf16:.0f} TFLOP/s in bfloat16, {f'{fp8:.0f}' if fp8 else 'none'} in fp8, {memory:.0f} GB/s"
        )
    verdict = "degraded" if flaws else "ok"
    return Finding(verdict, "; ".join([*said, *flaws]), {"rates": rates})  # type: ignore[arg-type]


def _bf16(device: torch.device) -> Callable[[], object]:
    a = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16, generator=_generator(device))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _fp8(device: torch.device) -> Callable[[], object]:
    a = torch.randn(SIDE, SIDE, device=device, generator=_generator(device)).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)


def _tera(product: Callable[[], object], device: torch.device) -> float:
    """Return 10^12 operations a second."""
    return _rounded(2 * SIDE**3 / _seconds(product, PRODUCTS, device) / 1e12)


def _memory(device: torch.device) -> float:
    """Return GB/s that are read and written."""
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    return _rounded(2 * COPY_BYTES / _seconds(lambda: there.copy_(here), COPIES, device) / 1e9)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")  # of a slow device it must not become 0: predictions divide by it


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / times
