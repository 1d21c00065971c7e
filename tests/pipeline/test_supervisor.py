"""The handshake, and that the first failure ends a run within seconds, named."""

import threading
import time
from collections.abc import Callable

import pytest

from paceline.pipeline.supervisor import RoleState, Supervisor
from paceline.records import RunError
from paceline.runtime.gate import Gate


class Stopped(Exception):
    """What a woken role raises."""


class FakeRole:
    """A role whose stages are given functions."""

    def __init__(self, name: str, **stages: Callable[[], object]) -> None:
        self.name, self.device, self.doing = name, "cpu", ""
        self._stages = stages
        self.ran = False

    def load(self) -> None:
        self._stages.get("load", lambda: None)()

    def warm(self) -> dict[str, object]:
        return self._stages.get("warm", lambda: {"taps": (1, 2)})()  # type: ignore[return-value]

    def run(self) -> None:
        self.ran = True
        self._stages.get("run", lambda: None)()


def fail(error: BaseException) -> Callable[[], object]:
    def stage() -> object:
        raise error

    return stage


def supervise(*roles: FakeRole, timeout: float = 5.0) -> list[tuple[str, str]]:
    """Run roles; one that waits does so on an event that the release sets."""
    states: list[RoleState] = []
    supervisor = Supervisor(
        roles, threads=[1] * len(roles), release=released.set, ended=Stopped, on_state=states.append, gate=Gate()
    )
    try:
        supervisor.run(timeout)
    finally:
        seen.extend((state.role.name, state.state) for state in states)
    return seen


released = threading.Event()
seen: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    released.clear()
    seen.clear()


def wait_until_released() -> None:
    if not released.wait(60):
        raise AssertionError("nobody released the role")
    raise Stopped


def test_roles_report_their_stages_and_run_only_when_all_are_ready() -> None:
    slow = FakeRole("slow", load=lambda: time.sleep(0.3))
    order: list[str] = []
    quick = FakeRole("quick", run=lambda: order.append("quick runs"))
    slow._stages["warm"] = lambda: order.append("slow warms") or {"taps": (1, 2)}
    states = supervise(slow, quick)
    assert [s for name, s in states if name == "slow"] == ["loading", "compiling", "ready", "running", "done"]
    assert order == ["slow warms", "quick runs"]


@pytest.mark.parametrize("stage", ["load", "warm", "run"])
def test_a_failure_names_role_device_stage_and_cause_and_ends_the_others(stage: str) -> None:
    other_runs = threading.Event()
    other = FakeRole("drafter rank 0", run=lambda: other_runs.set() or wait_until_released())

    def broken() -> None:
        if stage == "run":
            assert other_runs.wait(5)
        raise ValueError("the disk\nis gone")

    bad = FakeRole("target replica 1", **{stage: broken})
    began = time.monotonic()
    word = {"load": "loading", "warm": "compiling", "run": "running"}[stage]
    with pytest.raises(RunError, match=f"^target replica 1 on cpu failed while {word}: ValueError: the disk is gone$"):
        supervise(bad, other)
    assert time.monotonic() - began < 3
    assert not any(thread.name in (bad.name, other.name) for thread in threading.enumerate())
    assert other.ran == (stage == "run")


def test_what_a_role_was_doing_is_told() -> None:
    role = FakeRole("target replica 0")

    def stage() -> None:
        role.doing = "micro-batch 17 (rows 3, 4)"
        raise MemoryError("no room")

    role._stages["run"] = stage
    with pytest.raises(RunError, match=r"failed while running \(micro-batch 17 \(rows 3, 4\)\): MemoryError: no room"):
        supervise(role)


def test_an_error_without_a_message_still_says_where() -> None:
    with pytest.raises(RunError, match=r"AssertionError without a message in stage \(.*test_supervisor.py:\d+\)"):
        supervise(FakeRole("drafter rank 0", warm=fail(AssertionError())))


def test_a_role_that_is_not_ready_in_time_is_named_and_does_not_hang_the_run() -> None:
    stuck = FakeRole("target replica 0", load=lambda: time.sleep(1.5))
    with pytest.raises(RunError, match=r"Not every role was ready .*0.3 s.*target replica 0 is still loading"):
        supervise(stuck, FakeRole("drafter rank 0"), timeout=0.3)


def test_roles_that_disagree_do_not_start() -> None:
    one, other = FakeRole("target replica 0"), FakeRole("drafter rank 0", warm=lambda: {"taps": (1, 3)})
    with pytest.raises(
        RunError, match=r"target replica 0 and drafter rank 0 disagree on the taps: \(1, 2\) against \(1, 3"
    ):
        supervise(one, other)


def test_an_interrupt_of_the_main_thread_releases_the_roles() -> None:
    waiting = FakeRole("drafter rank 0", run=wait_until_released)

    def interrupt(state: RoleState) -> None:
        if state.state == "running":
            raise KeyboardInterrupt

    supervisor = Supervisor(
        [waiting], threads=[1], release=released.set, ended=Stopped, on_state=interrupt, gate=Gate()
    )
    with pytest.raises(KeyboardInterrupt):
        supervisor.run(5.0)
    assert released.is_set()
    assert not any(thread.name == waiting.name for thread in threading.enumerate())
