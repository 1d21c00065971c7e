"""The ordered channel: order, bound, end and stop."""

import math
import threading
import time
from dataclasses import replace

import pytest
import torch

from paceline.drafter.packed import pack
from paceline.pipeline.channel import Closed, OrderedChannel, check_finite
from paceline.records import BlockSet, FeatureBatch, RunError, TokenBatch

EMPTY = torch.zeros(0, dtype=torch.long)
BLOCKS = BlockSet(EMPTY, EMPTY, EMPTY, EMPTY, torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.bool))


def batch(seq: int, tokens: int = 4) -> FeatureBatch:
    """A feature batch of 4 bytes a token."""
    ids = torch.zeros(1, tokens, dtype=torch.long)
    record = TokenBatch(seq, 0, seq, True, (seq,), ids, (tokens,), torch.arange(tokens), BLOCKS)
    return FeatureBatch(record, torch.zeros(tokens, 1), torch.arange(tokens))


def test_batches_come_out_in_order_whoever_made_them() -> None:
    channel = OrderedChannel(credit_bytes=10**6)
    for seq in (2, 0, 3, 1):
        channel.put(batch(seq))
    channel.finish(4)
    assert [b.tokens.seq for b in channel] == [0, 1, 2, 3]


def test_a_sender_waits_for_credit_but_never_with_the_batch_that_is_due() -> None:
    channel = OrderedChannel(credit_bytes=40)
    channel.put(batch(1))
    channel.put(batch(2))
    assert channel.waiting_bytes == 32
    passed = threading.Event()

    def late() -> None:
        channel.put(batch(3))
        passed.set()

    threading.Thread(target=late, daemon=True).start()
    assert not passed.wait(0.2)  # 48 bytes would wait
    channel.put(batch(0))  # over the credit, but due
    stream = iter(channel)
    assert next(stream).tokens.seq == 0
    assert next(stream).tokens.seq == 1
    assert passed.wait(5)
    channel.finish(4)
    assert [b.tokens.seq for b in stream] == [2, 3]


def test_a_batch_larger_than_the_credit_passes_when_it_is_due() -> None:
    channel = OrderedChannel(credit_bytes=1)
    channel.put(batch(0, tokens=1000))
    assert next(iter(channel)).tokens.seq == 0


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_stop_wakes_who_waits(who: str) -> None:
    channel = OrderedChannel(credit_bytes=1)
    ended = threading.Event()

    def work() -> None:
        with pytest.raises(Closed):
            if who == "sender":
                channel.put(batch(5))
            else:
                next(iter(channel))
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.1)
    channel.stop()
    assert ended.wait(5)


def test_many_senders_and_a_small_credit_lose_nothing() -> None:
    channel = OrderedChannel(credit_bytes=50)
    numbers = iter(range(300))
    lock = threading.Lock()

    def send() -> None:
        while True:
            with lock:
                seq = next(numbers, None)
            if seq is None:
                return
            time.sleep((seq * 7 % 5) / 10000)
            channel.put(batch(seq))

    channel.finish(300)
    for _ in range(5):
        threading.Thread(target=send, daemon=True).start()
    assert [b.tokens.seq for b in channel] == list(range(300))


def test_what_is_not_admitted_is_dropped() -> None:
    channel = OrderedChannel(credit_bytes=10**6)
    assert channel.put(batch(0))
    assert not channel.put(batch(1), admit=lambda: False)
    assert channel.waiting_bytes == 16
    assert channel.put(batch(1), admit=lambda: True)
    channel.finish(2)
    assert [b.tokens.seq for b in channel] == [0, 1]


def test_a_sender_behind_a_batch_that_nobody_makes_passes_over_the_credit() -> None:
    """Else it would wait for room, the receiver for that batch, and that batch for the sender."""
    lost: list[int] = []
    channel = OrderedChannel(credit_bytes=16, missing_before=lambda seq: any(other < seq for other in lost))
    channel.put(batch(1))
    passed = threading.Event()
    threading.Thread(target=lambda: channel.put(batch(2)) and passed.set(), daemon=True).start()
    assert not passed.wait(0.2)
    lost.append(3)
    channel.look_again()
    assert not passed.wait(0.2), "a batch behind its own is none of its concern"
    lost.append(0)
    channel.look_again()
    assert passed.wait(5)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [[NAN], [INF], [-INF], [INF, -INF], [NAN, INF]])
def test_features_that_are_not_finite_are_refused(values: list[float], dtype: torch.dtype) -> None:
    whole = replace(batch(0, tokens=8), features_TD=torch.ones(8, 3, dtype=dtype))
    check_finite(whole)
    whole.features_TD[5, : len(values)] = torch.tensor(values, dtype=dtype)
    with pytest.raises(RunError, match=f"{len(values)} of 24 values are not, first at token 5"):
        check_finite(whole)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bytes_that_are_not_finite_are_refused(value: float) -> None:
    features_TD = torch.ones(8, 6)
    check_finite(replace(batch(0, tokens=8), features_TD=pack(features_TD, 2)))
    features_TD[5, 3] = features_TD[6, 0] = value
    with pytest.raises(RunError, match="finite, but of 2 of 8 tokens some are not, first at token 5"):
        check_finite(replace(batch(0, tokens=8), features_TD=pack(features_TD, 2)))


def test_features_whose_sum_is_too_large_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    check_finite(replace(batch(0), features_TD=torch.full((4, 2), largest)))
    check_finite(replace(batch(0), features_TD=torch.tensor([[largest, largest], [-largest, -largest]])))
