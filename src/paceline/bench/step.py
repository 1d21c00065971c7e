"""`paceline bench step`: the drafter's step under every policy, in a worker thread as in a run, and peers' steps.

Each policy and peer is measured in a process of its own, so that none finds memory of another. Code that was compiled
before is found again, in this run or an earlier one; `compiled` and `found` count both.
"""

import math
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.figures import brief, show_rows
from paceline.bench.peer_step import measure_peer, peer_variants
from paceline.bench.peers import PeerName, check_peer
from paceline.bench.shapes import SHAPES
from paceline.bench.timing import gib, round_times, step_figures, wait
from paceline.bench.weights import random_drafter, random_ends
from paceline.bench.work import CLIP, RATE, Work, asked
from paceline.drafter.float8 import check_sizes, product_sizes
from paceline.observe.console import Console
from paceline.records import FeatureBatch, RunError, UserError
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.runtime.interpreter import quick_handovers
from paceline.target.products import check_fp8
from paceline.train.step import DrafterStep

OURS = "paceline"
_FIRST = ("step_ms", "blocks_per_s")  # what is told of a row as soon as it is there


def bench_step(
    work: Work, policies: Sequence[Policy], console: Console, peers: Sequence[PeerName] = ()
) -> list[dict[str, Any]]:
    """Measure each peer and then each policy, and return a row for each.

    Raises:
        UserError: a peer is not here, or the work is not one that peers, the number format or the device can do.
        RunError: every policy failed; the last one's cause is told. Of one that fails a row says why, as of a peer.
    """
    _check(work, policies, peers)
    rows: list[dict[str, Any]] = []
    for peer in peers:
        for variant in peer_variants(peer):
            console.stage(f"{work.shape.name} {peer} {variant}")
            try:
                rows.append(_in_process(work, measure_peer, peer, variant))
            except RunError as error:  # the others are worth measuring all the same
                rows.append({"who": peer, "policy": variant, "blocks_per_s": None, "failed": str(error)})
            console.line(brief(rows[-1], *_FIRST))
    best = max((row["blocks_per_s"] for row in rows if row["blocks_per_s"]), default=None)
    for policy in policies:
        console.stage(f"{work.shape.name} {policy}")
        try:
            row = _in_process(work, _in_thread, policy, time.time())
            row["ratio_to_best_peer"] = best and round(row["blocks_per_s"] / best, 3)
        except RunError as error:
            row = {"who": OURS, "policy": policy, "blocks_per_s": None, "failed": str(error)}
        rows.append(row)
        console.line(brief(row, *_FIRST))
    show_rows(rows, console)
    if policies and all("failed" in row for row in rows[-len(policies) :]):
        raise RunError(rows[-1]["failed"])
    return rows


def _check(work: Work, policies: Sequence[Policy], peers: Sequence[PeerName]) -> None:
    if work.optimizer_state == "bf16" and work.dtype != "bfloat16":
        raise UserError("--optimizer-state bf16 keeps weights in bfloat16, got --dtype float32. Leave one of them out.")
    if work.optimizer_state == "bf16" and work.moments == "8bit":
        raise UserError("--optimizer-state bf16 keeps moments in bfloat16, got --moments 8bit. Leave one of them out.")
    if peers and not work.shape.lengths:
        fitting = ", ".join(name for name, shape in SHAPES.items() if shape.lengths)
        raise UserError(
            f"--peer takes a --shape whose samples have one length, which nobody has to pad ({fitting}), got "
            f"{work.shape.name}."
        )
    if "captured" in policies and not work.device.startswith("cuda"):
        raise UserError(
            f"--policy captured needs a GPU (--device), got {work.device}. Leave it out, or ask for compiled or eager."
        )
    if work.fp8:
        _check_fp8(work, policies)
    for peer in peers:
        check_peer(peer)


def _check_fp8(work: Work, policies: Sequence[Policy]) -> None:
    if not work.device.startswith("cuda"):
        raise UserError(f"--fp8 needs a GPU (--device), got {work.device}. Leave it out.")
    check_fp8(torch.device(work.device), "--fp8")
    if work.dtype != "bfloat16" or "eager" in policies:
        raise UserError(
            f"--fp8 takes --dtype bfloat16 and --policy compiled or captured, got {work.dtype} and "
            f"{', '.join(policies)}. Change them, or leave it out."
        )
    check_sizes(product_sizes(work.shape.drafter, work.shape.train_settings(work.dtype), work.shape.hidden_size))


