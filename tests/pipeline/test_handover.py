"""States go from training to the evaluator one at a time; nobody waits but at the end."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.pipeline.channel import Closed
from paceline.pipeline.handover import WINDOW, Forced, Handover
from paceline.records import StepReport

Make = Callable[..., tuple[Handover, list[tuple[int, int]]]]


@pytest.fixture
def make() -> Make:
    def build(**more: Any) -> tuple[Handover, list[tuple[int, int]]]:
        skipped: list[tuple[int, int]] = []
        how = {"due": lambda steps: steps % 3 == 0 or steps == 10, "held_out": False} | more
        return Handover(10, skipped=lambda *steps: skipped.append(steps), **how), skipped

    return build


def report(step: int, accepted: tuple[int, ...], available: tuple[int, ...] = (10, 10)) -> StepReport:
    return StepReport(step, 0, 1.0, 1.0, accepted, available, 10, 10, 10, 10, 10, 0.1, 1.0, True)


def nothing() -> None:
    pass


def test_what_is_due_while_one_is_evaluated_is_left_out(make: Make) -> None:
    handover, skipped = make()
    assert [steps for steps in (1, 2, 3, 4, 6, 7, 9) if handover.claim(steps)] == [3]
    assert skipped == [(6, 3), (9, 3)]
    handover.give(nothing)
    jobs = handover.jobs()
    assert next(jobs).steps == 3
    assert not handover.claim(9), "it was told of already"
    assert len(skipped) == 2
    handover.finish()
    assert list(jobs) == []
    assert handover.state()["pending"] is None


def test_the_last_one_is_waited_for(make: Make) -> None:
    handover, skipped = make()
    handover.claim(3)
    handover.give(nothing)
    jobs, claimed = handover.jobs(), []
    next(jobs)
    rank = threading.Thread(target=lambda: claimed.append(handover.claim(10)))
    rank.start()
    rank.join(0.05)
    assert rank.is_alive()
    taken = threading.Thread(target=lambda: claimed.append(next(jobs).steps))
    taken.start()  # done with the first
    rank.join(10)
    handover.give(nothing)
    taken.join(10)
    assert claimed == [True, 10]
    assert skipped == []


@pytest.mark.parametrize("how", ["fail", "leave", "stop"])
def test_nobody_waits_for_one_that_is_gone(make: Make, how: str) -> None:
    handover, skipped = make()
    handover.claim(3)
    handover.give(nothing)
    next(handover.jobs())
    answers: list[bool] = []
    rank = threading.Thread(target=lambda: answers.append(handover.claim(10)))
    rank.start()
    lost = getattr(handover, how)()
    rank.join(10)
    assert answers == [False]
    if how == "fail":
        assert (lost.steps, skipped) == (3, []), "that was told already"
        assert handover.state()["pending"] is None
    else:
        assert skipped == [(10, 3)]
        assert handover.state()["pending"]["steps"] == 3, "who goes on has it evaluated"


def test_weights_are_not_copied_for_one_that_has_left(make: Make) -> None:
    handover, _ = make()
    handover.leave()
    assert handover.claim(3), "it is saved, and evaluated when the run goes on"
    handover.give(lambda: pytest.fail("copied"))
    assert handover.state()["pending"]["steps"] == 3


def test_stopping_ends_the_wait_for_a_state(make: Make) -> None:
    handover, _ = make()
    handover.stop()
    with pytest.raises(Closed):
        next(handover.jobs())
    with pytest.raises(Closed):
        handover.look()


def test_the_estimate_is_that_of_the_newest_steps(make: Make) -> None:
    handover, _ = make()
    for step in range(WINDOW + 2):
        handover.note(report(step, (0, 0) if step < 2 else (8, 4 + step % 2)))
    handover.claim(3)
    forced = handover.state()["pending"]["forced"]
    assert forced == {"acceptance": pytest.approx(2.25), "slot_acceptance_K": pytest.approx((0.8, 0.45))}
    assert Forced.of([]) is None
    assert Forced.of([((0,), (0,))]) == Forced(1.0, (0.0,))


def test_held_out_rows_replace_it(make: Make) -> None:
    handover, _ = make(held_out=True)
    handover.note(report(0, (1, 1)))
    handover.note(report(2, (6, 3)))
    handover.claim(3)
    assert handover.state()["pending"]["forced"]["slot_acceptance_K"] == (0.6, 0.3)


def test_it_goes_on_from_its_state(make: Make) -> None:
    first, _ = make()
    for step in range(3):
        first.note(report(step, (5, 2)))
    first.claim(3)
    again, skipped = make(state=first.state(), steps_done=5)
    job = next(again.jobs())
    assert (job.steps, job.saved, job.forced) == (3, True, Forced(1.7, (0.5, 0.2)))
    again.note(report(5, (9, 9)))
    assert again.state()["window"][-1] == [(9, 9), (10, 10)]
    assert not again.claim(6)
    assert skipped == [(6, 3)]


@pytest.mark.parametrize("held_out", [False, True])
def test_what_was_due_when_the_run_broke(make: Make, held_out: bool) -> None:
    """Held-out rows are looked at once more first, and it is claimed behind them."""
    before = {"seen": 3, "pending": None, "window": []}
    handover, _ = make(state=before, steps_done=6, held_out=held_out)
    assert (handover.state()["pending"] is None) == held_out
    assert handover.claim(6) == held_out
    known, _ = make(state={**before, "seen": 6}, steps_done=6, held_out=held_out)
    assert known.state()["pending"] is None
    assert not known.claim(6)
