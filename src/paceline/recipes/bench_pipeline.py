"""`paceline bench pipeline`: both sides of a run alone, then the whole run in its own threads, with random weights."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.figures import brief, show_rows
from paceline.bench.pipeline import (
    PipelineWork,
    Whole,
    let_go,
    made_target,
    micro_batches,
    pipeline_rows,
    reserved_bytes,
    run_settings,
    step_alone,
    stream,
    target_alone,
    target_facts,
)
from paceline.bench.weights import random_ends
from paceline.checkpoint.saver import Saver
from paceline.config import RunSettings
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.pipeline.listeners import Listeners
from paceline.pipeline.slots import slots_per_rank
from paceline.pipeline.stand_ins import rate_alone, rate_of_stand_ins
from paceline.pipeline.supervisor import RoleState
from paceline.pipeline.threads import train_in_threads
from paceline.records import FeatureBatch, StepReport

_SLEEPS_S = ((0.100, 0.050), (0.050, 0.100), (0.080, 0.080))  # of a target and of a step, as long as real ones
_ALONE = 20  # sleeps


def bench_pipeline(work: PipelineWork, console: Console) -> list[dict[str, Any]]:
    """Measure and return a row for each side and one for the whole run.

    Raises:
        UserError: some devices are shared and some are not.
        RunError: a part cannot be measured here.
    """
    rows, _ = sides_and_whole(work, console)
    show_rows(rows, console)
    return rows


def sides_and_whole(
    work: PipelineWork, console: Console, *, more_warm_up: int = 0, on_step: Callable[[int], None] = lambda steps: None
) -> tuple[list[dict[str, Any]], Whole]:
    """Return a row for each side and one for the whole run, and what that told; see run_whole."""
    how = "colocated" if work.colocated else "apart"
    console.stage(f"{work.name} on {', '.join(work.devices)}, {how}: target features alone")
    batches = micro_batches(work)
    target_s = target_alone(work, batches)
    console.line(f"  {1e3 * target_s:.1f} ms a micro-batch")  # told at once: the whole run may not come to its end
    let_go(work.devices)
    console.stage("drafter step alone")
    step_s = step_alone(work, batches)
    console.line(f"  {1e3 * step_s:.1f} ms a micro-batch")
    let_go(work.devices)
    console.stage("whole run")
    whole, warm = run_whole(work, batches, console, more_warm_up=more_warm_up, on_step=on_step)
    return pipeline_rows(work, batches, target_s, step_s, whole, warm), whole


def run_whole(
    work: PipelineWork,
    batches: list[FeatureBatch],
    console: Console,
    *,
    more_warm_up: int = 0,
    on_step: Callable[[int], None] = lambda steps: None,
) -> tuple[Whole, int]:
    """Run all roles for so many steps, and return what they told and how many of the steps were warm-up.

    Before the steps that are timed slots get as full as they get, and `more_warm_up` steps are made; behind them
    targets stay as far ahead. `on_step` learns how many steps are made, in rank 0's thread.

    Raises:
        RunError: a role failed, and none took its place.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = run_settings(work, Path(folder))
        ahead = -(-slots_per_rank(settings, work.shape.hidden_size) // work.rank_batches)
        warm = ahead + 2 + more_warm_up
        return _run(work, settings, batches, warm + work.steps + ahead, console, on_step), warm


def _run(
    work: PipelineWork,
    settings: RunSettings,
    batches: list[FeatureBatch],
    total_steps: int,
    console: Console,
    on_step: Callable[[int], None],
) -> Whole:
    whole, run = Whole(), Path(settings.run_dir)
    device = batches[0].features_TD.device
    targets = [made_target(work, name) for name in work.targets]

    def fill(drafter: Drafter) -> Drafter:
        whole.drafters.append(drafter.initialise(settings.train.seed))
        return drafter

    with Saver(run, settings.checkpoint, describe=dict, tell=_nothing, stopping=bool, total_steps=total_steps) as saver:
        _, whole.recompiles = train_in_threads(
            settings,
            target_facts(work, run),
            batches=stream(work, batches, total_steps),
            largest=batches[0].tokens,
            total_steps=total_steps,
            load_ends=partial(random_ends, work.shape, device, work.numbers),
            policy=work.policy,
            fill=fill,
            start=None,
            saver=saver,
            stopping=bool,
            moving=int,
            told=_listeners(work, whole, console, on_step),
            made=lambda index: targets[index],
        )
    return whole


def _listeners(work: PipelineWork, whole: Whole, console: Console, then: Callable[[int], None]) -> Listeners:
    """Return who writes into `whole` what a run tells."""

    def on_step(report: StepReport) -> None:
        whole.stamps.append(time.perf_counter())
        whole.losses.append(report.loss)
        whole.reserved.append(reserved_bytes(work.devices))
        then(len(whole.stamps))

    def on_state(report: RoleState) -> None:
        if report.state in ("loading", "compiling", "ready"):
            console.stage(f"whole run: {report.role.name} {report.state}")

    def on_replica(event: str, **told: object) -> None:
        if event == "target_path":
            how = [told["path"], *(key for key in ("compiled", "fp8") if told[key]), told["attention"], told["reason"]]
            whole.paths[str(told["role"])] = ", ".join(str(part) for part in how if part)
        elif event != "loading":
            whole.faults.append({"event": event, "at": time.perf_counter(), **told})

    return Listeners(
        on_state=on_state,
        on_ready=_nothing,
        on_step=on_step,
        on_held_out=_nothing,
        on_rejected=_nothing,
        on_rolled_back=_nothing,
        on_recompile=_nothing,
        on_replica=on_replica,
        on_sample=lambda **sample: whole.samples.append((time.perf_counter(), sample)),
        warn=console.line,
    )


def _nothing(*_: object, **__: object) -> None:
    """Listen to nothing."""


def bench_stand_ins(console: Console, *, targets: int, drafters: int, count: int) -> list[dict[str, Any]]:
    """Measure the pipeline alone, with roles that sleep, and return a row for each pair of times."""
    rows = []
    for target_s, step_s in _SLEEPS_S:
        console.stage(f"a target that takes {1e3 * target_s:g} ms, a step that takes {1e3 * step_s:g} ms")
        rate = rate_of_stand_ins(targets=targets, ranks=drafters, target_s=target_s, step_s=step_s, count=count)
        slower = min(targets * rate_alone(target_s, _ALONE), drafters * rate_alone(step_s, _ALONE))
        rows.append(
            {
                "who": "stand-ins that sleep",
                "targets": targets,
                "drafters": drafters,
                "target_ms": 1e3 * target_s,
                "step_ms": 1e3 * step_s,
                "micro_batches_per_s": round(rate, 3),
                "slower_side_per_s": round(slower, 3),
                "share_of_bound": round(rate / slower, 4),
                "counted": "threads, leases, slots, channel and dealing of a run; nothing is computed",
            }
        )
        console.line(brief(rows[-1], "micro_batches_per_s", "share_of_bound"))
    show_rows(rows, console)
    return rows
