"""Whatever a run does and wherever it is killed: the newest checkpoints are there, and the best one, and it is named.

A run is played in which only the arithmetic is made up: what is rejected, and each state's held-out loss or acceptance.
What saves, removes, goes back and goes on is the real thing. Before every operation on the disk the folder is noted as
a kill would leave it; from each of these the run goes on, and is held against what the plan alone says.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import store
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import CheckpointSettings, GuardSettings, RunSettings
from paceline.observe.console import Console
from paceline.pipeline.rollback import Rollback
from paceline.recipes.train_resume import best_so_far
from paceline.records import StepReport
from paceline.runtime.gate import Gate
from paceline.train.guard import Guard
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep

DELAY = 2  # steps that an evaluation takes
SHAPE = {"taps": [0], "mask_token_id": 3, "heads": 1, "kv_heads": 1, "head_dim": 2, "intermediate_size": 4}
TREE = {"target": {"model": "m"}, "data": {"dataset": "d"}, "drafter": {**SHAPE, "rope_theta": 1e4}}


@dataclass(frozen=True)
class Plan:
    """A run of `len(worth)` steps; `worth[n]` is the loss after n + 1 steps, or the acceptance's negative."""

    worth: tuple[float, ...]
    keep: int = 1
    every: int = 5  # steps between two saves
    looks: int = 4  # steps between two held-out losses or evaluations
    rejected: frozenset[int] = frozenset()
    by: str = "loss"
    window: int = 6
    allowed: int = 2  # rejected steps of a window

    def due(self, steps: int) -> bool:
        return steps % self.looks == 0 or steps == len(self.worth)

    def best(self, steps: int, *, ended: bool = False) -> int | None:
        """The best state of those whose worth is known after so many steps, whatever became of them since."""
        # Only the last state is waited for, and nobody waits for what comes of it before it is saved.
        delay = 0 if self.by == "loss" or ended else 1 if steps == len(self.worth) else DELAY
        known = [n for n in range(1, steps + 1 - delay) if self.due(n) and math.isfinite(self.worth[n - 1])]
        return min(known, key=lambda n: self.worth[n - 1], default=None)


@dataclass
class Promise:
    """What must be on the disk from the moment on that something was told: worked out from what was told alone."""

    line: list[int] = field(default_factory=list)  # the newest checkpoints that stay, and that to go back to
    best: int | None = None  # when the newest checkpoint was told

    def saved(self, plan: Plan, steps: int, good: int | None) -> None:
        line = [*(n for n in self.line if n != steps), steps]
        before = [n for n in line if good is not None and n <= good][-1:]
        self.line = line[-plan.keep :]
        if before and before[0] not in self.line:
            self.line = [*before, *line[-max(1, plan.keep - 1) :]]
        self.best = plan.best(steps)

    def copy(self) -> "Promise":
        return Promise([*self.line], self.best)


class Weights(DrafterStep):
    """Which steps were applied."""

    def __init__(self, steps: int) -> None:
        self.applied = torch.zeros(steps)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"drafter": {"applied": self.applied}, "optimizer": {"sum": self.applied.sum()}}

    def restore(self, saved: Any) -> None:
        self.applied.copy_({name: tensor for _, name, tensor in saved}["applied"])


class Lines(Console):
    def __init__(self) -> None:
        super().__init__(json=True)
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)


