"""The threads topology: every role is a thread of this process with its own device.

One dispenser hands micro-batches to whichever replica is free; the channel puts their features back in order. So the
drafter sees the same stream with one replica as with five.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError

import torch

from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved, resume_command
from paceline.config import PipelineSettings, RunSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.gpus import GpuReader
from paceline.pipeline.channel import Closed, OrderedChannel, check_finite
from paceline.pipeline.dealer import Dealer
from paceline.pipeline.evaluator import Evaluator, EvaluatorCare, InTraining
from paceline.pipeline.flow import Flow, between_steps, make_flow
from paceline.pipeline.listeners import Listeners
from paceline.pipeline.outlets import Outlets
from paceline.pipeline.replicas import Replicas
from paceline.pipeline.rollback import Rollback
from paceline.pipeline.sampler import Sampler, Seen
from paceline.pipeline.slots import Landing, Slots, handed_like
from paceline.pipeline.supervisor import Care, Role, Supervisor
from paceline.pipeline.watch import Watch
from paceline.records import FeatureBatch, RunError, TokenBatch
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.runtime.gate import Gate
from paceline.runtime.streams import wait_for
from paceline.target.feature_cache import DiskCache, FeatureCache, MemoryCache, NoCache
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget
from paceline.target.one_read import OneRead
from paceline.target.replica import TargetReplica, pace_of
from paceline.train.guard import Guard
from paceline.train.rank import DrafterRank
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep

_LOADING_S = 1.0  # between two events on how far a replica's loading is


def train_in_threads(
    settings: RunSettings,
    facts: TargetFacts,
    *,
    batches: Iterator[TokenBatch],
    largest: TokenBatch,
    total_steps: int,
    load_ends: Callable[[], FrozenEnds],
    policy: Policy,
    fill: Callable[[Drafter], Drafter] | None,
    start: Saved | None,
    saver: Saver,
    stopping: Callable[[], bool],
    moving: Callable[[], object],
    told: Listeners,
    plan: InTraining | None = None,
    made: Callable[[int], FeatureTarget] | None = None,
) -> tuple[Drafter, int]:
    """Train a drafter with one thread a role; return it and how often a step would have been compiled again.

    `fill` gives each rank's drafter its first weights; None draws them. Training goes on from `start`, where `batches`
    have to begin. Once `stopping` says so, it ends with the step that is under way, saved. What `moving` returns
    changes while data is read that the roles wait for. With `plan` an evaluator decodes meanwhile. `made` gives the
    target of each replica where it is there already.

    Raises:
        RunError: a role failed and none took its place; it is named with its device and cause, what the drafter has
            reached is saved if it could be, and no role is left running for long.
        Hung: the same, of a role that hangs, and whose thread stays.
    """
    pipeline = settings.pipeline
    gate = Gate()
    ahead, _, channel, slots = flow = make_flow(settings, batches)
    cache = make_cache(pipeline, Path(settings.run_dir))
    misfits: list[str] = []  # micro-batches that did not fit what was compiled of a target: the guards that failed

    def alarm(guard: str) -> None:
        misfits.append(guard)
        told.on_recompile(guard)

    replicas = _replicas(settings, facts, largest, flow, cache, gate, policy, alarm, told.on_replica, made)
    dealer = Dealer(channel, len(pipeline.drafters))
    meeting = Meeting(len(pipeline.drafters))
    history = start.state["guard"] if start else None
    guards = [Guard(settings.guard, settings.train.clip, history) for _ in pipeline.drafters]
    roll_back = Rollback(settings, saver=saver, meeting=meeting, gate=gate, tell=told.on_rolled_back, warn=told.warn)
    evaluator = Evaluator(settings, facts, plan, gate=gate, stopping=stopping) if plan else None

    ranks = _ranks(
        settings,
        facts,
        dealer=dealer,
        slots=slots,
        meeting=meeting,
        total_steps=total_steps,
        load_ends=load_ends,
        guards=guards,
        roll_back=roll_back,
        policy=policy,
        gate=gate,
        fill=fill,
        start=start,
        saver=saver,
        stopping=stopping,
        between_steps=between_steps(flow, guards[0], saver, evaluator),
        told=told,
        plan=plan,
    )

    def release() -> None:
        flow.stop()
        if evaluator is not None:
            evaluator.stop()
        saver.release()
        meeting.end()
        ahead.close()  # last, because it waits for the item that is being built

    settled = ExitStack()
    settled.callback(replicas.join)

    def all_ready() -> None:
        settled.enter_context(forbid_recompiles())
        saver.begin()
        told.on_ready()
        settled.enter_context(_sampler(settings, supervisor, channel, told.on_sample).under_way())

    supervisor = _supervisor(
        settings, replicas, evaluator, ranks, gate=gate, told=told, release=release, on_ready=all_ready, moving=moving
    )
    if policy != "eager":
        warm_compiler(pipeline.drafters[0])
    with closing(cache), closing(ahead), settled:
        _run(supervisor, ranks[0], guards[0], start, saver, settings)
    return ranks[0].drafter, len(misfits) + sum(rank.recompiles for rank in ranks)


def _supervisor(
    settings: RunSettings,
    replicas: Replicas,
    evaluator: Evaluator | None,
    ranks: Sequence[DrafterRank],
    *,
    gate: Gate,
    told: Listeners,
    release: Callable[[], None],
    on_ready: Callable[[], None],
    moving: Callable[[], object],
) -> Supervisor:
    pipeline = settings.pipeline
    targets: list[Role] = [*replicas.first, *([evaluator] if evaluator else [])]
    stacks = Path(settings.run_dir) / "stacks.txt"
    care: Care = EvaluatorCare(evaluator, replicas, stacks) if evaluator else replicas
    return Supervisor(
        [*targets, *ranks],
        threads=[pipeline.target_threads] * len(targets) + [pipeline.drafter_threads] * len(ranks),
        release=release,
        ended=(Closed, BrokenBarrierError),
        on_state=told.on_state,
        gate=gate,
        on_ready=on_ready,
        care=care,
        watch=Watch(pipeline.work_timeout_s, pipeline.ready_timeout_s, moving=moving),
    )


def _sampler(
    settings: RunSettings, supervisor: Supervisor, channel: OrderedChannel, tell: Callable[..., None]
) -> Sampler:
    return Sampler(
        settings.observe.sample_s,
        roles=lambda: [Seen(role.name, role.device, state, pulse) for role, state, pulse in supervisor.under_way()],
        queue_bytes=lambda: channel.waiting_bytes,
        queue_limit_bytes=channel.limit_bytes,
        gpus=GpuReader(settings.devices).read,
        tell=tell,
    )


def _run(
    supervisor: Supervisor, rank: DrafterRank, guard: Guard, start: Saved | None, saver: Saver, settings: RunSettings
) -> None:
    """Run until the end; if that is an error, save what rank 0, which `rank` is, has reached, and say so."""
    try:
        supervisor.run(settings.pipeline.ready_timeout_s)
    except RunError as error:
        if not supervisor.running:
            raise
        rest = supervisor.came_to_rest(rank, settings.pipeline.work_timeout_s)
        saved = _save_what_is_whole(rank if rest else None, guard, start, saver, Path(settings.run_dir))
        raise type(error)(f"{str(error).rstrip('.')}. {saved}") from error


def _ranks(
    settings: RunSettings,
    facts: TargetFacts,
    *,
    dealer: Dealer,
    slots: Slots,
    meeting: Meeting,
    total_steps: int,
    load_ends: Callable[[], FrozenEnds],
    guards: Sequence[Guard],
    roll_back: Rollback,
    policy: Policy,
    gate: Gate,
    fill: Callable[[Drafter], Drafter] | None,
    start: Saved | None,
    saver: Saver,
    stopping: Callable[[], bool],
    between_steps: Callable[[DrafterStep, int, bool], None],
    told: Listeners,
    plan: InTraining | None,
) -> list[DrafterRank]:
    def on_warm(rank: int, step: DrafterStep) -> None:
        slots.make(rank, handed_like(step.buffers.features_CD, settings))
        if start is not None:
            step.restore(start.tensors())
        if rank == 0:
            saver.prepare(step.state())

    on_step, on_held_out = told.on_step, told.on_held_out
    if plan is not None:
        on_step = plan.noting(on_step, held_out=False)
        on_held_out = plan.noting(on_held_out, held_out=True)

    return [
        DrafterRank(
            rank,
            device,
            drafter=settings.drafter,
            train=settings.train,
            hidden_size=facts.hidden_size,
            target_revision=facts.revision,
            load_ends=load_ends,
            source=plan.followed(dealer.stream(rank)) if plan is not None and rank == 0 else dealer.stream(rank),
            meeting=meeting,
            total_steps=total_steps,
            on_step=on_step,
            guard=guards[rank],
            on_rejected=told.on_rejected,
            roll_back=roll_back,
            policy=policy,
            gate=gate,
            alarm=told.on_recompile,
            fill=fill,
            on_warm=partial(on_warm, rank),
            stopping=stopping,
            between_steps=between_steps,
            looks=lambda steps: settings.evaluate.due(steps, total_steps),
            on_held_out=on_held_out,
            steps_done=start.steps if start else 0,
        )
        for rank, device in enumerate(settings.pipeline.drafters)
    ]


def _replicas(
    settings: RunSettings,
    facts: TargetFacts,
    largest: TokenBatch,
    flow: Flow,
    cache: FeatureCache,
    gate: Gate,
    policy: Policy,
    alarm: Callable[[str], None],
    tell: Callable[..., None],
    made: Callable[[int], FeatureTarget] | None,
) -> Replicas:
    one_read = OneRead(len(settings.replicas))
    build = partial(_build_replica, settings, facts, largest=largest, cache=cache, flow=flow, gate=gate, policy=policy)
    return Replicas(
        settings.replicas,
        partial(build, alarm=alarm, tell=tell, made=made, load_trunk=one_read),
        dispenser=flow.source,
        channel=flow.channel,
        restarts=settings.pipeline.restarts,
        stacks=Path(settings.run_dir) / "stacks.txt",
        tell=tell,
    )


def _build_replica(
    settings: RunSettings,
    facts: TargetFacts,
    index: int,
    devices: Sequence[str],
    outlet: Outlets,
    *,
    largest: TokenBatch,
    cache: FeatureCache,
    flow: Flow,
    gate: Gate,
    policy: Policy,
    alarm: Callable[[str], None],
    tell: Callable[..., None],
    made: Callable[[int], FeatureTarget] | None,
    load_trunk: OneRead,
) -> TargetReplica:
    *before, device = devices
    landing = Landing(device, outlet, flow.slots)

    def deliver(batch: FeatureBatch) -> bool:
        with gate.work():
            check_finite(batch)  # this thread waits for its own stream, and the drafter's for nobody
            landed = landing.land(batch)
        return flow.channel.put(landed, admit=lambda: outlet.settle(batch.tokens.seq))

    def on_split(replica: TargetReplica, tokens: TokenBatch, parts: int) -> None:
        told = {"role": replica.name, "device": device, "seq": tokens.seq, "tokens": tokens.num_tokens}
        tell("batch_split", **told, parts=parts)

    def on_path(replica: TargetReplica, reason: str) -> None:
        told = {"role": replica.name, "device": device, "path": "plain" if reason else "fast"}
        pace = {"compiled": replica.pace.compiled and not reason, "fp8": replica.pace.fp8}
        tell("target_path", **told, **pace, attention=replica.attention, reason=reason)

    def on_no_fp8(replica: TargetReplica, reason: str) -> None:
        tell("no_fp8", role=replica.name, device=device, reason=reason)

    due = time.monotonic() + _LOADING_S

    def on_loaded(replica: TargetReplica, share: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _LOADING_S
            tell("loading", role=replica.name, device=device, share=round(share, 4))

    return TargetReplica(
        index,
        device,
        facts=facts,
        taps=settings.drafter.taps,
        dtype=getattr(torch, settings.target.dtype),
        wire=getattr(torch, settings.train.dtype),
        largest=largest,
        source=outlet,
        cache=cache,
        room=landing.room,
        deliver=deliver,
        gate=gate,
        on_split=on_split,
        on_loaded=on_loaded,
        pace=pace_of(settings.target, device, policy),
        on_path=on_path,
        needs_fp8=settings.target.fp8 == "on",
        on_no_fp8=on_no_fp8,
        alarm=alarm,
        made=made and partial(made, index),
        before=before,
        packs=settings.target.features == "fp8",
        load_trunk=load_trunk,
    )


def _save_what_is_whole(rank: DrafterRank | None, guard: Guard, start: Saved | None, saver: Saver, run: Path) -> str:
    """Save the drafter's state after its last whole step, and return what to say of it.

    Only of a rank that has left between two steps, which is None if it has not: an update may be half done.
    """
    go_on = f"go on with `{resume_command(run)}`."
    if guard.exceeded:  # it has said how to go on
        return "What is saved are the checkpoints from before."
    if rank is None or rank.whole_steps is None:
        return f"The drafter did not come to rest between two steps, so nothing was saved since; {go_on}"
    steps, before = rank.whole_steps, start.steps if start else 0
    if steps == before:
        return f"No step was made; {go_on}"
    try:
        wait_for(rank.device)  # whose stream is not this thread's
        saved = saver.save_now(steps, rank.state(), more={"guard": guard.state()}, good=guard.first_rejected)
    except Exception as error:  # as of a device that is gone
        return f"The state after step {steps:,} cannot be saved ({' '.join(str(error).split())[:200]}); {go_on}"
    if not saved:
        return f"The state after step {steps:,} could not be saved, the last checkpoint is as it was; {go_on}"
    return f"The state after step {steps:,} is saved: {go_on}"


def make_cache(pipeline: PipelineSettings, run: Path) -> FeatureCache:
    """Return the feature cache that the settings ask for."""
    limit, folder = int(pipeline.feature_cache_gib * 2**30), run / "feature_cache"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    if pipeline.feature_cache == "memory":
        return MemoryCache(limit)
    if pipeline.feature_cache == "disk":
        return DiskCache(folder, limit)
    return NoCache()
