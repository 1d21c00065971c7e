"""What threads do to one another while one of them traces, compiles or resets: the reasons for the gate."""

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from paceline.probe.finding import Bench, Finding, tell
from paceline.probe.threads import Worker, in_worker

PATIENCE_S = 20.0  # for the other thread of a probe


def settings_in_threads(bench: Bench) -> Finding:
    """Set a dynamo setting in the main thread; read it in a plain thread and in a copied context."""
    import torch._dynamo.config as config

    before = config.recompile_limit
    mark = before + 69

    def read() -> int:
        return int(config.recompile_limit)

    config.recompile_limit = mark
    try:
        plain = in_worker(read)
        context = contextvars.copy_context()
        copied = in_worker(lambda: context.run(read))
    finally:
        config.recompile_limit = before
    text = f"set {mark} in the main thread; a plain thread reads {plain}, one with a copied context {copied}"
    numbers = {"set": mark, "plain": plain, "copied": copied}
    saw = "inherited" if plain == mark else "not inherited"
    return Finding("ok" if copied == mark else "degraded", text, numbers, saw=saw)


def graph_trees_state(bench: Bench) -> Finding:
    """Ask in a worker for the thread-local state of CUDA graph trees; needs no GPU."""
    try:
        import torch._inductor.cudagraph_trees as trees

        lookup, local = trees.get_obj, trees.local
    except (ImportError, AttributeError) as error:
        return Finding("skipped", f"this torch keeps that state elsewhere ({tell(error)})")
    try:
        in_worker(lambda: lookup(local, "tree_manager_containers"))
    except Exception as error:
        return Finding("ok", f"a worker has none: {tell(error)}", saw="fails")
    return Finding("ok", "a worker gets its own", saw="works")


def is_compiling_elsewhere(bench: Bench) -> Finding:
    """Read `torch.compiler.is_compiling()` in one thread while another compiles."""
    inside, done = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        inside.set()
        done.wait(PATIENCE_S)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(double, backend=backend, dynamic=False)
    other = Worker(lambda: compiled(torch.ones(4)))
    try:
        if not inside.wait(PATIENCE_S):
            return Finding("degraded", "the other thread did not begin to compile")
        leaks = torch.compiler.is_compiling()
    finally:
        done.set()
    other.value()
    text = f"is_compiling() is {leaks} here while another thread compiles"
    return Finding("ok", text, saw="leaks" if leaks else "does not leak")


def modules_while_tracing(bench: Bench) -> Finding:
    """Call an eager module while another thread is inside torch.fx's symbolic trace."""
    inside, done = threading.Event(), threading.Event()

    def traced(x: Tensor) -> Tensor:
        inside.set()
        done.wait(PATIENCE_S)
        return x + 1

    net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    other = Worker(lambda: torch.fx.symbolic_trace(traced))
    try:
        if not inside.wait(PATIENCE_S):
            return Finding("degraded", "the other thread did not begin to trace")
        net(torch.ones(1, 4))
        finding = Finding("ok", "the module ran", saw="works")
    except Exception as error:
        finding = Finding("ok", f"the module failed: {tell(error)}", saw="fails")
    finally:
        done.set()
    with suppress(Exception):  # what a module in another thread does to the trace is not the question
        other.value()
    return finding


def reset_under_warm_code(bench: Bench) -> Finding:
    """Reset dynamo over and over while four threads call compiled code. Expect a crash of this process."""
    stop = threading.Event()
    calls = [0] * 4

    def make(place: int) -> Callable[[], None]:
        def loop() -> None:
            compiled = torch.compile(lambda x: (x.sin() + place).sum(), backend="eager", dynamic=False)
            while not stop.is_set():
                compiled(torch.ones(8))
                calls[place] += 1

        return loop

    workers = [Worker(make(place)) for place in range(4)]
    _wait_until(lambda: min(calls) > 10 or any(worker.error for worker in workers))
    for _ in range(40):
        torch.compiler.reset()
        time.sleep(0.02)
    stop.set()
    for worker in workers:
        worker.join()
    raised = [tell(worker.error) for worker in workers if worker.error]
    text = f"survived 40 resets during {sum(calls):,} calls"
    return Finding("ok", f"{text}; {len(raised)} of 4 threads raised {raised[0]}" if raised else text)


def _wait_until(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not ready() and time.monotonic() < until:
        time.sleep(0.01)