def play(run: Path, plan: Plan, promise: Promise, *, previous: bool = False) -> tuple[list[float], int | None]:
    """Begin or go on, as `paceline train` does, until the end; return the weights and the best state."""
    total, console = len(plan.worth), Lines()
    run.mkdir(exist_ok=True)
    store.sweep(run)
    start = store.newest(run, previous=previous, tell=lambda line: None)
    best = best_so_far(run, start, plan.by, console)  # type: ignore[arg-type]
    assert console.lines == []
    guard = Guard(
        GuardSettings(window=plan.window, rejected=plan.allowed, spike=None),
        1.0,
        start.state["guard"] if start else None,
    )
    weights = Weights(total)
    if start:
        weights.restore(start.tensors())
        if start.steps not in promise.line:  # a kill came before it was told
            promise.saved(plan, start.steps, guard.first_rejected)
    pending: int | None = ((start.state["evaluation"] or {}).get("pending") or {}).get("steps") if start else None
    good: int | None = None

    def describe() -> dict[str, Any]:
        return {"best": best.state(), "evaluation": {"pending": {"steps": pending} if pending else None}}

    def tell(event: str, **values: Any) -> None:
        assert event == "checkpoint", (event, values)
        promise.saved(plan, values["steps"], good)

    saver = Saver(
        run,
        CheckpointSettings(every_steps=plan.every, keep=plan.keep),
        describe=describe,
        tell=tell,
        stopping=lambda: False,
        best=best,
        total_steps=total,
        line=start.line() if start else (),
    )
    saver.prepare(weights.state())
    if pending:
        assert pending in store.saved_steps(run)
        saver.adopt(pending)

    def went_back(steps: int, to: Saved) -> None:
        promise.line = [n for n in promise.line if n <= to.steps]

    tree = {**TREE, "run_dir": str(run), "checkpoint": {"keep": plan.keep}}
    roll_back = Rollback(
        RunSettings.model_validate(tree),
        saver=saver,
        meeting=Meeting(1),
        gate=Gate(),
        tell=went_back,
        warn=pytest.fail,
    )

    def judge(now: bool = False) -> None:
        nonlocal pending
        if pending and (now or steps >= pending + DELAY):
            judged, pending = pending, None
            if saver.has(judged) and best.offer(judged, -plan.worth[judged - 1]):
                saver.choose(judged)
            else:
                saver.let_go(judged)

    for step in range(start.steps if start else 0, total):
        applied, steps = step not in plan.rejected, step + 1
        weights.applied[step] += applied
        loss = 1.0 if applied else math.nan
        guard.add(StepReport(step, 0, loss, 1.0, (), (), 1, 1, 1, 1, 1, 0.1, loss, applied))
        if guard.exceeded:
            roll_back(0, weights, guard, steps)
        good, candidate = guard.first_rejected, False
        if plan.by == "loss" and plan.due(steps):
            best.offer(steps, plan.worth[step])
        if plan.by == "tau":
            judge(now=steps == total)
            candidate = plan.due(steps) and pending is None
            pending = steps if candidate else pending
        more = {"guard": guard.state()}
        saver.between_steps(steps, weights.state(), last=False, more=more, good=good, candidate=candidate)
        if saver._thread is not None:
            saver._thread.join()
    judge(now=True)
    return weights.applied.tolist(), best.steps


Files = dict[str, bytes]


def read(run: Path) -> Files:
    """A folder's files and, with no content, its folders."""
    found: Files = {}
    for folder, inner, files in os.walk(run):
        place = Path(folder)
        found |= {f"{(place / name).relative_to(run)}/": b"" for name in inner}
        found |= {str((place / name).relative_to(run)): (place / name).read_bytes() for name in files}
    return found


def lay_down(files: Files, run: Path) -> Path:
    for name in sorted(files):
        place = run / name
        if name.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(files[name])
    return run


def matters(files: Files) -> Files:
    """What decides how a run goes on: nothing that is only written aside."""
    return {name: content for name, content in files.items() if "/." not in name or ".old." in name}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, unlike a loss of power, leaves what was written."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@contextmanager
def noted(run: Path, promise: Promise) -> Iterator[list[tuple[Files, Promise]]]:
    """Note what a kill just before any operation on the disk would leave, once each, and what was promised by then."""
    left: list[tuple[Files, Promise]] = []

    def watched(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            look()
            return whole(*args, **more)

        return call

    def look() -> None:
        files = read(run)
        if not left or matters(files) != matters(left[-1][0]) or promise != left[-1][1]:
            left.append((files, promise.copy()))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, watched(getattr(os, name)))
        yield left
        look()


def check(plan: Plan, run: Path, promise: Promise, start: Saved) -> None:
    """Hold what a run would go on from against what was promised."""
    there = store.saved_steps(run)
    assert start.steps >= max(promise.line, default=0)
    assert {*promise.line} <= {*there}
    console = Lines()
    best = best_so_far(run, start, plan.by, console)  # type: ignore[arg-type]
    assert console.lines == []
    assert best.steps == plan.best(start.steps)
    if promise.best is not None:
        assert best.steps is not None
        assert plan.worth[best.steps - 1] <= plan.worth[promise.best - 1], "what was told to be the best has a better"
    if best.steps is not None:
        assert store.named(run, "best", ["drafter.safetensors"]).steps == best.steps


