"""The handshake, and that the first failure ends a run within seconds, named."""

import sys
import threading
import time
from collections.abc import Callable

import pytest

from paceline.pipeline.supervisor import Role, RoleState, Supervisor
from paceline.pipeline.watch import Watch
from paceline.records import Hung, RunError
from paceline.runtime import pulse
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


def test_roles_hardly_wait_for_the_interpreter_while_a_run_lasts() -> None:
    before, found = sys.getswitchinterval(), []
    supervise(FakeRole("one", run=lambda: found.append(sys.getswitchinterval())))
    assert found == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == before
    with pytest.raises(RunError):
        supervise(FakeRole("one", run=fail(ValueError("no"))))
    assert sys.getswitchinterval() == before


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


class Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_that_cannot_be_printed_is_named() -> None:
    with pytest.raises(RunError, match=r"failed while running: Mute without a message in stage \("):
        supervise(FakeRole("drafter rank 0", run=fail(Mute())))


def test_a_very_long_error_is_cut() -> None:
    with pytest.raises(RunError, match=r"failed while running: RuntimeError: begin x+ \[\.\.\.\] x+ end$") as told:
        supervise(FakeRole("drafter rank 0", run=fail(RuntimeError(f"begin {'x' * 10**6} end"))))
    assert len(str(told.value)) < 5000


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


class Nurse:
    """Puts given roles in the place of those that fail, and notes what hangs."""

    def __init__(self, *others: FakeRole) -> None:
        self._others = list(others)
        self.failures: list[str] = []
        self.hangs: list[str] = []

    def failed(self, role: Role, error: RunError) -> Role | None:
        self.failures.append(str(error))
        return self._others.pop(0) if self._others else None

    def hung(self, role: Role, error: Hung) -> None:
        self.hangs.append(str(error))

    def stalled(self, error: Hung) -> None:
        raise error


def tended(nurse: Nurse, *roles: FakeRole, gate: Gate | None = None, watch: Watch[Role] | None = None) -> Supervisor:
    return Supervisor(
        roles,
        threads=[1] * len(roles),
        release=released.set,
        ended=Stopped,
        on_state=lambda state: seen.append((state.role.name, state.state)),
        gate=gate or Gate(),
        care=nurse,
        watch=watch,
    )


def test_another_takes_the_place_of_a_role_that_fails_and_loads_while_nobody_works() -> None:
    gate, begun, loaded, busy = Gate(), threading.Event(), threading.Event(), []

    def work() -> None:
        while not loaded.is_set():
            with gate.work():
                busy.append(1)
                begun.set()
                time.sleep(0.001)
                busy.pop()

    def load() -> None:
        assert not busy
        time.sleep(0.05)
        assert not busy
        loaded.set()

    other = FakeRole("target replica 0", load=load)
    nurse = Nurse(other)
    bad = FakeRole("target replica 0", run=lambda: begun.wait(5) and fail(ValueError("device lost"))())
    tended(nurse, bad, FakeRole("drafter rank 0", run=work), gate=gate).run(5.0)
    assert nurse.failures == ["target replica 0 on cpu failed while running: ValueError: device lost"]
    assert other.ran
    states = [state for name, state in seen if name == "target replica 0"]
    start = ["loading", "compiling", "ready", "running"]
    assert states == [*start, "failed", *start, "done"]


@pytest.mark.parametrize("stage", ["load", "warm", "disagree"])
def test_a_role_that_takes_a_place_may_fail_too(stage: str) -> None:
    stages = {"warm": lambda: {"taps": (7, 8)}} if stage == "disagree" else {stage: fail(ValueError("again"))}
    nurse = Nurse(FakeRole("r", **stages), FakeRole("r", run=fail(ValueError("third"))))
    tended(nurse, FakeRole("r", run=fail(ValueError("first"))), FakeRole("d")).run(5.0)
    second = {"load": "loading: ValueError: again", "warm": "compiling: ValueError: again"}
    wanted = second.get(stage, "compiling: r and r disagree on the taps: (1, 2) against (7, 8)")
    assert [text.split(" failed while ")[1][: len(wanted)] for text in nurse.failures] == [
        "running: ValueError: first",
        wanted,
        "running: ValueError: third",
    ]


def test_a_failure_before_all_are_ready_ends_the_run_whoever_cares() -> None:
    nurse = Nurse(FakeRole("r"))
    supervisor = tended(nurse, FakeRole("r", load=fail(ValueError("no"))), FakeRole("d"))
    with pytest.raises(RunError, match="r on cpu failed while loading: ValueError: no"):
        supervisor.run(5.0)
    assert nurse.failures == []
    assert not supervisor.running


def test_a_role_that_hangs_is_left_alone_and_its_place_at_the_gate_is_free() -> None:
    gate, go = Gate(), threading.Event()

    def hang() -> None:
        with gate.work():
            go.wait(60)

    def wait() -> None:
        with pulse.patient("the other to be given up"):
            while not nurse.hangs:
                time.sleep(0.01)
        with gate.alone():
            pass

    stuck = FakeRole("target replica 1", run=hang)
    stuck.doing = "micro-batch 5"
    nurse = Nurse()
    began = time.monotonic()
    supervisor = tended(nurse, stuck, FakeRole("drafter rank 0", run=wait), gate=gate, watch=Watch(1.0, 60.0))
    supervisor.run(5.0)
    assert time.monotonic() - began < 20
    (text,) = nurse.hangs
    assert text.startswith("target replica 1 on cpu hangs: it has been running (micro-batch 5) for ")
    assert "longer than pipeline.work_timeout_s (1 s)" in text
    assert not supervisor.came_to_rest(stuck, 60.0)
    go.set()


def test_a_run_in_which_all_wait_ends_with_what_each_waits_for() -> None:
    def wait(what: str) -> Callable[[], None]:
        def stage() -> None:
            with pulse.waiting(what):
                wait_until_released()

        return stage

    roles = (
        FakeRole("target replica 0", run=wait("micro-batch 12 from the loader")),
        FakeRole("d", run=wait("features")),
    )
    supervisor = tended(Nurse(), *roles, watch=Watch(0.5, 60.0))
    with pytest.raises(
        Hung, match="target replica 0 waits for micro-batch 12 from the loader; d waits for features"
    ) as told:
        supervisor.run(5.0)
    assert "pipeline.work_timeout_s (0.5 s)" in str(told.value)
    assert all(supervisor.came_to_rest(role, 5.0) for role in roles)
