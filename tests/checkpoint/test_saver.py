"""Saving goes on beside the training; a full disk stops or holds the run as set, and nothing is lost."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import saver as module
from paceline.checkpoint import store
from paceline.checkpoint.best import Best
from paceline.checkpoint.saver import Saver
from paceline.config import CheckpointSettings
from paceline.records import RunError

TENSORS = {"drafter": {"w": torch.zeros(1000)}, "optimizer": {"step.w": torch.tensor(0.0)}}


@pytest.fixture(autouse=True)
def fast_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.02)


class Told(list[tuple[str, dict[str, Any]]]):
    def __call__(self, event: str, **values: Any) -> None:
        self.append((event, values))

    @property
    def kinds(self) -> list[str]:
        return [event for event, _ in self]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Saver, Told]]:
    def make(
        *,
        stopping: Callable[[], bool] = lambda: False,
        best: Best | None = None,
        total_steps: int | None = None,
        line: Sequence[int] = (),
        **settings: Any,
    ) -> tuple[Saver, Told]:
        told = Told()
        made = CheckpointSettings(**settings)
        saver = Saver(
            tmp_path,
            made,
            describe=lambda: {"a": 1},
            tell=told,
            stopping=stopping,
            best=best,
            total_steps=total_steps,
            line=line,
        )
        saver.prepare(TENSORS)
        return saver, told

    return make


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait for it."""
    opened, whole = threading.Event(), store.write

    def write(*args: Any, **more: Any) -> None:
        assert opened.wait(10)
        whole(*args, **more)

    monkeypatch.setattr(store, "write", write)
    return opened


def test_every_so_many_steps_and_the_last_ones_stay(make: Any, tmp_path: Path) -> None:
    saver, told = make(every_steps=2, keep=2)
    for steps in range(1, 10):
        with saver:
            saver.between_steps(steps, TENSORS, last=False)
    assert [values["steps"] for event, values in told if event == "checkpoint"] == [2, 4, 6, 8]
    assert store.saved_steps(tmp_path) == [6, 8]


def test_the_guards_history_is_saved_and_the_last_good_checkpoint_stays(make: Any, tmp_path: Path) -> None:
    saver, _ = make(every_steps=2, keep=2)
    for steps in range(1, 10):
        with saver:
            more = {"guard": {"applied": steps}}
            saver.between_steps(steps, TENSORS, last=False, more=more, good=3 if 3 < steps < 8 else None)
        if steps == 6:
            assert store.saved_steps(tmp_path) == [2, 6]
    assert store.saved_steps(tmp_path) == [6, 8]
    saved = store.newest(tmp_path, previous=False, tell=print)
    assert saved is not None
    assert (saved.state["guard"], saved.state["a"]) == ({"applied": 8}, 1)


def test_every_so_many_minutes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saver, told = make(every_minutes=10)
    for steps in range(40):
        now[0] += 60
        with saver:
            saver.between_steps(steps, TENSORS, last=False)
    assert len(told) == 4


def test_training_goes_on_and_a_save_that_is_due_meanwhile_is_skipped(make: Any, gate: Any, tmp_path: Path) -> None:
    """What is written is the state as it was, whatever becomes of the tensors."""
    saver, told = make(every_steps=1)
    live = {"drafter": {"w": torch.ones(1000)}, "optimizer": TENSORS["optimizer"]}
    with saver:
        began = time.monotonic()
        for steps in (1, 2, 3):
            saver.between_steps(steps, live, last=False)
            live["drafter"]["w"] += 1
        assert time.monotonic() - began < 5
        assert told.kinds == ["checkpoint_skipped"] * 2
        gate.set()
    assert told.kinds[-1] == "checkpoint"
    saved = store.newest(tmp_path, previous=False, tell=print)
    assert saved is not None
    assert saved.steps == 1
    assert {float(tensor.max()) for file, _, tensor in saved.tensors() if file == "drafter"} == {1.0}


