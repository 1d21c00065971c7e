"""Leases: each micro-batch is delivered once, whoever fails in between."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from paceline.pipeline.channel import Closed
from paceline.pipeline.dispenser import Dispenser
from paceline.records import BlockSet, TokenBatch

EMPTY = torch.zeros(0, dtype=torch.long)
BLOCKS = BlockSet(EMPTY, EMPTY, EMPTY, EMPTY, torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.bool))


def batches(count: int) -> Iterator[TokenBatch]:
    for seq in range(count):
        yield TokenBatch(seq, 0, seq, True, (seq,), torch.zeros(1, 2, dtype=torch.long), (2,), torch.arange(2), BLOCKS)


def dispenser(count: int) -> tuple[Dispenser, list[int]]:
    ends: list[int] = []
    return Dispenser(batches(count), ends.append), ends


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_each_batch_is_handed_out_once_and_the_end_is_told_once() -> None:
    source, ends = dispenser(4)
    one, other = source.open(), source.open()
    seen = []
    for first, second in zip(one, other, strict=False):
        seen += [first.seq, second.seq]
        assert one.settle(first.seq)
        assert other.settle(second.seq)
    assert list(other) == []
    assert seen == [0, 1, 2, 3]
    assert ends == [4]
    assert source.over


def test_what_is_given_back_goes_first_and_in_order() -> None:
    source, _ = dispenser(5)
    a, b, c = source.open(), source.open(), source.open()
    stream = iter(c)
    assert [next(iter(a)).seq, next(iter(b)).seq, next(stream).seq] == [0, 1, 2]
    c.settle(2)
    back = b.revoke()
    assert back is not None
    assert back.seq == 1
    assert source.missing_before(2)
    a.revoke()
    assert [next(stream).seq for _ in range(4) if c.settle(2) or True] == [0, 1, 3, 4]


def test_a_late_delivery_is_refused_and_its_owner_gets_no_more() -> None:
    source, _ = dispenser(2)
    late, quick = source.open(), source.open()
    stream = iter(late)
    assert next(stream).seq == 0
    late.revoke()
    assert next(iter(quick)).seq == 0
    assert not late.settle(0)
    assert quick.settle(0)
    assert not quick.settle(0)
    with pytest.raises(Closed):
        next(stream)
    assert late.revoke() is None


def test_the_stream_is_not_over_while_a_batch_may_come_back() -> None:
    source, ends = dispenser(1)
    holder, waiter = source.open(), source.open()
    assert next(iter(holder)).seq == 0
    got: list[int] = []
    thread = in_thread(lambda: got.extend(batch.seq for batch in waiter if waiter.settle(batch.seq)))
    thread.join(0.2)
    assert thread.is_alive(), "who has nothing to do waits for the last batch to be delivered"
    assert ends == [1]
    assert not source.over
    holder.revoke()
    thread.join(10)
    assert got == [0]
    assert source.over


def test_a_batch_comes_back_to_others_while_one_waits_for_the_loader() -> None:
    go = threading.Event()

    def slow() -> Iterator[TokenBatch]:
        yield from batches(1)
        go.wait(30)

    source = Dispenser(slow(), lambda count: None)
    holder, fetcher, other = source.open(), source.open(), source.open()
    assert next(iter(holder)).seq == 0
    fetching = in_thread(lambda: list(fetcher))
    while not source._fetching:
        time.sleep(0.001)
    got: list[int] = []
    helping = in_thread(lambda: got.extend(batch.seq for batch in other if other.settle(batch.seq)))
    holder.revoke()
    while not got:
        assert helping.is_alive()
        time.sleep(0.001)
    assert fetching.is_alive()
    go.set()
    fetching.join(10)
    assert got == [0]


@pytest.mark.parametrize("how", ["stop", "error", "revoke"])
def test_everyone_who_waits_is_woken(how: str) -> None:
    go = threading.Event()

    def broken() -> Iterator[TokenBatch]:
        yield from batches(1)
        go.wait(30)
        if how == "error":
            raise OSError("the disk is gone")

    source = Dispenser(broken(), lambda count: None)
    first = source.open()
    assert next(iter(first)).seq == 0
    outlets, ends = [source.open() for _ in range(3)], []

    def ask(outlet: object) -> None:
        try:
            list(outlet)  # type: ignore[call-overload]
        except (Closed, OSError) as error:
            ends.append(type(error))

    threads = [in_thread(lambda outlet=outlet: ask(outlet)) for outlet in outlets]
    while not source._fetching:
        time.sleep(0.001)
    if how == "stop":
        source.stop()
    if how == "revoke":
        for outlet in outlets:
            outlet.revoke()
    go.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert ends == [OSError if how == "error" else Closed] * 3


@pytest.mark.parametrize("seed", range(3))
def test_many_owners_that_fail_at_random_lose_nothing_and_deliver_nothing_twice(seed: int) -> None:
    source, ends = dispenser(200)
    delivered: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while True:
            outlet = source.open()
            for batch in outlet:
                if draw.random() < 0.2:
                    outlet.revoke()
                    if draw.random() < 0.5:
                        assert not outlet.settle(batch.seq)
                    break
                if outlet.settle(batch.seq):
                    with lock:
                        delivered[batch.seq] += 1
            else:
                return

    threads = [in_thread(lambda number=number: work(number)) for number in range(4)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert delivered == Counter(range(200))
    assert ends == [200]
