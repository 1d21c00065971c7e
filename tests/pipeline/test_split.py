"""Replicas whose layers lie on two devices: the run is that of others, also when one fails or hangs."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_run import of, run

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.pipeline.slots import Slots
from paceline.recipes.train import train
from paceline.records import Interrupted, RunError
from paceline.target.feature_cache import MemoryCache
from paceline.target.replica import TargetReplica

TWO: dict[str, Any] = {"target": {"devices_per_replica": 2}, "pipeline": {"targets": ["cpu"] * 2}}


def split(settings: Any, name: str, *, replicas: int = 1, **pipeline: Any) -> RunSettings:
    changes = {"targets": ["cpu"] * 2 * replicas} | pipeline
    made: RunSettings = settings(name, target={"devices_per_replica": 2}, pipeline=changes)
    return made


def told(settings: RunSettings, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in read_events(Path(settings.run_dir)) if event["event"] in kinds]


def losses(settings: RunSettings) -> dict[int, float]:
    train(settings, console=Console(json=True))
    return {event["step"]: event["loss_sum"] for event in told(settings, "step")}


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if ", lane " in thread.name]


class Fault:
    """Lets a layer do something else at some micro-batches, of whichever replica."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: int, what: Any) -> None:
        whole, features = TargetReplica.load, TargetReplica._features
        at = threading.local()

        def load(replica: TargetReplica) -> None:
            whole(replica)
            hook = lambda *_: what(replica, at.seq) if hasattr(at, "seq") else None  # noqa: E731
            replica._target._trunk.layers[layer].register_forward_pre_hook(hook)

        def noted(replica: TargetReplica, tokens: Any) -> torch.Tensor:
            at.seq = tokens.seq
            return features(replica, tokens)

        monkeypatch.setattr(TargetReplica, "load", load)
        monkeypatch.setattr(TargetReplica, "_features", noted)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_drafter_learns_the_same_to_the_bit(settings: Any, replicas: int) -> None:
    expected, weights = run(settings("whole"))
    tree = split(settings, "split", replicas=replicas)
    found, same = run(tree)
    assert [event["loss_sum"] for event in of(found, "step")] == [event["loss_sum"] for event in of(expected, "step")]
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert lanes() == []
    assert "models loaded" in [event["name"] for event in told(tree, "stage")]


def test_with_little_credit_nobody_waits_for_ever(settings: Any) -> None:
    expected = losses(settings("whole"))
    assert losses(split(settings, "split", replicas=2, credit_gib=1e-6)) == expected


