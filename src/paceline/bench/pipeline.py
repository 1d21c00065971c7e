"""What `paceline bench pipeline` measures and counts: both sides of a run alone, and what the whole run made of them.

Weights are random and samples have one length. The whole run is not started here: it is a stage above this one. Its
times come in as `Whole`, and rows go out.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES, Shape
from paceline.bench.target_shapes import TARGET_SHAPES, TargetShape
from paceline.bench.timing import gib, rates, wait
from paceline.bench.weights import random_drafter, random_ends
from paceline.bench.work import RATE
from paceline.config import RunSettings
from paceline.drafter.flops import useful_flops
from paceline.drafter.model import Drafter
from paceline.records import FeatureBatch, RunError, TokenBatch, UserError
from paceline.runtime.compiling import Policy, warm_compiler
from paceline.target.conventions import Conventions
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget
from paceline.target.replica import pace_of
from paceline.train.step import DrafterStep

OURS = "paceline"
PEER = {"who": "SpecForge (Domino), published, eight H200", "samples_per_s": 6.3}  # a GPU
COUNTED = {
    "target features alone": "features of real tokens on the target's GPUs, queued and then waited for",
    "drafter step alone": "loading, forward, loss, backward, clipping, optimizer; features on the device",
    "whole run": "a run's threads behind warm-up: batches built ahead, features, channel, steps, reports",
}
_SETTLED_S = 6.0
_SHAPES = {"tiny": ("tiny-2x128", "tiny"), "qwen3-8b": ("qwen3-8b-8x550", "qwen3-8b")}


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """What is measured."""

    name: str
    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    dtype: str
    policy: Policy
    steps: int  # that are timed
    fp8: bool  # of target and drafter both
    batches_per_step: int | None = None  # micro-batches; None: one for every rank

    @property
    def target(self) -> TargetShape:
        """The target."""
        return TARGET_SHAPES[_SHAPES[self.name][1]]

    @property
    def shape(self) -> Shape:
        """The drafter that follows it, and its samples."""
        shape = SHAPES[_SHAPES[self.name][0]]
        return replace(shape, drafter=shape.drafter.model_copy(update={"taps": self.target.taps}))

    @property
    def devices(self) -> tuple[str, ...]:
        """All that work, each once."""
        return tuple(dict.fromkeys((*self.targets, *self.drafters)))

    @property
    def step_batches(self) -> int:
        """Micro-batches of a step, dealt to all ranks."""
        return self.batches_per_step or len(self.drafters)

    @property
    def rank_batches(self) -> int:
        """Those of a step that the busiest rank gets."""
        return -(-self.step_batches // len(self.drafters))

    @property
    def colocated(self) -> bool:
        """Whether targets and drafters share their devices.

        Raises:
            UserError: some do and some do not, so neither sum nor minimum says what to expect.
        """
        shared = set(self.targets) & set(self.drafters)
        if shared and set(self.targets) != set(self.drafters):
            raise UserError(
                f"--targets and --drafters name the same devices or none in common, got {', '.join(self.targets)} and "
                f"{', '.join(self.drafters)}. Give one of the two."
            )
        return bool(shared)

    @property
    def numbers(self) -> torch.dtype:
        """The number format of products and features."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


@dataclass(slots=True)
class Whole:
    """What a whole run told of itself."""

    stamps: list[float] = field(default_factory=list)  # when each step was over
    losses: list[float] = field(default_factory=list)  # of each step
    samples: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # of who works and who waits
    reserved: list[int] = field(default_factory=list)  # bytes on all devices after each step
    recompiles: int = 0
    paths: dict[str, str] = field(default_factory=dict)  # each replica's, and its attention
    faults: list[dict[str, Any]] = field(default_factory=list)  # events of replicas that fail or lack memory
    drafters: list[Drafter] = field(default_factory=list)  # one of each rank, with what it has learnt


def run_settings(work: PipelineWork, run: Path) -> RunSettings:
    """Return the settings of the whole run. Nothing is saved: no step is the one for that.

    The rate stays what it is, so runs of other lengths make the same steps.
    """
    fp8 = "on" if work.fp8 else "off"
    steady = {"lr": RATE, "warmup_share": 0.0, "min_lr_ratio": 1.0}
    train = {**work.shape.train_settings(work.dtype).model_dump(), **steady, "policy": work.policy, "fp8": fp8}
    return RunSettings.model_validate(
        {
            "run_dir": str(run),
            "target": {"model": work.target.name, "dtype": work.dtype, "fp8": fp8},
            "drafter": work.shape.drafter.model_dump(),
            "data": {"dataset": "bench"},
            "train": train,
            "pipeline": {"targets": work.targets, "drafters": work.drafters, "restarts": 0},
            "checkpoint": {"every_minutes": 1e6},
            "observe": {"sample_s": 0.5},
        }
    )


