"""The best state is the lowest of those that are saved or about to be, whatever becomes of a save meanwhile."""

import random

import pytest

from paceline.checkpoint.best import Best


def test_only_a_lower_loss_is_better() -> None:
    best = Best()
    assert (best.steps, best.state()) == (None, None)
    said = [best.offer(steps, loss) for steps, loss in enumerate([3.0, 3.0, 2.5, 2.7, 2.5, 2.4])]
    assert said == [True, False, True, False, False, True]
    assert best.state() == {"steps": 5, "loss": 2.4}
    assert Best(7, 2.0).state() == {"steps": 7, "loss": 2.0}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_is_never_the_best(loss: float) -> None:
    best = Best()
    assert not best.offer(1, loss)
    assert best.offer(2, 5.0)
    assert not best.offer(3, loss)
    assert best.steps == 2


def test_a_state_that_could_not_be_saved_gives_its_place_back() -> None:
    best = Best(2, 3.0)
    assert best.offer(4, 2.0)
    best.failed(4)
    assert best.state() == {"steps": 2, "loss": 3.0}
    assert best.offer(6, 2.9), "although the one that is lost was lower"
    best.saved(6)
    best.failed(8)  # of a save that was due for another reason
    assert best.steps == 6


def test_a_better_one_while_one_is_being_saved() -> None:
    for fate in ("saved", "failed"):
        best = Best(2, 3.0)
        best.offer(4, 2.0)
        best.offer(6, 1.0)
        getattr(best, fate)(4)
        assert best.steps == 6
        best.failed(6)
        assert best.steps == (4 if fate == "saved" else 2)


def test_any_course_of_events() -> None:
    """Against a list of all that was offered and not lost."""
    for seed in range(200):
        draw = random.Random(seed)
        best, kept, waiting = Best(), {}, []
        for steps in range(30):
            loss = draw.randrange(20) / 2
            lowest = loss < min(kept.values(), default=99)
            assert best.offer(steps, loss) == lowest
            if lowest:
                kept[steps] = loss
                waiting.append(steps)
            while waiting and draw.random() < 0.5:
                done = waiting.pop(0)
                if draw.random() < 0.3:
                    best.failed(done)
                    del kept[done]
                else:
                    best.saved(done)
                    kept = {other: value for other, value in kept.items() if other >= done}
            assert best.steps == min(kept, key=lambda place: kept[place], default=None)


def test_by_acceptance_the_highest_is_the_best() -> None:
    best = Best(2, tau=2.5, by="tau")
    assert best.state() == {"steps": 2, "tau": 2.5}
    assert not best.offer(4, 2.4)
    assert not best.offer(5, float("nan"))
    assert best.offer(6, 2.6)
    best.saved(6)
    assert best.state() == {"steps": 6, "tau": 2.6}
    assert Best(2, loss=3.0, by="tau").steps is None, "it was chosen by another measure"