def _in_process(work: Work, job: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(job, work, *arguments).result()
        except BrokenProcessPool as error:
            raise RunError(f"The process of {arguments[0]} died: it was killed, or it crashed.") from error


def _in_thread(work: Work, policy: Policy, since: float) -> dict[str, Any]:
    """Measure in a worker thread; `since` is when the process was asked for, by the clock on the wall."""
    if policy != "eager":
        warm_compiler(work.device)
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        try:
            return pool.submit(_measure, work, policy, since).result()
        except Exception as error:
            raise RunError(f"The step failed: {type(error).__name__}: {str(error) or '<empty message>'}") from error


def _measure(work: Work, policy: Policy, since: float) -> dict[str, Any]:
    shape, device = work.shape, torch.device(work.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    wire = torch.bfloat16 if work.dtype == "bfloat16" else torch.float32
    began = time.perf_counter()
    step = _step(work, policy, wire)
    built = time.perf_counter()
    step.warm()
    warm = time.perf_counter()
    batches = feature_batches(shape, device, wire)
    drawn_s = time.perf_counter() - warm
    _one(step, batches[0])
    wait(device)
    first_step_s = time.time() - since - drawn_s  # a run's features come from its targets
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    first_loss = (step.micro_sums[0] / step.micro_sums[1]).item()
    with forbid_recompiles(), quick_handovers(), _beside(work):
        times, count = round_times(lambda index: _one(step, batches[index]), len(batches), work.steps, device)
    memory = _memory(device, reserved) if cuda else dict.fromkeys(("peak_gib", "reserved_gib", "reserved_growth_gib"))
    return {
        "who": OURS,
        "policy": policy,
        "shape": shape.name,
        **memory,
        **step_figures(shape, batches, statistics.median(times), device),
        "ratio_to_best_peer": None,
        "recompiles": step.recompiles,
        "first_loss": round(first_loss, 5),
        "first_step_s": round(first_step_s, 1),
        "built_s": round(built - began, 1),
        "warm_s": round(warm - built, 1),
        **_compiled(),
        "batches": len(batches),
        "steps": count,
        "noise": work.noise,
        "hog": work.hog,
        **asked(work, ours=True),
    }


def _step(work: Work, policy: Policy, wire: torch.dtype) -> DrafterStep:
    shape, device = work.shape, torch.device(work.device)
    drafter = random_drafter(shape, device)
    settings = shape.train_settings(work.dtype).model_copy(update={"clip": CLIP if work.clip else math.inf})
    if work.optimizer_state == "bf16":
        # "float32" is: no working copy beside the weights, whatever these are.
        drafter, settings = drafter.bfloat16(), settings.model_copy(update={"dtype": "float32"})
    small = {"recompute": work.recompute, "moments": work.moments, "offload": work.offload}
    settings = settings.model_copy(update={"fp8": "on" if work.fp8 else "off"} | small)
    return DrafterStep(drafter, random_ends(shape, device, wire), settings, policy=policy, alarm=_warn)


def _warn(guard: str) -> None:
    print(guard, file=sys.stderr)


def _memory(device: torch.device, before: int) -> dict[str, float]:
    now = torch.cuda.memory_reserved(device)
    return {
        "peak_gib": gib(torch.cuda.max_memory_allocated(device)),
        "reserved_gib": gib(now),
        "reserved_growth_gib": gib(now - before),
    }


def _compiled() -> dict[str, int]:
    """Return how many graphs this process compiled, and how many it found compiled."""
    from torch._dynamo.utils import counters

    seen = counters["inductor"]
    return {"compiled": seen["fxgraph_cache_miss"], "found": seen["fxgraph_cache_hit"]}


def _one(step: DrafterStep, batch: FeatureBatch) -> None:
    step.load(batch)
    step.micro()
    step.update(RATE)
    step.clear()


class _beside:
    """Threads that work while the block lasts: forwards of a small model, or Python that never lets go."""

    def __init__(self, work: Work) -> None:
        self._stop = threading.Event()
        targets: list[Callable[[], None]] = [lambda: _forwards(work.device, self._stop)] * work.noise
        if work.hog:
            targets.append(lambda: _spin(self._stop))
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def _forwards(device: str, stop: threading.Event) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(30)]).to(device)
    x = torch.zeros(64, 256, device=device)
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    with torch.inference_mode(), torch.cuda.stream(stream):
        while not stop.is_set():
            model(x)
            if stream is not None:
                stream.synchronize()


def _spin(stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1
