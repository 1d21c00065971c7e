"""A step's state, saved and restored, goes on bit for bit; it is put into the tensors that are there."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import store
from paceline.checkpoint.host import HostCopy
from paceline.config import DataSettings, DrafterSettings, GuardSettings, TrainSettings
from paceline.data.loader import micro_batches
from paceline.data.mixture import Mixture
from paceline.data.store import CompletionDataset
from paceline.drafter.model import Drafter
from paceline.records import FeatureBatch, RunError, StepReport
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import FeatureTarget
from paceline.train.guard import Guard
from paceline.train.loop import alone, train_loop
from paceline.train.step import DrafterStep

STEPS, CUT = 8, 5


@pytest.fixture
def world(tiny: TargetFacts, shape: DrafterSettings, make_dataset: Callable[..., CompletionDataset], random_rows: list):
    """Return a maker of warm steps and one of the stream of features from a step on."""
    data = DataSettings(dataset="d", token_budget=120, align=8)
    mixture = Mixture([make_dataset(random_rows)])

    def settings(**changes: Any) -> TrainSettings:
        tree = {"context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4, "batches_per_step": 2, "lr": 1e-2}
        return TrainSettings(**tree | changes)

    def step(train: TrainSettings, seed: int = 0) -> DrafterStep:
        made = DrafterStep(Drafter(shape, tiny.hidden_size).initialise(seed), load_ends(tiny), train)
        made.warm()
        return made

    def stream(train: TrainSettings, first_step: int) -> Any:
        from paceline import blocks

        target = FeatureTarget(tiny, shape.taps, dtype=torch.float32, device="cpu")
        wire = getattr(torch, train.dtype)
        for tokens in micro_batches(mixture, data, train, shape.block_size, first_step=first_step):
            yield FeatureBatch(tokens, target.features(tokens).to(wire), blocks.context_positions(tokens.lengths))

    return settings, step, stream


def run(step: DrafterStep, batches: Any, steps: range, guard: Guard) -> list[StepReport]:
    reports: list[StepReport] = []
    train_loop(
        step,
        alone(batches),
        total_steps=STEPS,
        on_step=reports.append,
        guard=guard,
        meet=lambda done: done == steps.stop,
    )
    assert [report.step for report in reports] == list(steps)
    return reports


def guard_of(state: dict[str, Any] | None = None) -> Guard:
    return Guard(GuardSettings(), 1.0, state)


def save(step: DrafterStep, folder: Path, guard: Guard) -> store.Saved:
    copies = {name: HostCopy(group) for name, group in step.state().items()}
    for name, group in step.state().items():
        copies[name].take(group)
    store.write(folder, CUT, copies, {"guard": guard.state()})
    saved = store.newest(folder, previous=False, tell=print)
    assert saved is not None
    return saved


@pytest.mark.parametrize(
    ("optimizer", "dtype", "more"),
    [
        ("adamw", "float32", {}),
        ("adamw", "bfloat16", {}),
        ("muon", "float32", {}),
        ("muon", "bfloat16", {}),
        ("adamw", "bfloat16", {"moments": "8bit"}),
        ("adamw", "float32", {"offload": "moments", "recompute": "layers"}),
        ("adamw", "bfloat16", {"offload": "moments", "moments": "8bit"}),
    ],
)
def test_a_restored_step_goes_on_bit_for_bit(
    world: Any, tmp_path: Path, optimizer: str, dtype: str, more: dict[str, str]
) -> None:
    settings, make, stream = world
    train = settings(optimizer=optimizer, dtype=dtype, weight_decay=0.01, **more)
    whole = make(train)
    expected = run(whole, stream(train, 0), range(STEPS), guard_of())
    first, guard = make(train), guard_of()
    assert run(first, stream(train, 0), range(CUT), guard) == expected[:CUT]
    saved = save(first, tmp_path, guard)

    second = make(train, seed=1)  # other weights: all must come from the checkpoint
    state = {name: [t.data_ptr() for t in group.values()] for name, group in second.state().items()}
    working = [leaf.data_ptr() for leaf in second._leaves]
    second.restore(saved.tensors())
    assert state == {name: [t.data_ptr() for t in group.values()] for name, group in second.state().items()}
    assert working == [leaf.data_ptr() for leaf in second._leaves]
    assert run(second, stream(train, CUT), range(CUT, STEPS), guard_of(saved.state["guard"])) == expected[CUT:]
    for name, group in whole.state().items():
        for key, tensor in group.items():
            assert torch.equal(tensor, second.state()[name][key]), (name, key)


def test_the_state_is_all_there_is(world: Any) -> None:
    settings, make, _ = world
    state = make(settings(optimizer="adamw")).state()
    kinds = {key.split(".")[0] for key in state["optimizer"]}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert len(state["optimizer"]) == 3 * len(state["drafter"])
    state = make(settings(optimizer="muon")).state()
    matrices = [name for name, weight in state["drafter"].items() if weight.ndim > 1]
    assert {f"momentum.{name}" for name in matrices} <= state["optimizer"].keys()
    assert len(state["optimizer"]) == len(matrices) + 3 * (len(state["drafter"]) - len(matrices))


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_a_state_is_restored_wherever_its_moments_lie(world: Any, tmp_path: Path, moments: str) -> None:
    settings, make, stream = world
    first, guard = make(settings(moments=moments, offload="moments")), guard_of()
    run(first, stream(first.settings, 0), range(CUT), guard)
    saved = save(first, tmp_path, guard)
    second = make(settings(moments=moments), seed=1)
    second.restore(saved.tensors())
    for name, group in first.state().items():
        for key, tensor in group.items():
            assert torch.equal(tensor, second.state()[name][key]), (name, key)
    other = make(settings(moments="float32" if moments == "8bit" else "8bit"), seed=1)
    with pytest.raises(RunError, match=r"has exp_avg.* of another"):
        other.restore(saved.tensors())


def test_a_state_of_another_drafter_is_refused(world: Any, tmp_path: Path) -> None:
    settings, make, _ = world
    step = make(settings())
    tensors = list(save(step, tmp_path, guard_of()).tensors())
    for wrong, sentence in (
        (tensors[:-1], "lacks"),
        ([*tensors, ("optimizer", "momentum.fc.weight", torch.zeros(1))], "has momentum.fc.weight of another"),
        ([(file, name, tensor[None]) for file, name, tensor in tensors], "of another"),
    ):
        with pytest.raises(RunError, match=sentence):
            step.restore(islice(wrong, None))