def test_the_last_state_waits_for_the_save_before_it(make: Any, gate: Any, tmp_path: Path) -> None:
    saver, told = make(every_steps=2)
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        threading.Timer(0.2, gate.set).start()
        saver.between_steps(3, TENSORS, last=True)
        assert told.kinds == ["checkpoint", "checkpoint"]
    assert store.saved_steps(tmp_path) == [2, 3]


def test_who_is_released_does_not_touch_what_is_being_written(make: Any, gate: Any, tmp_path: Path) -> None:
    saver, told = make(every_steps=2)
    other = {"drafter": {"w": torch.full((1000,), 5.0)}, "optimizer": TENSORS["optimizer"]}
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        saver.release()
        saver.between_steps(3, other, last=True)
        gate.set()
    saved = store.newest(tmp_path, previous=False, tell=print)
    assert saved is not None
    assert (saved.steps, told.kinds) == (2, ["checkpoint"])
    assert all(float(tensor.abs().max()) == 0 for _, _, tensor in saved.tensors())


class FullDisk:
    """A disk with no room, until there is; as seen by a look at it, or by a write that fails half-way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
        self.full = True
        free, whole = module.free_bytes, store.HostCopy.write

        def write(copy: Any, path: Path) -> str:
            if self.full:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(copy, path)

        if seen == "look":
            monkeypatch.setattr(module, "free_bytes", lambda run: 10 if self.full else free(run))
        else:
            monkeypatch.setattr(store.HostCopy, "write", write)


@pytest.mark.parametrize("seen", ["look", "write"])
def test_a_full_disk_stops_the_run_with_what_to_do(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: str
) -> None:
    saver, told = make(every_steps=2, on_full_disk="stop")
    with saver:
        saver.between_steps(2, TENSORS, last=True)
    disk = FullDisk(monkeypatch, seen)
    saver, told = make(every_steps=2, on_full_disk="stop")
    saver.between_steps(4, TENSORS, last=False)
    saver._thread.join()
    assert told.kinds == ["checkpoint_failed"]
    with pytest.raises(RunError, match=rf"no room for a checkpoint: .*go on with `paceline train {tmp_path} --resume`"):
        saver.between_steps(5, TENSORS, last=False)
    assert disk.full
    saved = store.newest(tmp_path, previous=False, tell=print)
    assert saved is not None
    assert saved.steps == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("seen", ["look", "write"])
def test_a_full_disk_holds_the_run_until_there_is_room(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: str
) -> None:
    disk = FullDisk(monkeypatch, seen)
    saver, told = make(every_steps=2, on_full_disk="wait")
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        while not told:
            time.sleep(0.01)

        def make_room() -> None:
            disk.full = False

        began = time.monotonic()
        threading.Timer(0.3, make_room).start()
        saver.between_steps(3, TENSORS, last=False)
        assert time.monotonic() - began > 0.2
        assert told.kinds == ["disk_full", "checkpoint"]
    assert store.saved_steps(tmp_path) == [2]


def test_a_run_that_waits_for_room_can_be_stopped(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FullDisk(monkeypatch, "look")
    asked = threading.Event()
    saver, told = make(every_steps=2, on_full_disk="wait", stopping=asked.is_set)
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        while not told:
            time.sleep(0.01)
        threading.Timer(0.2, asked.set).start()
        saver.between_steps(3, TENSORS, last=False)
        saver.between_steps(4, TENSORS, last=True)
    assert told.kinds == ["disk_full", "checkpoint_failed", "checkpoint_failed"]
    assert store.saved_steps(tmp_path) == []


def test_the_best_is_saved_whether_or_not_it_is_time(make: Any, tmp_path: Path) -> None:
    best = Best()
    saver, told = make(every_steps=4, keep=1, best=best, total_steps=11)
    losses = {2: 5.0, 4: 4.0, 6: 4.5, 8: 4.5, 10: 3.0, 11: 2.0}
    for steps in range(1, 12):
        if steps in losses:
            best.offer(steps, losses[steps])
        with saver:
            saver.between_steps(steps, TENSORS, last=False)
    saves = {values["steps"]: values["best"] for event, values in told if event == "checkpoint"}
    assert saves == {2: True, 4: True, 8: False, 10: True, 11: True}
    assert store.named(tmp_path, "best", []).steps == 11
    assert store.saved_steps(tmp_path) == [11]


def test_the_end_is_saved_only_if_it_is_the_best(make: Any, tmp_path: Path) -> None:
    best = Best()
    saver, told = make(every_steps=1, best=best, total_steps=2)
    best.offer(1, 1.0)
    best.offer(2, 1.0)
    with saver:
        saver.between_steps(1, TENSORS, last=False)
        saver.between_steps(2, TENSORS, last=False)
    assert [(event, values["steps"]) for event, values in told] == [("checkpoint", 1)]


def test_the_best_waits_for_the_save_before_it(make: Any, gate: Any, tmp_path: Path) -> None:
    best = Best()
    saver, told = make(every_steps=2, best=best)
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        best.offer(3, 1.0)
        threading.Timer(0.2, gate.set).start()
        saver.between_steps(3, TENSORS, last=False)
    assert told.kinds == ["checkpoint", "checkpoint"]
    assert store.named(tmp_path, "best", []).steps == 3


def test_a_best_that_cannot_be_saved_is_none(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    best = Best()
    saver, told = make(every_steps=100, keep=1, best=best)

    def broken(*args: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for steps, loss in ((1, 5.0), (2, 3.0), (3, 4.0)):
        assert best.offer(steps, loss), "the second is lost, so the third is the best"
        with monkeypatch.context() as patch, saver:
            if steps == 2:
                patch.setattr(store, "write", broken)
            saver.between_steps(steps, TENSORS, last=False)
        assert best.steps == (1 if steps == 2 else steps)
        assert store.named(tmp_path, "best", []).steps == best.steps
    assert told.kinds == ["checkpoint", "checkpoint_failed", "checkpoint"]


@pytest.mark.parametrize("on_full_disk", ["stop", "wait"])
def test_another_fault_of_the_disk_is_told_and_the_run_goes_on(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_full_disk: str
) -> None:
    saver, told = make(every_steps=2, on_full_disk=on_full_disk)

    def broken(*args: Any, **more: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, saver:
        patch.setattr(store, "write", broken)
        saver.between_steps(2, TENSORS, last=False)
    with saver:
        saver.between_steps(4, TENSORS, last=False)
    assert told[0] == ("checkpoint_failed", {"steps": 2, "message": "Input/output error"})
    assert told.kinds == ["checkpoint_failed", "checkpoint"]
    assert store.saved_steps(tmp_path) == [4]


def test_what_a_failed_run_has_reached_is_saved_once(make: Any, tmp_path: Path) -> None:
    saver, told = make(every_steps=2)
    with saver:
        saver.between_steps(2, TENSORS, last=False)
        saver.release()
        assert saver.save_now(2, TENSORS), "it is on the disk already"
        assert saver.save_now(3, TENSORS)
    assert [values["steps"] for event, values in told if event == "checkpoint"] == [2, 3]
    assert store.saved_steps(tmp_path) == [2, 3]


def test_a_failed_run_without_room_is_told_so(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, told = make(on_full_disk="wait")
    monkeypatch.setattr(module, "free_bytes", lambda path: 0)
    with saver:
        saver.release()
        assert not saver.save_now(3, TENSORS)
    assert told.kinds == ["checkpoint_failed"]


def test_a_save_that_never_ends_holds_nobody_for_ever(make: Any, gate: threading.Event) -> None:
    saver, told = make(every_steps=1)
    saver._patience_s = 0.1
    with saver:
        saver.between_steps(1, TENSORS, last=False)
        assert not saver.save_now(2, TENSORS), "what is being written must not change"
    assert told == [
        (
            "checkpoint_failed",
            {"steps": 1, "message": "it was still being written after pipeline.work_timeout_s (0.1 s)"},
        )
    ]
    gate.set()
    saver._thread.join(10)
    assert told.kinds == ["checkpoint_failed"]


def test_who_waits_for_the_disk_says_that_it_is_patient(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, _ = make(every_steps=1, on_full_disk="wait")
    waits: list[str] = []

    @contextmanager
    def patient(what: str) -> Iterator[None]:
        waits.append(what)
        yield

    saver._patient = patient
    free = [0]
    monkeypatch.setattr(module, "free_bytes", lambda path: free[0])
    with saver:
        saver.between_steps(1, TENSORS, last=False)
        while saver._full is None:
            time.sleep(0.001)
        free[0] = 2**30
        saver.between_steps(2, TENSORS, last=True)
    assert waits == ["room on the disk", *["the checkpoint to be on the disk"] * 2]


def saved(saver: Saver, steps: int, *, candidate: bool = False) -> None:
    saver.between_steps(steps, TENSORS, last=False, candidate=candidate)
    saver.settle()


def test_a_candidate_stays_until_its_worth_is_known(make: Any, tmp_path: Path) -> None:
    best = Best(by="tau")
    saver, _ = make(every_steps=2, keep=1, best=best, total_steps=10)
    saved(saver, 1, candidate=True)  # although nothing is due
    saved(saver, 3, candidate=True)
    for steps in (4, 6):
        saved(saver, steps)
    assert store.saved_steps(tmp_path) == [1, 3, 6]
    assert saver.has(3)
    assert best.offer(3, 2.0)
    saver.choose(3)
    saver.let_go(1)
    saved(saver, 8)
    assert store.saved_steps(tmp_path) == [3, 8]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-00000003"
    saved(saver, 10, candidate=True)  # the end, whose weights are saved anyway, may be the best
    assert store.saved_steps(tmp_path) == [3, 8, 10] or store.saved_steps(tmp_path) == [3, 10]
    assert not saver.has(8), "it is none"


def test_what_a_checkpoint_names_stays_with_it(make: Any, tmp_path: Path) -> None:
    """The newest checkpoint still says that the old best is it: who goes on from there needs that one."""
    saver, _ = make(every_steps=2, keep=1, best=Best(by="tau"))
    for steps in (2, 4):
        saved(saver, steps, candidate=True)
    named = {"best": {"steps": 2, "tau": 1.0}, "evaluation": {"pending": {"steps": 4}}}
    saver._describe = lambda: named
    saver.let_go(2)
    saver.let_go(4)
    saved(saver, 6)
    assert store.saved_steps(tmp_path) == [2, 4, 6]
    saver._describe = dict
    saved(saver, 8)
    assert store.saved_steps(tmp_path) == [8]


def test_a_candidate_that_cannot_be_saved_is_none(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, told = make(every_steps=2)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "no device")

    monkeypatch.setattr(store, "write", broken)
    saved(saver, 3, candidate=True)
    assert told.kinds == ["checkpoint_failed"]
    assert not saver.has(3)


def test_a_run_that_went_back_is_saved_before_what_it_passed_over_goes(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saver, told = make(every_steps=4, keep=2)
    for steps in (4, 8):
        saved(saver, steps)
    saver.go_back(4)
    assert store.saved_steps(tmp_path) == [4, 8]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000008"
    rename = Path.rename

    def broken(path: Path, to: Path) -> Path:
        if to.name.endswith(".gone"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        saved(saver, 9)  # although nothing is due
    assert store.saved_steps(tmp_path) == [4, 8, 9]
    saved(saver, 10)
    assert [values["steps"] for _, values in told] == [4, 8, 9]
    saved(saver, 12)
    assert store.saved_steps(tmp_path) == [9, 12], "what could not be removed in time is none of the newest"
    newest = store.newest(tmp_path, previous=False, tell=print)
    assert newest is not None
    assert newest.state["line"] == [4, 9]


def test_what_was_passed_over_as_damaged_counts_as_none_of_the_newest(make: Any, tmp_path: Path) -> None:
    """The next save need not be after as many steps as the damaged one."""
    saver, _ = make(every_steps=2, keep=2)
    for steps in (2, 4):
        saved(saver, steps)
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").write_text("")
    start = store.newest(tmp_path, previous=True, tell=lambda text: None)
    assert start is not None
    saver, _ = make(every_steps=5, keep=2, line=start.line())
    saved(saver, 5)
    assert store.saved_steps(tmp_path) == [2, 5]