def test_a_stage_that_fails_is_named_and_its_replica_built_anew(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(settings("whole"))
    left, before = [3, 7], []

    def fail(_replica: TargetReplica, seq: int) -> None:
        if seq in left:
            left.remove(seq)
            raise RuntimeError(f"device lost at {seq}")

    whole = TargetReplica.load

    def load(replica: TargetReplica) -> None:
        before.append(lanes())
        whole(replica)

    made: list[Slots] = []
    make = Slots.make

    def noted(slots: Slots, rank: int, like_CD: torch.Tensor) -> None:
        make(slots, rank, like_CD)
        made.append(slots)
        assert len(slots._free[rank]) == 4, "one for each of three lanes, and one that is read"

    monkeypatch.setattr(TargetReplica, "load", load)
    monkeypatch.setattr(Slots, "make", noted)
    Fault(monkeypatch, 3, fail)
    tree = split(settings, "broken", credit_gib=1e-6)
    assert losses(tree) == expected
    failures = told(tree, "replica_failed")
    assert [event["restarted"] for event in failures] == [True, True]
    for event, seq in zip(failures, (3, 7), strict=True):
        assert re.fullmatch(rf"micro-batch {seq} \(rows [\d, ]+\), layers 2 to 4 on cpu", event["doing"])
        assert event["message"].endswith(f", layers 2 to 4 on cpu): RuntimeError: device lost at {seq}")
    assert before == [[], [], []], "no lane of the one before is left when weights are loaded anew"
    assert made[0]._retired == [], "so their slots are used again"
    assert lanes() == []


def test_two_failures_at_one_micro_batch_are_the_datas_and_no_other_is_suspected(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_replica: TargetReplica, seq: int) -> None:
        if seq == 4:
            raise RuntimeError("device lost")

    Fault(monkeypatch, 1, fail)
    tree = split(settings, "broken", replicas=2, restarts=100)
    with pytest.raises(RunError, match=r"^Two replicas have failed at micro-batch 4, .* layers 0 to 1 on cpu"):
        losses(tree)
    assert [event["restarted"] for event in told(tree, "replica_failed")] == [True, False]
    assert lanes() == []


@pytest.mark.timeout(120)
def test_a_stage_that_hangs_is_found_and_the_other_replica_goes_on(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(settings("whole"))
    stuck, go = threading.Event(), threading.Event()

    def hang(_replica: TargetReplica, seq: int) -> None:
        if seq == 3 and not stuck.is_set():
            stuck.set()
            assert go.wait(60)

    Fault(monkeypatch, 3, hang)
    tree = split(settings, "broken", replicas=2, work_timeout_s=4)
    try:
        assert losses(tree) == expected
        (event,) = told(tree, "replica_hung")
        assert event["doing"].startswith("micro-batch 3 (rows ")
        assert event["doing"].endswith(", layers 2 to 4 on cpu")
        stacks = Path(event["stacks"]).read_text()
        assert f"{event['role']}, lane " in stacks
        assert "in hang" in stacks
    finally:
        go.set()
    for thread in threading.enumerate():
        if ", lane " in thread.name:
            thread.join(30)
    assert lanes() == []


def test_a_micro_batch_without_room_is_computed_in_halves(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, left = losses(settings("whole")), [3]

    def full(_replica: TargetReplica, seq: int) -> None:
        if seq in left:
            left.remove(seq)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    Fault(monkeypatch, 3, full)
    tree = split(settings, "tight")
    found = losses(tree)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
    (event,) = told(tree, "batch_split")
    assert (event["seq"], event["parts"]) == (3, 2)


def test_a_run_that_is_stopped_leaves_no_lane(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.recipes.train_stop import StopRequest

    calls: list[int] = []
    monkeypatch.setattr(StopRequest, "__call__", lambda self: len(calls) > 5 or bool(calls.append(1)))
    with pytest.raises(Interrupted):
        losses(split(settings, "stopped"))
    assert lanes() == []


def _between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread fails between two micro-batches, when it has delivered one and has no other yet."""
    whole, left = TargetReplica._now, [4]

    def now(replica: TargetReplica, seq: int, text: str) -> None:
        whole(replica, seq, text)
        left[0] -= seq < 0 and not replica._doing.startswith("the largest")
        if left[0] == 0 and seq < 0:
            raise RuntimeError("device lost")

    monkeypatch.setattr(TargetReplica, "_now", now)


def _behind_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was delivered cannot be kept."""
    whole, left = MemoryCache.put, [3]

    def put(cache: MemoryCache, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("device lost")
        whole(cache, *args)

    monkeypatch.setattr(MemoryCache, "put", put)


def _at_the_last_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread that finds the stream at its end fails, when all is delivered."""
    whole, left = TargetReplica._now, [1]

    def now(replica: TargetReplica, seq: int, text: str) -> None:
        whole(replica, seq, text)
        if seq < 0 and text == "" and left:
            left.clear()
            raise RuntimeError("device lost")

    monkeypatch.setattr(TargetReplica, "_now", now)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fault", [_between_two, _behind_delivery, _at_the_last_ones_end])
def test_a_replica_that_fails_without_a_micro_batch_in_hand_is_built_anew(
    settings: Any, monkeypatch: pytest.MonkeyPatch, fault: Any, devices: int
) -> None:
    expected = losses(settings("whole"))
    fault(monkeypatch)
    changes = {"targets": ["cpu"] * devices, "feature_cache": "memory"}
    tree = settings("broken", target={"devices_per_replica": devices}, pipeline=changes)
    assert losses(tree) == expected
    (event,) = told(tree, "replica_failed")
    assert event["restarted"] == (fault is not _at_the_last_ones_end)
    assert event["message"].endswith("RuntimeError: device lost")
    assert lanes() == []


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fault", [_between_two, _behind_delivery])
def test_where_none_may_be_restarted_the_run_ends_with_the_cause(
    settings: Any, monkeypatch: pytest.MonkeyPatch, fault: Any, devices: int
) -> None:
    fault(monkeypatch)
    changes = {"targets": ["cpu"] * devices, "feature_cache": "memory", "restarts": 0}
    tree = settings("broken", target={"devices_per_replica": devices}, pipeline=changes)
    with pytest.raises(RunError, match=r"^No target replica is left, .* RuntimeError: device lost\."):
        losses(tree)
    assert lanes() == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_lane_that_cannot_be_started_fails_its_replica(
    settings: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    expected, left, start = losses(settings("whole")), [1], threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.endswith(f", lane {at}") and left:
            left.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    tree = split(settings, "broken")
    assert losses(tree) == expected
    (event,) = told(tree, "replica_failed")
    assert event["restarted"]
    assert event["message"].endswith("RuntimeError: can't start new thread")
    assert lanes() == []