def survive(plan: Plan, folder: Path, *, again: random.Random | None = None) -> int:
    """Kill a run everywhere, go on, with and without a damaged newest checkpoint, and return at how many places.

    With `again`, what goes on is killed once more at a place drawn at random.
    """
    promise = Promise()
    with noted(folder / "whole", promise) as left:
        whole = play(folder / "whole", plan, promise)
    assert whole[1] == plan.best(len(plan.worth), ended=True)
    for place, (files, then) in enumerate(left):
        run = lay_down(files, folder / f"{place}")
        goes_on(plan, run, then.copy(), whole)
        if again is not None:
            run, promise = lay_down(files, folder / f"{place}-again"), then.copy()
            with noted(run, promise) as more:
                play(run, plan, promise)
            files, then = again.choice(more)
            goes_on(plan, lay_down(files, folder / f"{place}-once-more"), then, whole)
        if plan.keep == 1:
            continue  # of one nothing is promised once it is damaged
        run = lay_down(files, folder / f"{place}-damaged")
        store.sweep(run)
        newest = store.newest(run, previous=False, tell=pytest.fail)
        if newest is None or not (older := [n for n in then.line if n < newest.steps]):
            continue
        (newest.folder / "drafter.safetensors").write_bytes(b"")
        start = store.newest(run, previous=True, tell=lambda line: None)
        assert start is not None
        assert start.steps >= older[-1]
        check(plan, run, Promise([n for n in older if n <= start.steps]), start)
        assert play(run, plan, Promise(), previous=True) == whole
    return len(left)


def goes_on(plan: Plan, run: Path, promise: Promise, whole: tuple[list[float], int | None]) -> None:
    store.sweep(run)
    start = store.newest(run, previous=False, tell=pytest.fail)
    if start is None:
        assert promise == Promise()
    else:
        check(plan, run, promise, start)
    assert play(run, plan, promise) == whole
    if whole[1] is not None:
        assert store.named(run, "best", ["drafter.safetensors"]).steps == whole[1]


# After 4 steps 3.0 is the best, after 8 steps 1.5, after 12 steps no better; or after 4 steps for good.
FALLS = (9.0, 9.0, 9.0, 3.0, 9.0, 9.0, 9.0, 1.5, 9.0, 9.0, 9.0, 5.0, 9.0, 9.0)
RISES = tuple(float(n + 1) for n in range(14))
BACK = frozenset({6, 8, 9})  # the third one leads from 10 back to 5
QUICK = {
    "back behind its best": Plan(FALLS, rejected=BACK),
    "two are kept": Plan(FALLS, keep=2, rejected=BACK),
    "by acceptance": Plan(FALLS, rejected=BACK, by="tau"),
}
OTHERS = {
    "three are kept, saved often": Plan(FALLS, keep=3, every=2, rejected=BACK),
    "never better": Plan(RISES, rejected=BACK),
    "never back": Plan(FALLS, keep=2, every=3),
    "two are kept, by acceptance": Plan(FALLS, keep=2, rejected=BACK, by="tau"),
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_killed_anywhere_a_run_has_its_newest_checkpoints_and_its_best(tmp_path: Path, name: str) -> None:
    assert survive({**QUICK, **OTHERS}[name], tmp_path) > 12


def test_killed_once_more_before_any_checkpoint_is_named(tmp_path: Path) -> None:
    """Then there are two, and no pointer would say which is the newest."""
    plan, promise = Plan((9.0,) * 6, every=2, looks=5), Promise()
    with noted(tmp_path / "whole", promise) as left:
        whole = play(tmp_path / "whole", plan, promise)
    first = "checkpoints/step-00000002/"
    files, then = next(one for one in left if first in one[0] and "checkpoints/latest" not in one[0])
    with noted(lay_down(files, tmp_path / "killed"), then) as more:
        assert play(tmp_path / "killed", plan, then) == whole
    for place, (files, then) in enumerate(more):
        goes_on(plan, lay_down(files, tmp_path / f"{place}"), then, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_run_killed_twice(tmp_path: Path, seed: int) -> None:
    """At most five steps are rejected, the first behind a save: so it goes back once, or never."""
    draw = random.Random(seed)
    total, every = draw.randrange(8, 17), draw.randrange(1, 6)
    first = draw.randrange(every, total)
    survive(
        Plan(
            worth=tuple(draw.choice([draw.randrange(9) / 2, math.nan]) for _ in range(total)),
            keep=draw.randrange(1, 4),
            every=every,
            looks=draw.randrange(DELAY, 6),
            rejected=frozenset(draw.sample(range(first, total), min(total - first, draw.randrange(6)))),
            by=draw.choice(["loss", "tau"]),
        ),
        tmp_path,
        again=draw,
    )
