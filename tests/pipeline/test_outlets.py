"""An owner with several threads has as many leases, and gives back all of them."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from target_matrix import batch_of

from paceline.pipeline.channel import Closed
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.outlets import Outlets
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
