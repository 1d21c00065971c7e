"""Probes that capture CUDA graphs by hand in a worker thread: quiet, and while another thread uses the same device.

Everything of a step runs on one side stream, warm-up included, and backward in the thread itself. Shapes: N rows,
D width.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.nets import (
    CLOSE,
    Forward,
    Run,
    devices,
    difference,
    forward_of,
    make_input,
    make_net,
    same_bits,
    use,
)
from paceline.probe.threads import Worker, in_worker

WIDTH, INPUTS, WARM_UP, CAPTURES, TIMED = 256, 3, 3, 4, 30
OVERLAP_S = 10.0  # how long an open capture waits for the other thread to get on


@dataclass(slots=True, eq=False)
class _Step:
    """Forward and backward on static buffers: input, gradients and, once captured, the loss."""

    net: nn.Module
    forward: Forward
    x_ND: Tensor
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __call__(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        loss, _ = self.forward(self.x_ND)
        loss.backward()
        self.loss = loss.detach()  # the graph of autograd goes, and with it what is bound to a stream

    def result(self) -> Run:
        """Return copies of what the last step left behind."""
        torch.cuda.synchronize()
        grads = tuple(p.grad.clone() for p in self.net.parameters() if p.grad is not None)
        seen = Run(self.loss.clone(), grads)
        torch.cuda.synchronize()  # whatever stream compares them
        return seen


class _Noise:
    """Another thread on the same device, which does a thing over and over until it is told to stop or fails."""

    def __init__(self, device: torch.device, act: Callable[[], object]) -> None:
        self.rounds = 0
        self._stop = Event()
        self._device, self._act = device, act
        self._worker = Worker(self._loop, "probe-noise")

    def _loop(self) -> None:
        use(self._device)
        while not self._stop.is_set():
            self._act()
            self.rounds += 1

    @property
    def failed(self) -> bool:
        """Whether the thread ended with an exception."""
        return self._worker.error is not None

    def wait_for(self, rounds: int) -> None:
        """Wait until it got on by so many rounds, failed, or stood still for too long."""
        goal, until = self.rounds + rounds, time.monotonic() + OVERLAP_S
        while self.rounds < goal and not self.failed and time.monotonic() < until:
            time.sleep(0.001)

    def end(self) -> str:
        """Stop the thread; return what it raised, or nothing."""
        self._stop.set()
        self._worker.join()
        return tell(self._worker.error) if self._worker.error else ""


def compiled_step(bench: Bench) -> Finding:
    """Capture a compiled step in a worker; its replay equals the compiled step bit for bit, and eager nearly."""
    return _told([in_worker(partial(_quiet, device, True)) for device in devices(bench)])


def eager_step(bench: Bench) -> Finding:
    """Capture an eager step in a worker; its replay equals the eager step bit for bit."""
    return _told([in_worker(partial(_quiet, device, False)) for device in devices(bench)])


def while_allocating(bench: Bench) -> Finding:
    """Capture while another thread runs forwards, allocates and empties the cache on the same device."""
    device = devices(bench)[0]

    def act() -> None:
        net, x_ND = _other_net(device)
        with torch.inference_mode():
            room = torch.empty(64 << 20, dtype=torch.uint8, device=device)
            net(x_ND).sum().item()
        del room
        torch.cuda.empty_cache()

    return _beside(device, act)


def while_drawing_own(bench: Bench) -> Finding:
    """Capture while another thread draws from a generator of its own on the same device."""
    device = devices(bench)[0]
    generator = torch.Generator(device=device)
    return _beside(device, lambda: torch.randn(1024, device=device, generator=generator).sum().item())


def while_drawing_default(bench: Bench) -> Finding:
    """Capture while another thread draws from the device's default generator. Expect that thread to fail."""
    device = devices(bench)[0]
    found = _beside(device, lambda: torch.randn(1024, device=device).sum().item())
    return Finding("ok", found.observed, found.numbers, saw="works" if found.verdict == "ok" else "fails")


def _other_net(device: torch.device) -> tuple[nn.Module, Tensor]:
    return make_net(device, 64), make_input(device, 64)


def static_step(device: torch.device, compiled: bool) -> _Step:
    """Return a step on static buffers."""
    net = make_net(device, WIDTH)
    forward = forward_of(net)
    if compiled:
        forward = torch.compile(forward, dynamic=False, fullgraph=True)
    return _Step(net, forward, make_input(device, WIDTH))


