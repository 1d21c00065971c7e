"""An owner with several threads has as many leases, and gives back all of them."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from target_matrix import batch_of

from paceline.pipeline.channel import Closed
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.outlets import Outlets
from paceline.pipeline.slots import Landing, Slots
from paceline.records import TokenBatch


def batches(count: int) -> Iterator[TokenBatch]:
    yield from (replace(batch_of([torch.arange(5, 9)]), seq=seq) for seq in range(count))


def elsewhere(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error, in another thread."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except Closed as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    return found[0]


def test_each_thread_has_a_lease_and_all_are_given_back() -> None:
    source = Dispenser(batches(5), lambda count: None)
    several, other = Outlets(source), source.open()

    def one_more(settled: bool = False) -> int:
        seq = next(iter(several)).seq
        assert not settled or several.settle(seq)
        return seq

    assert one_more() == 0
    assert elsewhere(one_more) == 1
    assert elsewhere(lambda: one_more(True)) == 2
    assert elsewhere(one_more) == 3
    assert elsewhere(lambda: several.settle(1)) is False, "another thread's"
    assert [batch.seq for batch in several.revoke()] == [0, 1, 3]
    assert not several.settle(0)
    assert isinstance(elsewhere(one_more), Closed), "a thread that comes late gets none"
    assert [batch.seq for batch in other if other.settle(batch.seq)] == [0, 1, 3, 4]
    assert source.over
    with pytest.raises(Closed):
        one_more()


class Lanes:
    """Threads of an owner that have a lease each, until they are let go."""

    def __init__(self, several: Outlets, count: int) -> None:
        self.go, self.slots = threading.Event(), []
        self._several = several
        self.threads = [threading.Thread(target=self._hold, daemon=True) for _ in range(count)]
        for at, thread in enumerate(self.threads):
            thread.start()
            while len(self.slots) == at:
                time.sleep(0.001)

    def _hold(self) -> None:
        next(iter(self._several))
        self.slots.append(self._several.slot)
        assert self.go.wait(60)

    def leave(self) -> None:
        self.go.set()
        for thread in self.threads:
            thread.join(30)


def some_slots(count: int) -> Slots:
    slots = Slots(1, replicas=count - 1, ranks=1)
    slots.make(0, torch.zeros(6, 3))
    assert len(slots._free[0]) == count
    return slots


def test_each_thread_has_a_slot_of_its_own() -> None:
    slots = some_slots(4)
    several = Outlets(Dispenser(batches(5), lambda count: None, slots))
    landing = Landing("cpu", several, slots)
    lanes = Lanes(several, 2)
    tokens = next(iter(several))
    room_TD = landing.room(tokens)
    assert room_TD is not None
    assert several.slot is not None
    assert room_TD.data_ptr() == several.slot.features_CD.data_ptr()
    assert len({id(slot) for slot in (*lanes.slots, several.slot)}) == 3
    lanes.leave()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_thread_that_has_not_left_keeps_its_slot(in_time: bool) -> None:
    """It may still write, so nobody else gets the slot before it has left, or ever if it does not."""
    slots = some_slots(3)
    source = Dispenser(batches(5), lambda count: None, slots)
    several, other = Outlets(source), source.open()
    lanes = Lanes(several, 1)
    next(iter(several))
    own, (kept,) = several.slot, lanes.slots
    assert [batch.seq for batch in several.revoke()] == [0, 1]
    assert own in slots._free[0], "of the thread that revokes"
    assert kept not in slots._free[0]
    first = source.lease(other)
    assert first is not None
    assert first.seq == 0
    assert other.slot is not kept
    if in_time:
        lanes.leave()
    several.left()
    assert (kept in slots._free[0], kept in slots._retired) == (in_time, not in_time)
    assert len(slots._free[0]) == 2, "and the one that the other has"
    lanes.leave()


def test_nobody_gets_a_slot_of_an_owner_that_hangs() -> None:
    slots = some_slots(4)
    several = Outlets(Dispenser(batches(5), lambda count: None, slots))
    lanes = Lanes(several, 2)
    assert [batch.seq for batch in several.revoke(hung=True)] == [0, 1]
    several.left()
    assert slots._retired == lanes.slots
    assert len(slots._free[0]) == 4
    lanes.leave()
