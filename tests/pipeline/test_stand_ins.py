"""Both sides of the pipeline work at the same time: shown by who has begun while who is at work, not by a clock."""

import threading
from collections import defaultdict

import pytest

from paceline.pipeline.stand_ins import run_stand_ins

COUNT, PATIENCE_S = 40, 30


class Seen:
    """What has happened, to wait for."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], threading.Event] = defaultdict(threading.Event)
        self.late: list[tuple[str, int]] = []
        self.done: list[int] = []

    def tell(self, what: str, seq: int) -> None:
        self.events[what, seq].set()

    def wait(self, what: str, seq: int) -> None:
        if 0 <= seq < COUNT and not self.events[what, seq].wait(PATIENCE_S):
            self.late.append((what, seq))

    def finish(self, seq: int) -> None:
        self.done.append(seq)
        self.tell("done", seq)


@pytest.mark.parametrize("targets", [1, 2, 3])
def test_a_slow_rank_always_finds_features_that_are_ready(targets: int) -> None:
    """A step ends only once the next micro-batch's features are made and the ones behind them begun."""
    seen = Seen()

    def target_sleep(seq: int) -> None:
        seen.tell("begun", seq)

    def rank_sleep(seq: int) -> None:
        seen.wait("begun", seq + 1)
        seen.wait("begun", seq + 2)

    run_stand_ins(
        targets=targets, ranks=1, count=COUNT, target_sleep=target_sleep, rank_sleep=rank_sleep, done=seen.finish
    )
    assert not seen.late
    assert seen.done == list(range(COUNT))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_target_waits_for_no_step(ranks: int) -> None:
    """A step ends only once its target has begun the next micro-batch, and that only once the step is over."""
    seen = Seen()

    def target_sleep(seq: int) -> None:
        seen.tell("begun", seq)
        seen.wait("done", seq - 1)

    def rank_sleep(seq: int) -> None:
        seen.wait("begun", seq + 1)

    run_stand_ins(
        targets=1, ranks=ranks, count=COUNT, target_sleep=target_sleep, rank_sleep=rank_sleep, done=seen.finish
    )
    assert not seen.late
    assert sorted(seen.done) == list(range(COUNT))


def test_all_targets_are_at_work_at_once() -> None:
    together = threading.Barrier(3)
    seen = Seen()
    run_stand_ins(
        targets=3,
        ranks=1,
        count=39,
        target_sleep=lambda seq: together.wait(PATIENCE_S) and None,
        rank_sleep=lambda seq: None,
        done=seen.finish,
    )
    assert seen.done == list(range(39))


def test_two_ranks_are_at_work_at_once() -> None:
    together = threading.Barrier(2)
    seen = Seen()
    run_stand_ins(
        targets=1,
        ranks=2,
        count=COUNT,
        target_sleep=lambda seq: None,
        rank_sleep=lambda seq: together.wait(PATIENCE_S) and None,
        done=seen.finish,
    )
    assert sorted(seen.done) == list(range(COUNT))
