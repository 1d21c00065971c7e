"""`paceline bench target`: features of real tokens a second, against a stock transformers forward on the same samples.

Weights are random and lengths those of a large run. Ours reads samples as the loader lays them out; the stock forward
lists all hidden states and is measured in three layouts, plain and compiled, the fastest of which counts:
- padded: samples of like length, as many as the budget holds, on the right and without a mask, as right padding
  needs none;
- packed: the batches that ours reads, end to end in a row, with positions that start anew;
- single: one sample after the other.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from paceline import blocks
from paceline.bench.figures import brief, show_rows
from paceline.bench.lengths import run_lengths
from paceline.bench.target_shapes import TARGET_SHAPES, TargetShape
from paceline.bench.timing import gib, rates, round_times, wait
from paceline.config import DataSettings
from paceline.data.plan import plan, width
from paceline.observe.console import Console
from paceline.records import BlockSet, RunError, TokenBatch
from paceline.target.model import FeatureTarget

Layout = Literal["bucketed", "trimmed", "packed"]
Path = Literal["plain", "fast", "compiled", "fp8"]
PATHS: tuple[Path, ...] = ("plain", "fast", "compiled", "fp8")  # in this order: fp8 lets the weights go
STOCK_LAYOUTS = ("padded", "packed", "single")
OURS = "paceline"
COUNTED = "real tokens in, taps of real tokens out, samples end to end; weights loaded and ids on the device"
_FIRST = ("pass_ms", "tokens_per_s")  # what is told of a row as soon as it is there
_ROWS = 20_000  # of the plan that batches are taken from


@dataclass(frozen=True, slots=True)
class TargetWork:
    """What is measured."""

    shape: TargetShape
    device: str
    dtype: str
    layout: Layout
    budget: int  # tokens a batch may hold, padding included
    tokens: int  # real ones that are read at least, in whole batches
    passes: int  # over all of them; the median counts
    paths: tuple[Path, ...]  # of ours
    stock_compiled: bool  # also measure the stock forward with compiled layers


def bench_target(work: TargetWork, console: Console) -> list[dict[str, Any]]:
    """Measure the stock forward and ours, and return a row for each.

    Raises:
        RunError: features are not those of the stock forward.
    """
    device = torch.device(work.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    console.stage(f"{work.shape.name} on {work.device}, random weights in {work.dtype}")
    model = work.shape.decoder(device, torch.bfloat16 if work.dtype == "bfloat16" else torch.float32)
    batches = token_batches(work)
    rows: list[dict[str, Any]] = []

    def measure(who: str, how: str, layout: str, jobs: Sequence[Callable[[], Tensor]], padded: int) -> dict[str, Any]:
        console.stage(f"{who}, {how}, {layout}")
        row = {"who": who, "how": how, "layout": layout, **_measured(work, jobs, batches, padded, device)}
        rows.append(row)
        return row

    stock = f"transformers {transformers.__version__}"
    for how in ("plain", "compiled") if work.stock_compiled else ("plain",):
        if how == "compiled":
            torch._dynamo.config.recompile_limit = 64  # with a mask and without, one row and several
            for layer in model.layers:
                layer.compile(dynamic=True)
        for layout in STOCK_LAYOUTS:
            jobs, padded = _stock_jobs(model, work, layout, batches)
            console.line(brief(measure(stock, how, layout, jobs, padded), *_FIRST))
    for layer in model.layers:
        layer._compiled_call_impl = None
    wanted = _stock_features(model, work.shape, batches[0])
    best = max(row["tokens_per_s"] for row in rows)
    target = FeatureTarget.around(model, work.shape.taps)
    largest = max(batches, key=lambda batch: batch.num_tokens)
    for path in PATHS:
        if path not in work.paths:
            continue
        _take(target, path, largest)
        jobs = [partial(target.features, batch) for batch in batches]
        computed = sum(batch.input_ids.numel() if path == "plain" else batch.num_tokens for batch in batches)
        row = measure(OURS, path, work.layout, jobs, computed)
        row["ratio_to_best_peer"] = round(row["tokens_per_s"] / best, 3)
        row["relative_error"] = _relative_error(target.features(batches[0]), wanted, path, work.dtype)
        row["recompiles"] = target.recompiles
        console.line(brief(row, *_FIRST))
    show_rows(rows, console)
    return rows


def _take(target: FeatureTarget, path: Path, largest: TokenBatch) -> None:
    """Let the target compute on a path from now on.

    Raises:
        RunError: it cannot.
    """
    if path == "plain":
        return
    reason = target.quicken(fp8=path == "fp8")
    if not reason and path != "fast":
        reason = target.compile(largest, _warn)
    if reason:
        raise RunError(f"The target's path {path} cannot be measured here: {reason}.")


def _warn(guard: str) -> None:
    print(guard, file=sys.stderr)


def token_batches(work: TargetWork) -> list[TokenBatch]:
    """Return the first batches of an epoch that hold so many tokens, laid out as the loader does; without blocks."""
    settings = DataSettings(dataset="bench", layout=work.layout, token_budget=work.budget)
    scaled_N = run_lengths(_ROWS) * work.shape.longest // TARGET_SHAPES["qwen3-8b"].longest
    lengths_N = np.clip(scaled_N, 1, work.budget).astype(np.int32)
    made = plan(lengths_N, settings, seed=0, epoch=0)
    rng = np.random.default_rng(0)
    batches: list[TokenBatch] = []
    while sum(batch.num_tokens for batch in batches) < work.tokens and len(batches) < len(made):
        lengths = tuple(lengths_N[made.batch(len(batches))].tolist())
        ids = [torch.from_numpy(rng.integers(0, work.shape.vocab_size, n)) for n in lengths]
        padded = width(work.layout, made.edges, lengths)
        batches.append(_token_batch(len(batches), ids, padded, packed=work.layout == "packed"))
    return batches


def _token_batch(seq: int, ids: list[Tensor], padded: int, *, packed: bool) -> TokenBatch:
    lengths = tuple(map(len, ids))
    rows = 1 if packed else len(ids)
    places = [torch.arange(n) + (0 if packed else row * padded) for row, n in enumerate(lengths)]
    places_T = torch.arange(sum(lengths)) if packed else torch.cat(places)
    ids_RS = torch.zeros(rows, padded, dtype=torch.long)
    ids_RS.flatten()[places_T] = torch.cat(ids)
    none = torch.zeros(0, dtype=torch.long)
    block_set = BlockSet(none, none, none, none, none.view(0, 2), none.view(0, 2).bool())
    return TokenBatch(seq, 0, seq, True, tuple(range(len(ids))), ids_RS, lengths, places_T, block_set)


def samples_of(batches: Sequence[TokenBatch]) -> list[Tensor]:
    """Return the ids of every sample."""
    return [part for batch in batches for part in batch.input_ids.flatten()[batch.places_T].split(list(batch.lengths))]


def padded_groups(samples: Sequence[Tensor], budget: int) -> Iterator[list[Tensor]]:
    """Yield samples of like length, longest first, as many as the budget holds once they are padded to the longest."""
    group: list[Tensor] = []
    for sample in sorted(samples, key=len, reverse=True):
        if group and len(group[0]) * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(sample)
    yield group


def _stock_jobs(
    model: Any, work: TargetWork, layout: str, batches: list[TokenBatch]
) -> tuple[list[Callable[[], Tensor]], int]:
    """Return a forward for each group of samples, and the tokens that they compute."""
    samples, device = samples_of(batches), model.device
    if layout == "padded":
        groups = list(padded_groups(samples, work.budget))
    elif layout == "packed":
        groups = [samples_of([batch]) for batch in batches]
    else:
        groups = [[sample] for sample in samples]
    jobs, computed = [], 0
    for group in groups:
        lengths = [len(sample) for sample in group]
        if layout == "packed":
            ids_RS = torch.cat(group)[None]
            positions_RS = blocks.context_positions(lengths)[None].to(device)
            places_T = torch.arange(sum(lengths), device=device)
        else:
            ids_RS = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
            positions_RS = None
            places_T = torch.cat([torch.arange(n) + row * max(lengths) for row, n in enumerate(lengths)]).to(device)
        computed += ids_RS.numel()
        jobs.append(_stock_job(model, work.shape.taps, ids_RS.to(device), positions_RS, places_T))
    return jobs, computed


def _stock_job(
    model: Any, taps: tuple[int, ...], ids_RS: Tensor, positions_RS: Tensor | None, places_T: Tensor
) -> Callable[[], Tensor]:
    @torch.no_grad()  # torch.compile does not take tensors of inference mode
    def job() -> Tensor:
        out = model(ids_RS, position_ids=positions_RS, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[tap + 1] for tap in taps], dim=-1).flatten(0, 1)[places_T]

    return job


def _stock_features(model: Any, shape: TargetShape, batch: TokenBatch) -> Float[Tensor, "T D"]:
    """Return features sample by sample, which nothing beside them can have touched."""
    alone = [(ids[None].to(model.device), torch.arange(len(ids), device=model.device)) for ids in samples_of([batch])]
    return torch.cat([_stock_job(model, shape.taps, ids_1S, None, places_T)() for ids_1S, places_T in alone])


def _measured(
    work: TargetWork,
    jobs: Sequence[Callable[[], Tensor]],
    batches: list[TokenBatch],
    computed: int,
    device: torch.device,
) -> dict[str, Any]:
    cuda = device.type == "cuda"
    for job in jobs:  # every shape once: kernels are compiled and chosen
        job()
    wait(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times, _ = round_times(lambda index: jobs[index](), len(jobs), len(jobs) * work.passes, device)
    seconds = statistics.median(times) * len(jobs)
    lengths = tuple(n for batch in batches for n in batch.lengths)
    return {
        "shape": work.shape.name,
        "pass_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(sum(lengths) / seconds, 1),
        "peak_gib": gib(torch.cuda.max_memory_allocated(device)) if cuda else None,
        **rates(work.shape.flops(lengths), seconds, device),
        "ratio_to_best_peer": None,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "padding": round(1 - sum(lengths) / computed, 4),
        "dtype": work.dtype,
        "counted": COUNTED,
    }


def _relative_error(found_TD: Tensor, wanted_TD: Tensor, path: Path, dtype: str) -> float:
    """Return the features' distance from the stock ones over the size of these.

    Raises:
        RunError: it is more than the number format explains.
    """
    error = ((found_TD.float() - wanted_TD.float()).norm() / wanted_TD.float().norm()).item()
    # Random weights multiply rounding from layer to layer, over 34 of them to 0.05 in bfloat16 and 0.5 in fp8; features
    # of something else altogether differ by 1.4 of their size.
    most = 0.7 if path == "fp8" else 0.1 if dtype == "bfloat16" else 1e-3
    if not error <= most:
        raise RunError(f"Features must be those of the stock forward, but differ by {error:.2g} of their size.")
    return float(f"{error:.3g}")
