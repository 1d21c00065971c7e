"""Roles that take their time and compute nothing, in a run's own threads, leases, slots and channel.

What the whole then makes, against the slower of the two sides, is what the pipeline itself costs.
"""

import time
from collections.abc import Callable, Iterator
from threading import BrokenBarrierError

import torch

from paceline.pipeline.channel import Closed, OrderedChannel
from paceline.pipeline.dealer import Dealer
from paceline.pipeline.dispenser import Dispenser, Outlet
from paceline.pipeline.slots import Landing, Slots
from paceline.pipeline.supervisor import Role, Supervisor
from paceline.records import BlockSet, FeatureBatch, TokenBatch
from paceline.runtime.gate import Gate

_C, _D = 64, 32  # a micro-batch's tokens and features, which somebody has to copy all the same


class SleepingTarget:
    """A target replica that sleeps over a micro-batch and then delivers."""

    device, doing = "cpu", ""

    def __init__(
        self, index: int, outlet: Outlet, slots: Slots, channel: OrderedChannel, sleep: Callable[[int], None]
    ) -> None:
        self.name = f"target replica {index}"
        self._outlet, self._channel, self._sleep = outlet, channel, sleep
        self._landing = Landing("cpu", outlet, slots)

    def load(self) -> None:
        """Do nothing."""

    def warm(self) -> dict[str, object]:
        """Agree with everybody."""
        return {}

    def run(self) -> None:
        """Serve until the stream ends."""
        made_TD, positions_T = torch.zeros(_C, _D), torch.arange(_C)
        for tokens in self._outlet:
            self._sleep(tokens.seq)
            landed = self._landing.land(FeatureBatch(tokens, made_TD, positions_T))
            seq = tokens.seq
            self._channel.put(landed, admit=lambda: self._outlet.settle(seq))  # noqa: B023


class SleepingRank:
    """A drafter rank that sleeps over every micro-batch."""

    device, doing = "cpu", ""

    def __init__(
        self, rank: int, dealer: Dealer, slots: Slots, sleep: Callable[[int], None], done: Callable[[int], None]
    ) -> None:
        self.name = f"drafter rank {rank}"
        self._rank, self._dealer, self._slots, self._sleep, self._done = rank, dealer, slots, sleep, done

    def load(self) -> None:
        """Do nothing."""

    def warm(self) -> dict[str, object]:
        """Make the slots."""
        self._slots.make(self._rank, torch.zeros(_C, _D))
        return {}

    def run(self) -> None:
        """Take all that is dealt."""
        for batch, _ in self._dealer.stream(self._rank):
            if batch is not None:
                with batch.reading():
                    batch.features_TD.sum()
                self._sleep(batch.tokens.seq)
                self._done(batch.tokens.seq)


def run_stand_ins(
    *,
    targets: int,
    ranks: int,
    count: int,
    target_sleep: Callable[[int], None],
    rank_sleep: Callable[[int], None],
    done: Callable[[int], None],
) -> None:
    """Pass `count` micro-batches, a step each round of the ranks; `done` gets each one's number when it was used."""
    slots = Slots(1, replicas=targets, ranks=ranks)
    source = Dispenser(_batches(count, ranks), on_end=lambda made: channel.finish(made), slots=slots)
    channel = OrderedChannel(2**40, source.missing_before)
    dealer = Dealer(channel, ranks)
    roles: list[Role] = [SleepingTarget(i, source.open(), slots, channel, target_sleep) for i in range(targets)]
    roles += [SleepingRank(rank, dealer, slots, rank_sleep, done) for rank in range(ranks)]

    def release() -> None:
        source.stop()
        channel.stop()

    Supervisor(
        roles,
        threads=[1] * len(roles),
        release=release,
        ended=(Closed, BrokenBarrierError),
        on_state=lambda report: None,
        gate=Gate(),
    ).run(60.0)


def rate_alone(seconds: float, count: int) -> float:
    """Return how often a second a thread sleeps so long that has nothing else to do, which is a little less often."""
    began = time.perf_counter()
    for _ in range(count):
        time.sleep(seconds)
    return count / (time.perf_counter() - began)


def rate_of_stand_ins(*, targets: int, ranks: int, target_s: float, step_s: float, count: int) -> float:
    """Return micro-batches a second behind warm-up and before the stream runs dry."""
    stamps: list[float] = []
    run_stand_ins(
        targets=targets,
        ranks=ranks,
        count=count,
        target_sleep=lambda seq: time.sleep(target_s),
        rank_sleep=lambda seq: time.sleep(step_s),
        done=lambda seq: stamps.append(time.perf_counter()),
    )
    first, last = count // 4, count - count // 8
    return (last - first) / (stamps[last] - stamps[first])


def _batches(count: int, ranks: int) -> Iterator[TokenBatch]:
    none = torch.zeros(0, dtype=torch.long)
    blocks = BlockSet(none, none, none, none, none.view(0, 2), none.view(0, 2).bool())
    ids = torch.zeros(1, _C, dtype=torch.long)
    for seq in range(count):
        closes = seq % ranks == ranks - 1
        yield TokenBatch(seq, 0, seq // ranks, closes, (seq,), ids, (_C,), torch.arange(_C), blocks)