def target_facts(work: PipelineWork, folder: Path) -> TargetFacts:
    """Return what a run has to know of the target, none of whose files exist."""
    target = work.target
    return TargetFacts(
        name=target.name,
        folder=folder,
        revision="random weights",
        num_layers=target.layers + 2,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rope_theta=1e6,
        max_positions=40_960,
        eos_ids=(),
        conventions=Conventions(),
        own_head_shape=True,
    )


def made_target(work: PipelineWork, device: str) -> FeatureTarget:
    """Return a target with random weights, made on its device."""
    return FeatureTarget.around(work.target.decoder(torch.device(device), work.numbers), work.target.taps)


def micro_batches(work: PipelineWork) -> list[FeatureBatch]:
    """Return the micro-batches that all parts read, with features on the first drafter's device."""
    return feature_batches(work.shape, torch.device(work.drafters[0]), work.numbers)


def stream(work: PipelineWork, batches: Sequence[FeatureBatch], steps: int) -> Iterator[TokenBatch]:
    """Yield a run's micro-batches, step by step."""
    each = work.step_batches
    for seq in range(steps * each):
        closes = seq % each == each - 1
        yield replace(batches[seq % len(batches)].tokens, seq=seq, step=seq // each, closes_step=closes)


def target_alone(work: PipelineWork, batches: Sequence[FeatureBatch]) -> float:
    """Return seconds a micro-batch takes one target.

    Raises:
        RunError: the fast path, where the run would take it, cannot be had.
    """
    device = torch.device(work.targets[0])
    target = made_target(work, work.targets[0])
    pace = pace_of(run_settings(work, Path("bench")).target, work.targets[0], work.policy)
    reason = target.quicken(fp8=pace.fp8) if pace.fast else ""
    if pace.compiled and not reason:
        reason = target.compile(batches[0].tokens, _told)
    if reason:
        raise RunError(f"The target's fast path cannot be measured here: {reason}.")
    return _seconds(lambda batch: target.features(batch.tokens), batches, work, device)


def step_alone(work: PipelineWork, batches: Sequence[FeatureBatch]) -> float:
    """Return seconds a micro-batch takes one drafter, with its share of the update behind a rank's micro-batches."""
    device = torch.device(work.drafters[0])
    if work.policy != "eager":
        warm_compiler(work.drafters[0])
    settings = run_settings(work, Path("bench")).train
    drafter, ends = random_drafter(work.shape, device), random_ends(work.shape, device, work.numbers)
    step = DrafterStep(drafter, ends, settings, policy=work.policy, alarm=_told)
    step.warm()

    def one(batch: FeatureBatch) -> None:
        for _ in range(work.rank_batches):
            step.load(batch)
            step.micro()
        step.update(RATE)
        step.clear()

    return _seconds(one, batches, work, device) / work.rank_batches


def let_go(devices: Sequence[str]) -> None:
    """Give back what a part has held, before the next is measured."""
    gc.collect()
    for name in devices:
        if torch.device(name).type == "cuda":
            torch.cuda.synchronize(name)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(name)


def reserved_bytes(devices: Sequence[str]) -> int:
    """Return what torch has reserved on all of these."""
    return sum(torch.cuda.memory_reserved(name) for name in devices if torch.device(name).type == "cuda")


def pipeline_rows(
    work: PipelineWork, batches: Sequence[FeatureBatch], target_s: float, step_s: float, whole: Whole, warm: int
) -> list[dict[str, Any]]:
    """Return a row for each side and one for the whole run, whose first `warm` steps are left out.

    `target_s` and `step_s` are what a micro-batch takes one target and one drafter.
    """
    lengths = [batch.tokens.lengths for batch in batches]
    samples = sum(map(len, lengths)) / len(lengths)
    a, b = len(work.targets) * samples / target_s, len(work.drafters) * samples / step_s
    stamps = whole.stamps[warm - 1 : warm + work.steps]
    rate = work.step_batches * samples * (len(stamps) - 1) / (stamps[-1] - stamps[0])
    bound = 1 / (1 / a + 1 / b) if work.colocated else min(a, b)
    target_flop = sum(map(work.target.flops, lengths)) / len(lengths) / samples
    step_flop = sum(map(step_flops(work), batches)) / len(batches) / samples
    per = len(work.devices)
    cuda = [name for name in work.devices if torch.device(name).type == "cuda"]
    rows = [
        _row(work, "target features alone", a, target_flop, batches, len(set(work.targets))),
        _row(work, "drafter step alone", b, step_flop, batches, len(set(work.drafters))),
        _row(work, "whole run", rate, target_flop + step_flop, batches, per),
    ]
    published = work.name == "qwen3-8b" and bool(cuda)
    reserved = whole.reserved[warm - 1 : warm + work.steps]
    rows[-1] |= {
        "gpus": len(cuda),
        "peak_gib": max((gib(torch.cuda.max_memory_allocated(name)) for name in cuda), default=None),
        "reserved_growth_gib": gib(reserved[-1] - reserved[0]) if cuda else None,
        "of": "harmonic sum of both sides" if work.colocated else "slower side",
        "share_of_bound": round(rate / bound, 4),
        "roles": role_shares(whole, stamps[0], stamps[-1]),
        "target_paths": whole.paths,
        "recompiles": whole.recompiles,
        "peer": PEER["who"] if published else None,
        "peer_samples_per_s": PEER["samples_per_s"] if published else None,
        "ratio_to_published_peer": round(rate / per / 6.3, 3) if published else None,
    }
    return rows


def step_flops(work: PipelineWork) -> Callable[[FeatureBatch], float]:
    """Return what counts the useful operations of a step over a micro-batch."""

    def flops(batch: FeatureBatch) -> float:
        own = batch.tokens.blocks
        return useful_flops(
            work.shape.drafter,
            hidden_size=work.shape.hidden_size,
            vocab_size=work.shape.vocab_size,
            tokens=batch.tokens.num_tokens,
            visible=int((own.anchor_K - own.start_K).sum()),
            blocks=len(own.anchor_K),
        )

    return flops


def role_shares(whole: Whole, first: float, last: float) -> dict[str, dict[str, Any]]:
    """Return which share of the time between two moments each role worked, and what it waited for otherwise."""
    inside = [sample for at, sample in whole.samples if first <= at - sample["s"] and at <= last]
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({role["role"] for sample in inside for role in sample["roles"]}):
        own = [(s["s"], r) for s in inside for r in s["roles"] if r["role"] == name and r["busy_share"] is not None]
        total = sum(seconds for seconds, _ in own)
        if total:
            sorts = {sort for _, role in own for sort in role["waits"]}
            waits = {sort: sum(s * role["waits"].get(sort, 0.0) for s, role in own) / total for sort in sorted(sorts)}
            busy = sum(s * role["busy_share"] for s, role in own) / total
            found[name] = {"busy_share": round(busy, 4), "waits": {sort: round(w, 4) for sort, w in waits.items()}}
    return found


def _row(
    work: PipelineWork, part: str, rate: float, flop: float, batches: Sequence[FeatureBatch], gpus: int
) -> dict[str, Any]:
    """Return what a rate of samples a second comes to; operations and the share of the peak are those of one GPU."""
    samples = sum(len(batch.tokens.lengths) for batch in batches)
    tokens = sum(batch.tokens.num_tokens for batch in batches) / samples
    blocks = sum(len(batch.tokens.blocks.anchor_K) for batch in batches) / samples
    device = torch.device(work.drafters[0] if part == "drafter step alone" else work.targets[0])
    return {
        "who": OURS,
        "part": part,
        "shape": work.name,
        "targets": list(work.targets),
        "drafters": list(work.drafters),
        "samples_per_s": round(rate, 3),
        "tokens_per_s": round(rate * tokens, 1),
        "blocks_per_s": round(rate * blocks, 1) if part != "target features alone" else None,
        **rates(flop / gpus, 1 / rate, device),
        "dtype": work.dtype,
        "fp8": work.fp8,
        "policy": work.policy,
        "batches_per_step": work.step_batches,
        "counted": COUNTED[part],
    }


def _seconds(
    one: Callable[[FeatureBatch], object], batches: Sequence[FeatureBatch], work: PipelineWork, device: torch.device
) -> float:
    """Return the mean over as many calls as the whole run has steps, queued and then waited for.

    A GPU first works for `_SETTLED_S`, as it does in the whole run: under load its clock comes down within seconds.
    """
    began = time.perf_counter()
    while True:
        for batch in batches:
            one(batch)
        wait(device)
        if device.type == "cpu" or time.perf_counter() - began > _SETTLED_S:
            break
    began = time.perf_counter()
    for batch in islice(_round(batches), work.steps):
        one(batch)
    wait(device)
    return (time.perf_counter() - began) / work.steps


def _round(batches: Sequence[FeatureBatch]) -> Iterator[FeatureBatch]:
    while True:
        yield from batches


def _told(guard: str) -> None:
    raise RunError(f"Something was compiled that would be compiled again: {guard}")