def run_all(act: Callable[[], object], step: _Step, inputs: list[Tensor]) -> list[Run]:
    """Load each input into the static buffer, act, and keep the result."""
    seen = []
    for x_ND in inputs:
        step.x_ND.copy_(x_ND)
        act()
        seen.append(step.result())
    return seen


def open_capture(
    step: _Step, stream: torch.cuda.Stream, pool: Any, during: Callable[[], object]
) -> torch.cuda.CUDAGraph:
    """Capture a step; `during` runs while the capture is open."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        step()
        during()
    return graph


def _quiet(device: torch.device, compiled: bool) -> dict[str, Any]:
    """Capture with nothing beside it; compare replays with the same step and with eager, and time all of them."""
    use(device)
    stream = torch.cuda.Stream(device)
    inputs = [make_input(device, WIDTH, seed) for seed in range(INPUTS)]
    torch.cuda.synchronize()
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
        plain = static_step(device, False)
        eager = run_all(plain, plain, inputs)
        step = static_step(device, compiled)
        for _ in range(WARM_UP):
            step()
        wanted = run_all(step, step, inputs)
        times = {"eager": _time(plain), "compiled": _time(step)} if compiled else {"eager": _time(plain)}
        graph = open_capture(step, stream, torch.cuda.graph_pool_handle(), lambda: None)
        got = run_all(graph.replay, step, inputs)
        times["captured"] = _time(graph.replay)
    return {
        "device": str(device),
        "same_bits": all(map(same_bits, got, wanted)),
        "difference": max(map(difference, got, wanted)),
        "difference_eager": max(map(difference, got, eager)),
        "ms": {name: round(ms, 3) for name, ms in times.items()},
    }


def _time(act: Callable[[], object]) -> float:
    """Return milliseconds of a call, the mean of some."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / TIMED * 1e3


def _told(seen: list[dict[str, Any]]) -> Finding:
    parts = []
    for one in seen:
        equal = "equal bit for bit" if one["same_bits"] else f"differ by {one['difference']:.0e}"
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in one["ms"].items())
        parts.append(f"{one['device']}: replays {equal}; ms a step: {times}")
    text, numbers = "; ".join(parts), {"attempts": seen}
    worst = max(max(one["difference"], one["difference_eager"]) for one in seen)
    if not worst <= CLOSE:
        return Finding("refused", f"wrong values (off by {worst:.0e}): {text}", numbers)
    return Finding("ok" if all(one["same_bits"] for one in seen) else "degraded", text, numbers)


def _beside(device: torch.device, act: Callable[[], object]) -> Finding:
    """Capture an eager step several times while another thread does a thing; an open capture waits for the thread."""
    return in_worker(partial(_captures_beside, device, act))


def _captures_beside(device: torch.device, act: Callable[[], object]) -> Finding:
    use(device)
    stream = torch.cuda.Stream(device)
    inputs = [make_input(device, WIDTH, seed) for seed in range(INPUTS)]
    torch.cuda.synchronize()
    good, overlapped, failure = 0, 0, ""
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
        step = static_step(device, False)
        for _ in range(WARM_UP):
            step()
        wanted = run_all(step, step, inputs)
        pool = torch.cuda.graph_pool_handle()
        noise = _Noise(device, act)
        noise.wait_for(2)
        try:
            for _ in range(CAPTURES):
                before = noise.rounds
                graph = open_capture(step, stream, pool, lambda: noise.wait_for(3))
                overlapped += noise.rounds - before
                got = run_all(graph.replay, step, inputs)
                good += max(map(difference, got, wanted)) <= CLOSE
        except Exception as error:
            failure = tell(error)
        with suppress(Exception):  # after a failed capture this fails again, and is told already
            torch.cuda.synchronize()
        said = noise.end()
    text = f"{good} of {CAPTURES} captures replay right values during {overlapped} rounds of the other thread"
    text += f"; the capture: {failure}" if failure else ""
    text += f"; the other thread: {said}" if said else ""
    fine = good == CAPTURES and not said and overlapped
    return Finding("ok" if fine else "refused", text, {"captures": good, "rounds": overlapped})
