"""Probes of two drafters' threads, each with a GPU of its own: capturing at once, and sharing what one compiles.

Shapes: N rows, D width.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from paceline.probe.capture import INPUTS, WARM_UP, WIDTH, open_capture, run_all, static_step
from paceline.probe.finding import Bench, Finding
from paceline.probe.nets import CLOSE, devices, difference, make_input, make_net, run, same_bits, use
from paceline.probe.threads import Worker

ROUNDS = 3  # of captures
TOGETHER_S = 30.0  # how long a thread waits for the other one, with its capture open
SHARED_WIDTH, CALLS = 112, 20


def capture_at_once(bench: Bench) -> Finding:
    """Capture a step in two threads on two GPUs, each capture open until the other is; replays have the step's bits."""
    return told_captures(together([torch.device("cuda", 0), torch.device("cuda", 1)], _captures))


def one_compile(bench: Bench) -> Finding:
    """Compile one function for a drafter on each of two GPUs, one after the other, and then run both at once."""
    two = [torch.device("cuda", index) for index in range(2)] if bench.devices > 1 else 2 * devices(bench)
    return shared_compile(two)


def together(
    where: Sequence[torch.device], body: Callable[[torch.device, Callable[[], object]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run a body on each device in a thread of its own; its second argument waits until all threads are there.

    Raises:
        Exception: what the first thread to fail raised; who waits for it gives up.
    """
    barrier = threading.Barrier(len(where))
    failed: list[BaseException] = []

    def guarded(device: torch.device) -> dict[str, Any]:
        try:
            return body(device, partial(barrier.wait, TOGETHER_S))
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise

    workers = [Worker(partial(guarded, device), f"probe-{device}") for device in where]
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    return [worker.result for worker in workers]


def _captures(device: torch.device, meet: Callable[[], object]) -> dict[str, Any]:
    """Capture an eager step several times; nobody ends a capture before everybody's is open."""
    use(device)
    stream = torch.cuda.Stream(device)
    inputs = [make_input(device, WIDTH, seed) for seed in range(INPUTS)]
    torch.cuda.synchronize(device)
    same, worst = True, 0.0
    with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
        step = static_step(device, False)
        for _ in range(WARM_UP):
            step()
        wanted = run_all(step, step, inputs)
        pool = torch.cuda.graph_pool_handle()
        for _ in range(ROUNDS):
            meet()
            graph = open_capture(step, stream, pool, meet)
            got = run_all(graph.replay, step, inputs)
            same = same and all(map(same_bits, got, wanted))
            worst = max(worst, *map(difference, got, wanted))
    return {"device": str(device), "captures": ROUNDS, "same_bits": same, "difference": worst}


def told_captures(seen: Sequence[dict[str, Any]]) -> Finding:
    """Return the finding of captures that were open at once."""
    parts = [
        f"{one['device']}: replays {'equal bit for bit' if one['same_bits'] else 'differ'} after {one['captures']}"
        for one in seen
    ]
    text = "captures that were open at once; " + "; ".join(parts)
    if not all(one["difference"] <= CLOSE for one in seen):  # also where it is not a number
        return Finding("refused", f"wrong values: {text}", {"attempts": list(seen)})
    verdict = "ok" if all(one["same_bits"] for one in seen) else "degraded"
    return Finding(verdict, text, {"attempts": list(seen)})  # type: ignore[arg-type]


def shared_compile(where: Sequence[torch.device]) -> Finding:
    """Warm one compiled function up on one device after the other, then call it in all threads at once.

    Nothing may be compiled any more by then. A warm-up that generates code again costs time at the start, no more.
    """
    compiled = torch.compile(_loss, dynamic=False, fullgraph=True)
    warm = [Worker(partial(_warmed, compiled, device), f"probe-{device}").value() for device in where]
    torch.compiler.set_stance("fail_on_recompile")
    try:
        calls = together(where, partial(_calls, compiled))
    finally:
        torch.compiler.set_stance("default")
    worst = max(one["difference"] for one in (*warm, *calls))
    first, *others = (f"{one['seconds']} s on {one['device']}" for one in warm)
    text = f"{first}, then {', '.join(others)}; {CALLS} calls in each thread at once compiled nothing"
    numbers = {"warm_up": warm, "calls": calls}
    if not worst <= CLOSE:
        return Finding("refused", f"wrong values (off by {worst:.0e}): {text}", numbers)
    if any(one["generated"] for one in warm[1:]):
        return Finding("degraded", f"generated again for the second: {text}", numbers)
    how = "traced again, its code was found" if any(one["traced"] for one in warm[1:]) else "nothing again"
    return Finding("ok", f"for the second {how}: {text}", numbers)


def _loss(net: nn.Module, x_ND: Tensor) -> tuple[Tensor, bool]:
    """Return a network's loss; one function for all devices, as drafters' steps have one code."""
    return net(x_ND).float().square().mean(), torch.compiler.is_compiling()


def _warmed(compiled: Callable[..., Any], device: torch.device) -> dict[str, Any]:
    """Compare a first compiled forward and backward with an eager one, and count what was compiled for it."""
    use(device)
    before, began = _compiled_so_far(), time.perf_counter()
    found = {"difference": _off(compiled, device), "seconds": round(time.perf_counter() - began, 1)}
    traced, generated = (now - then for now, then in zip(_compiled_so_far(), before, strict=True))
    return {"device": str(device), **found, "traced": traced, "generated": generated}


def _calls(compiled: Callable[..., Any], device: torch.device, meet: Callable[[], object]) -> dict[str, Any]:
    use(device)
    meet()
    return {"device": str(device), "difference": max(_off(compiled, device) for _ in range(CALLS))}


def _off(compiled: Callable[..., Any], device: torch.device) -> float:
    """Return how far a compiled forward and backward are from eager ones."""
    net, x_ND = make_net(device, SHARED_WIDTH, blocks=1), make_input(device, SHARED_WIDTH)
    expected, _ = run(net, partial(_loss, net), x_ND)
    got, was_compiled = run(net, partial(compiled, net), x_ND)
    if not was_compiled:
        raise RuntimeError("eager code ran where compiled code was asked for")
    return difference(got, expected)


def _compiled_so_far() -> tuple[int, int]:
    """Return how many graphs this process has traced, and of how many inductor has generated code."""
    return counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"]
