"""Probes that compile: in the main thread, in a worker, under each named mode, in two threads at once.

Each compiles a width of its own, so that none finds in the cache what another compiled.
"""

import importlib
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.nets import CLOSE, devices, difference, forward_of, make_input, make_net, run, use
from paceline.probe.threads import Worker, in_worker

MODE_WIDTHS = {"default": 56, "reduce-overhead": 64, "max-autotune": 72, "max-autotune-no-cudagraphs": 80}


class _NotCompiledError(Exception):
    """Eager code ran where compiled code was asked for."""


def in_main_thread(bench: Bench) -> Finding:
    """Compile forward and backward in the main thread and compare with eager."""
    return _told([_attempt(device, 32) for device in devices(bench)])


def in_worker_thread(bench: Bench) -> Finding:
    """Compile forward and backward in a worker thread and compare with eager."""
    return _told([in_worker(partial(_attempt, device, 40)) for device in devices(bench)])


def named_mode(bench: Bench, mode: str) -> Finding:
    """Compile under a named mode in a worker; the main thread knows of graph trees first, as after a compile there."""
    with suppress(ImportError):
        importlib.import_module("torch._inductor.cudagraph_trees")  # its state belongs to the first importer
    try:
        seen = [in_worker(partial(_attempt, device, MODE_WIDTHS[mode], mode=mode)) for device in devices(bench)]
    except Exception as error:
        return Finding("refused", tell(error), saw="fails")
    told = _told(seen)
    if not bench.devices and "no-cudagraphs" not in mode and mode != "default":
        told = replace(told, observed=f"{told.observed}; a CPU has no CUDA graphs, so the mode went without")
    return replace(told, saw="works" if told.verdict == "ok" else "fails")


def two_threads(bench: Bench) -> Finding:
    """Compile in two threads that start together, on two GPUs where there are two."""
    first = devices(bench)[0]
    second = torch.device("cuda", 1) if bench.devices > 1 else first
    together = threading.Barrier(2)

    def body(device: torch.device, width: int) -> dict[str, Any]:
        together.wait()
        return _attempt(device, width)

    workers = [Worker(partial(body, device, width)) for device, width in ((first, 96), (second, 104))]
    return _told([worker.value() for worker in workers])


def _attempt(device: torch.device, width: int, **how: Any) -> dict[str, Any]:
    """Compare three compiled forwards and backwards with eager ones; graph trees warm up, record and replay in them."""
    use(device)
    net = make_net(device, width, blocks=1)
    x_ND = make_input(device, width)
    plain = forward_of(net)
    expected, _ = run(net, plain, x_ND)
    compiled = torch.compile(plain, dynamic=False, fullgraph=True, **how)
    worst, first_s = 0.0, 0.0
    for turn in range(3):
        began = time.perf_counter()
        got, was_compiled = run(net, compiled, x_ND)
        first_s = first_s or time.perf_counter() - began
        if not was_compiled:
            raise _NotCompiledError(
                f"turn {turn} ran eager code; compiling is switched off, for example by TORCH_COMPILE_DISABLE or "
                "TORCHDYNAMO_DISABLE in the environment"
            )
        worst = max(worst, difference(got, expected))
    return {"device": str(device), "first_call_s": round(first_s, 1), "difference": worst}


def _told(seen: list[dict[str, Any]]) -> Finding:
    """Return the finding of one or more attempts."""
    worst = max(one["difference"] for one in seen)
    calls = ", ".join(f"{one['first_call_s']} s on {one['device']}" for one in seen)
    text = f"first call took {calls}; differs from eager by {worst:.0e} at most"
    if not worst <= CLOSE:  # also where it is not a number
        return Finding("refused", f"wrong values: {text}, {CLOSE:.0e} is allowed", {"attempts": seen})
    return Finding("ok", text, {"attempts": seen})
