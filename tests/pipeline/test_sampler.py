"""Shares of a sample's time, held against a script of who waited when; by a clock that the test sets."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from paceline.pipeline.sampler import Sampler, Seen
from paceline.runtime import pulse
from paceline.runtime.pulse import Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(pulse, "_clock", made)
    yield made
    pulse.adopt(Pulse())


def sampler(clock: Clock, roles: list[Seen], told: list[dict[str, Any]] | None = None, every_s: float = 5.0) -> Sampler:
    return Sampler(
        every_s,
        roles=lambda: roles,
        queue_bytes=lambda: 7,
        queue_limit_bytes=70,
        gpus=lambda: [],
        tell=lambda **values: (told if told is not None else []).append(values),
        clock=clock,
    )


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_those_of_the_script(clock: Clock, seed: int) -> None:
    """A thread works and waits, within waits too; it is looked at in the middle of either."""
    draw, own = random.Random(seed), Pulse()
    looks = sampler(clock, [Seen("drafter rank 0", "cpu", "running", own)])
    pulse.adopt(own)
    own.work()
    script: list[tuple[float, float, str]] = []  # from, to, what was waited for
    last, found = clock.now, []

    def pass_time() -> None:
        nonlocal last
        for _ in range(draw.randrange(3)):
            clock.now += draw.uniform(0, 2)
            if draw.random() < 0.3:
                found.append((last, clock.now, looks.sample()["roles"][0]))
                last = clock.now

    for number in range(60):
        pass_time()
        sort, began = draw.choice(["features", "room", "the other ranks"]), clock.now
        with ExitStack() as waits:
            if sort == "features":
                waits.enter_context(pulse.waiting(f"features of {number}", "features"))
            else:
                waits.enter_context((pulse.waiting if sort == "room" else pulse.patient)(sort))
            pass_time()
            if draw.random() < 0.3:
                with pulse.waiting("something within"):
                    pass_time()
                pass_time()
        script.append((began, clock.now, sort))
    # An open wait at a look is not in the script yet when it is looked at, but it is by now.
    assert len(found) > 20
    for since, until, role in found:
        length = until - since
        expected: dict[str, float] = {}
        for began, ended, sort in script:
            overlap = min(ended, until) - max(began, since)
            if overlap > 0:
                expected[sort] = expected.get(sort, 0.0) + overlap
        shares = {sort: seconds / length for sort, seconds in expected.items()} if length else {}
        for sort in {*shares, *role["waits"]}:
            assert role["waits"].get(sort, 0.0) == pytest.approx(shares.get(sort, 0.0), abs=1e-3)
        assert role["wait_share"] == pytest.approx(sum(shares.values()), abs=1e-3)
        assert role["busy_share"] == pytest.approx(1 - role["wait_share"])
        if shares and max(shares.values()) > 1e-3:
            assert shares[role["waits_for"]] == pytest.approx(max(shares.values()), abs=1e-3)


def test_who_starts_has_no_shares_and_who_began_later_only_those_since(clock: Clock) -> None:
    own = Pulse()
    looks = sampler(clock, [Seen("target replica 0", "cpu", "loading", own)])
    clock.now += 10
    (role,) = looks.sample()["roles"]
    assert (role["busy_share"], role["wait_share"], role["waits_for"], role["state"]) == (None, None, None, "loading")
    clock.now += 8
    pulse.adopt(own)
    own.work()
    with pulse.waiting("data"):
        clock.now += 1
    clock.now += 1
    (role,) = looks.sample()["roles"]
    assert (role["busy_share"], role["waits"]) == (0.5, {"data": 0.5})


def test_a_sample_has_the_queue_and_its_length(clock: Clock) -> None:
    looks = sampler(clock, [])
    clock.now += 4
    sample = looks.sample()
    assert (sample["s"], sample["queue_bytes"], sample["queue_limit_bytes"], sample["roles"]) == (4.0, 7, 70, [])
    assert sample["host_bytes"] > 2**20


def test_samples_are_told_while_the_block_lasts(clock: Clock) -> None:
    told: list[dict[str, Any]] = []
    looks = sampler(clock, [], told, every_s=0.01)
    first = threading.Event()
    looks._tell = lambda **values: (told.append(values), first.set())
    with looks.under_way():
        assert first.wait(30)
    count = len(told)
    assert "sampler" not in {thread.name for thread in threading.enumerate()}
    assert len(told) == count
