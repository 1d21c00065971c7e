"""The threads topology: every role is a thread of this process with its own device.

One dispenser hands micro-batches to whichever replica is free; the channel puts their features back in order. So the
drafter sees the same stream with one replica as with five.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError

import torch

from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import PipelineSettings, RunSettings
from paceline.data.prefetch import Prefetch
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.pipeline.channel import Closed, OrderedChannel
from paceline.pipeline.dealer import Dealer
from paceline.pipeline.rollback import Rollback
from paceline.pipeline.supervisor import RoleState, Supervisor
from paceline.records import Rejection, StepReport, TokenBatch
from paceline.runtime.compiling import Policy, forbid_recompiles, warm_compiler
from paceline.runtime.gate import Gate
from paceline.target.feature_cache import DiskCache, FeatureCache, MemoryCache, NoCache
from paceline.target.load import TargetFacts
from paceline.target.replica import TargetReplica
from paceline.train.guard import Guard
from paceline.train.rank import DrafterRank
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep


class Dispenser:
    """Hands out one stream of micro-batches to several threads, each batch once."""

    def __init__(self, batches: Iterator[TokenBatch], on_end: Callable[[int], None]) -> None:
        self._batches, self._on_end = batches, on_end
        self._lock = threading.Lock()
        self._given = 0
        self._ended = self._stopped = False

    def __iter__(self) -> Iterator[TokenBatch]:
        while True:
            with self._lock:
                if self._stopped:
                    raise Closed
                batch = None if self._ended else next(self._batches, None)
                if self._stopped:  # while we waited
                    raise Closed
                if batch is None:
                    if not self._ended:
                        self._ended = True
                        self._on_end(self._given)
                    return
                self._given += 1
            yield batch

    def stop(self) -> None:
        """End everyone who asks from now on."""
        self._stopped = True


def train_in_threads(
    settings: RunSettings,
    facts: TargetFacts,
    *,
    batches: Iterator[TokenBatch],
    largest: TokenBatch,
    total_steps: int,
    load_ends: Callable[[], FrozenEnds],
    policy: Policy,
    on_step: Callable[[StepReport], None],
    on_held_out: Callable[[StepReport], None],
    on_state: Callable[[RoleState], None],
    on_recompile: Callable[[str], None],
    on_rejected: Callable[[Rejection], None],
    on_rolled_back: Callable[[int, Saved], None],
    warn: Callable[[str], None],
    start: Saved | None,
    saver: Saver,
    stopping: Callable[[], bool],
    on_ready: Callable[[], None],
) -> tuple[Drafter, int]:
    """Train a drafter with one thread a role; return it and how often a step would have been compiled again.

    `on_recompile` gets the guard that failed whenever a step does not fit what was compiled and runs uncompiled. Every
    rank tells `on_rejected` of a step that was not applied; `on_rolled_back` gets how many steps are done and the
    checkpoint that the run went back to, `warn` a sentence on one that could not be taken.
    Training goes on from `start`, where `batches` have to begin. Once `stopping` says so, it ends with the step that is
    under way, saved. `on_ready` is called when all roles are.

    Raises:
        RunError: a role failed; it is named with its device and cause, and no role is left running for long.
    """
    pipeline = settings.pipeline
    channel = OrderedChannel(int(pipeline.credit_gib * 2**30))
    ahead = Prefetch(batches, settings.data.prefetch)
    gate = Gate()
    source = Dispenser(ahead, on_end=channel.finish)
    cache = make_cache(pipeline, Path(settings.run_dir))
    targets = _replicas(settings, facts, largest, source, cache, channel, gate)
    dealer = Dealer(channel, len(pipeline.drafters))
    meeting = Meeting(len(pipeline.drafters))
    history = start.state["guard"] if start else None
    guards = [Guard(settings.guard, settings.train.clip, history) for _ in pipeline.drafters]
    roll_back = Rollback(settings, saver=saver, meeting=meeting, gate=gate, tell=on_rolled_back, warn=warn)

    def between_steps(step: DrafterStep, steps: int, last: bool) -> None:
        guard = guards[0]
        saver.between_steps(steps, step.state(), last=last, more={"guard": guard.state()}, good=guard.first_rejected)
        if last:  # the other ranks have met and ask for nothing more; replicas may wait for room or for data
            source.stop()
            channel.stop()
            ahead.close()

    def on_warm(rank: int, step: DrafterStep) -> None:
        if start is not None:
            step.restore(start.tensors())
        if rank == 0:
            saver.prepare(step.state())

    ranks = [
        DrafterRank(
            rank,
            device,
            drafter=settings.drafter,
            train=settings.train,
            hidden_size=facts.hidden_size,
            target_revision=facts.revision,
            load_ends=load_ends,
            source=dealer.stream(rank),
            meeting=meeting,
            total_steps=total_steps,
            on_step=on_step,
            guard=guards[rank],
            on_rejected=on_rejected,
            roll_back=roll_back,
            policy=policy,
            gate=gate,
            alarm=on_recompile,
            on_warm=partial(on_warm, rank),
            stopping=stopping,
            between_steps=between_steps,
            looks=lambda steps: settings.evaluate.due(steps, total_steps),
            on_held_out=on_held_out,
        )
        for rank, device in enumerate(pipeline.drafters)
    ]

    def release() -> None:
        source.stop()
        channel.stop()
        saver.release()
        meeting.end()
        ahead.close()  # last, because it waits for the item that is being built

    settled = ExitStack()

    def all_ready() -> None:
        settled.enter_context(forbid_recompiles())
        saver.begin()
        on_ready()

    supervisor = Supervisor(
        [*targets, *ranks],
        threads=[pipeline.target_threads] * len(targets) + [pipeline.drafter_threads] * len(ranks),
        release=release,
        ended=(Closed, BrokenBarrierError),
        on_state=on_state,
        gate=gate,
        on_ready=all_ready,
    )
    if policy != "eager":
        warm_compiler(pipeline.drafters[0])
    with closing(cache), closing(ahead), settled:
        supervisor.run(pipeline.ready_timeout_s)
    return ranks[0].drafter, sum(rank.recompiles for rank in ranks)


def _replicas(
    settings: RunSettings,
    facts: TargetFacts,
    largest: TokenBatch,
    source: Dispenser,
    cache: FeatureCache,
    channel: OrderedChannel,
    gate: Gate,
) -> list[TargetReplica]:
    return [
        TargetReplica(
            index,
            device,
            facts=facts,
            taps=settings.drafter.taps,
            dtype=getattr(torch, settings.target.dtype),
            wire=getattr(torch, settings.train.dtype),
            largest=largest,
            source=iter(source),
            cache=cache,
            deliver=channel.put,
            gate=gate,
        )
        for index, device in enumerate(settings.pipeline.targets)
    ]


def make_cache(pipeline: PipelineSettings, run: Path) -> FeatureCache:
    """Return the feature cache that the settings ask for."""
    limit, folder = int(pipeline.feature_cache_gib * 2**30), run / "feature_cache"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    if pipeline.feature_cache == "memory":
        return MemoryCache(limit)
    if pipeline.feature_cache == "disk":
        return DiskCache(folder, limit)
    return NoCache()
