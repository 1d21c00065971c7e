"""Several replicas: the same completions as one, shared fairly, and the first failure ends all."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.decode.engine import Engine
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.pipeline.generating import Generation, SharedRequests
from paceline.records import RunError, UserError
from paceline.target.load import TargetFacts
from paceline.target.model import DecodingTarget

DRAWN = Sampling(temperature=1.2, top_p=0.9)


def requests(count: int = 24) -> list[Request]:
    return [Request(i, [5 + i % 7] * (1 + i % 5), 4 + i % 9) for i in range(count)]


@pytest.fixture
def build(tiny: TargetFacts) -> Callable[[str], DecodingTarget]:
    return lambda device: DecodingTarget(tiny, (), dtype=torch.float64, device=device)


def generation(build: Any, asked: Any, replicas: int = 2, **more: Any) -> Generation:
    settings = {"sampling": DRAWN, "rows": 3, "slots": 20, "captured": False, **more}
    return Generation(asked, ["cpu"] * replicas, build=build, **settings)


def replica_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("generation")]


@pytest.mark.parametrize("replicas", [1, 3])
def test_completions_do_not_depend_on_the_number_of_replicas(build: Any, replicas: int) -> None:
    expected = {r.key: c for r, c in Engine(build("cpu"), DRAWN, rows=5, slots=20).run(requests())}
    made = generation(build, requests(), replicas)
    assert {r.key: c for r, c in made} == expected
    assert len(made.stats) == replicas
    assert sum(s.finished for s in made.stats) == len(requests())
    assert sum(s.tokens for s in made.stats) == sum(len(c.token_ids) for c in expected.values())
    assert made.seconds > 0
    assert not replica_threads()


def test_a_slot_count_above_the_targets_context_is_no_error(build: Any) -> None:
    assert len(list(generation(build, requests(3), slots=576))) == 3


def failing(target: DecodingTarget, at: int) -> DecodingTarget:
    """Let a target fail at one of its forwards."""
    forward, left = target.forward, iter(range(at))

    def fail(*args: Any, **more: Any) -> Any:
        if next(left, None) is None:
            raise ValueError("the device is on fire")
        return forward(*args, **more)

    target.forward = fail  # type: ignore[method-assign]
    return target


def test_a_replica_that_raises_ends_all_with_its_name_and_cause(build: Any) -> None:
    built = []

    def second_fails(device: str) -> Any:
        built.append(device)
        return build(device) if len(built) == 1 else failing(build(device), 6)

    endless = (Request(i, (5, 6), 9) for i in range(10**9))
    with pytest.raises(RunError, match="generation replica . on cpu failed while running: ValueError: the device is"):
        for _ in generation(second_fails, endless):
            pass
    assert not replica_threads()


def test_a_replica_that_cannot_load_is_named(build: Any) -> None:
    def fails(device: str) -> Any:
        raise OSError("no such weights")

    with pytest.raises(RunError, match="generation replica . on cpu failed while loading: OSError: no such weights"):
        list(generation(fails, requests()))


def test_a_bad_request_is_the_users_error(build: Any) -> None:
    with pytest.raises(UserError, match="^Prompt 99 has no tokens"):
        list(generation(build, [*requests(), Request(99, (), 3)]))


def test_leaving_early_ends_the_replicas_and_takes_no_more(build: Any) -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield Request(taken, (5, 6), 9)

    results = iter(generation(build, endless()))
    for _ in range(5):
        next(results)
    time.sleep(0.5)  # until there is no room for results
    results.close()
    assert not replica_threads()
    before = taken
    time.sleep(0.1)
    assert taken == before <= 5 + 12 + 5 * 6


def test_few_requests_are_shared_out(build: Any) -> None:
    shared = SharedRequests(requests(12), takers=3, ahead=30)
    assert [r.key for r in shared.take(10)] == [0, 1, 2, 3]
    assert [r.key for r in shared.take(10)] == [4, 5, 6]
    rest = []
    while more := shared.take(10):
        rest += more
    assert [r.key for r in rest] == [7, 8, 9, 10, 11]
    assert shared.take(10) == []


def test_many_requests_are_taken_as_asked_for_and_not_all_at_once() -> None:
    made = []
    shared = SharedRequests((made.append(i) or Request(i, (5,), 1) for i in range(1000)), takers=2, ahead=20)
    assert len(shared.take(10)) == 10
    assert len(made) == 30
    assert len(shared.take(10)) == 10
    assert len(made) == 40
