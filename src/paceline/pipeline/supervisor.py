"""Runs roles in threads: handshake, start, end, and what becomes of a role that fails or hangs.

Every role reports loading, compiling and ready, or its error. Roles load side by side and warm one after the other,
each alone (see Gate). The run goes on only when all are ready and agree. A role that fails is named with its device,
what it was doing and the cause. Until all are ready that ends the run; later `Care` decides whether another role takes
its place. When the run ends, all are woken and leave at their next batch; who has not left after a grace is left behind
in its daemon thread; nothing hangs.
"""

import contextvars
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.pipeline.watch import LOOK_S, Watch
from paceline.records import Hung, PacelineError, RunError
from paceline.runtime.gate import Gate
from paceline.runtime.interpreter import quick_handovers
from paceline.runtime.pulse import Pulse, adopt
from paceline.runtime.streams import own_stream, wait_for

GRACE_S = 5.0  # how long other roles may take to leave after a failure
_LONGEST = 2000  # characters of an error's begin, and of its end, that are told


@runtime_checkable
class Role(Protocol):
    """What runs in a thread of its own."""

    name: str
    device: str
    doing: str

    def load(self) -> None:
        """Put weights in place."""

    def warm(self) -> dict[str, object]:
        """Compile and rehearse; return what all roles must agree on."""

    def run(self) -> None:
        """Work until the stream ends."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role's report: its state and, when ready, what it agrees to, or its error."""

    role: Role
    state: str  # loading, compiling, ready, running, done, stopped, failed
    seconds: float
    facts: dict[str, object] | None = None
    error: BaseException | None = None


@runtime_checkable
class Care(Protocol):
    """What becomes of a run, once all roles were ready, in which one fails or hangs; what these raise ends it."""

    def failed(self, role: Role, error: RunError) -> Role | None:
        """Return the role that takes the place of one that failed, None if the others go on without."""

    def hung(self, role: Role, error: Hung) -> None:
        """A role hangs; its thread was left alone and its place at the gate revoked."""

    def stalled(self, error: Hung) -> None:
        """All roles wait."""


class EndTheRun:
    """The first failure ends all."""

    def failed(self, role: Role, error: RunError) -> Role | None:
        """Raise the error."""
        raise error

    def hung(self, role: Role, error: Hung) -> None:
        """Raise the error."""
        raise error

    def stalled(self, error: Hung) -> None:
        """Raise the error."""
        raise error


@dataclass(eq=False, slots=True)
class _Worker:
    """A role in its thread."""

    role: Role
    cpu_threads: int
    thread: threading.Thread = field(init=False)
    pulse: Pulse = field(default_factory=Pulse)
    state: str = "starting"
    left: str | None = None  # how its thread ended


class Supervisor:
    """The threads of a run. `release` must wake every role that waits for another one."""

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        threads: Sequence[int],
        release: Callable[[], None],
        ended: type[BaseException] | tuple[type[BaseException], ...],
        on_state: Callable[[RoleState], None],
        gate: Gate,
        on_ready: Callable[[], None] = lambda: None,
        care: Care | None = None,
        watch: Watch[Role] | None = None,
    ) -> None:
        """Without `watch` nothing is said to hang once all are ready."""
        self._release, self._ended = release, ended
        self._on_state, self._gate, self._on_ready = on_state, gate, on_ready
        self._care, self._watch = care or EndTheRun(), watch
        self._reports: queue.Queue[RoleState] = queue.Queue()
        self._go = threading.Event()
        self._stopping = False
        self._agreed: RoleState | None = None
        self._workers: dict[Role, _Worker] = {}  # that are under way
        self._all: dict[Role, _Worker] = {}
        for role, count in zip(roles, threads, strict=True):
            self._add(role, count)

    @property
    def running(self) -> bool:
        """Whether all roles were ready."""
        return self._go.is_set() and self._agreed is not None

    def run(self, ready_timeout_s: float) -> None:
        """Start all roles, wait until they are ready, let them work and wait for their end.

        Raises:
            RunError: a role disagreed or was not ready in time, or one failed and no other took its place.
            Hung: a role hangs, or all wait for one another.
        """
        with quick_handovers():
            self._run(ready_timeout_s)

    def _run(self, ready_timeout_s: float) -> None:
        try:
            for worker in self._workers.values():
                worker.thread.start()
            self.wait_until_ready(ready_timeout_s)
            self._on_ready()
            self._go.set()
            while self._workers:
                self._settle_next()
                if self._watch is not None:
                    self._look(self._watch)
        finally:
            self._stop()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for every role's ready and compare what they agree on."""
        ready: list[RoleState] = []
        deadline = time.monotonic() + timeout_s
        while len(ready) < len(self._workers):
            report, before = self._next_report(max(0.0, deadline - time.monotonic()))
            if report is None:
                late = [worker for worker in self._workers.values() if worker.state != "ready"]
                raise RunError(
                    f"Not every role was ready after pipeline.ready_timeout_s ({timeout_s:g} s): "
                    f"{', '.join(f'{worker.role.name} is still {worker.state}' for worker in late)}. "
                    f"Raise the limit or look at what that role waits for."
                )
            if report.state == "failed":
                raise _failure(report, before)
            if report.state == "ready":
                ready.append(report)
        roles = [*self._workers]
        ready.sort(key=lambda report: roles.index(report.role))  # so that the same is said whoever was ready first
        for first, other in combinations(ready, 2):
            _compare(first, other)
        self._agreed = max(ready, key=lambda report: len(report.facts or {}))

    def under_way(self) -> list[tuple[Role, str, Pulse]]:
        """Return the roles that have not left, with their states; any thread may ask."""
        return [(worker.role, worker.state, worker.pulse) for worker in list(self._workers.values())]

    def came_to_rest(self, role: Role, within_s: float) -> bool:
        """Wait for a role's thread after the run, and return whether it left on its own and without an error."""
        worker = self._all[role]
        if role in self._workers or worker.left is not None:  # else it hangs
            worker.thread.join(within_s)
        return worker.left in ("done", "stopped")

    def _add(self, role: Role, cpu_threads: int) -> _Worker:
        worker = _Worker(role, cpu_threads)
        # In a copy of this context: since torch 2.12 dynamo's and inductor's settings are context variables.
        worker.thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._body, worker), name=role.name, daemon=True
        )
        self._workers[role] = self._all[role] = worker
        return worker

    def _next_report(self, timeout_s: float) -> tuple[RoleState | None, str]:
        """Return a report and the state before it, or None if there is none in time."""
        try:
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return None, ""
        worker = self._all[report.role]
        before, worker.state = worker.state, report.state
        self._on_state(report)
        return report, before

    def _settle_next(self) -> None:
        report, before = self._next_report(LOOK_S)
        if report is None or report.role not in self._workers:  # who hung may come back to life, and leaves
            return
        if report.state in ("done", "stopped"):  # stopped by who ended the stream
            del self._workers[report.role]
        elif report.state == "failed":
            worker = self._workers.pop(report.role)
            worker.thread.join(GRACE_S)  # nothing is left for it to do
            other = self._care.failed(worker.role, _failure(report, before))
            if other is not None:
                self._add(other, worker.cpu_threads).thread.start()

    def _look(self, watch: Watch[Role]) -> None:
        watch.look({role: worker.pulse for role, worker in self._workers.items()})
        hung = watch.hung()
        for role in hung:
            self._gate.revoke(self._workers.pop(role).thread)
        for role, seconds in hung.items():
            starting = self._all[role].state != "running"
            key, limit = ("ready", watch.ready_timeout_s) if starting else ("work", watch.work_timeout_s)
            doing = f"{self._all[role].state} ({role.doing})" if role.doing else self._all[role].state
            self._care.hung(
                role,
                Hung(
                    f"{role.name} on {role.device} hangs: it has been {doing} for {seconds:.0f} s, longer than "
                    f"pipeline.{key}_timeout_s ({limit:g} s). Raise the limit if that may take so long."
                ),
            )
        if stalled := watch.stalled():
            self._care.stalled(
                Hung(
                    f"Nobody has worked for pipeline.work_timeout_s ({watch.work_timeout_s:g} s): "
                    f"{'; '.join(f'{role.name} waits for {what}' for role, what in stalled.items())}. Look at what is "
                    "waited for, or raise the limit if it may take so long."
                )
            )

    def _body(self, worker: _Worker) -> None:
        began, role, pulse = time.monotonic(), worker.role, worker.pulse

        def tell(state: str, **more: Any) -> None:
            worker.left = state if state in ("done", "stopped", "failed") else None
            self._reports.put(RoleState(role, state, round(time.monotonic() - began, 3), **more))

        try:
            adopt(pulse)
            torch.get_num_threads()  # initialises this thread's own count, which would undo the next line later
            torch.set_num_threads(worker.cpu_threads)
            if torch.device(role.device).type == "cuda":
                torch.cuda.set_device(role.device)
            tell("loading")
            # Beside others who load; but alone where others work: loading switches the process's default dtype.
            with self._gate.alone() if self._agreed else self._gate.work():
                role.load()
                wait_for(role.device)  # for the default stream: transformers loads in threads of its own, too
            self._leave_if_stopping()
            with own_stream(role.device):
                tell("compiling")
                with self._gate.alone():
                    facts = role.warm()
                report = RoleState(role, "ready", round(time.monotonic() - began, 3), facts)
                if self._agreed:
                    _compare(self._agreed, report)
                self._reports.put(report)
                self._go.wait()
                self._leave_if_stopping()
                tell("running")
                pulse.work()
                role.run()
            tell("done")
        except self._ended:
            tell("stopped")
        except BaseException as error:
            tell("failed", error=error)

    def _leave_if_stopping(self) -> None:
        if self._stopping:
            raise self._ended[0] if isinstance(self._ended, tuple) else self._ended

    def _stop(self) -> None:
        self._stopping = True
        self._release()
        self._go.set()
        until = time.monotonic() + GRACE_S
        for worker in self._workers.values():
            if worker.thread.ident is not None:
                worker.thread.join(max(0.0, until - time.monotonic()))


def _compare(first: RoleState, other: RoleState) -> None:
    """Compare what both say; the evaluator says nothing of the format in which features travel."""
    others = other.facts or {}
    for key, value in (first.facts or {}).items():
        if key in others and others[key] != value:
            raise RunError(
                f"{first.role.name} and {other.role.name} disagree on the {key}: "
                f"{value} against {others[key]}. Check target and drafter settings."
            )


def _failure(report: RoleState, before: str) -> RunError:
    """Return a role's failure as a sentence, with the error as its cause."""
    error, told = report.error, _text(report.error)
    cause = told if isinstance(error, PacelineError) else f"{type(error).__name__}: {told}"
    if error is not None and not told:  # an empty message still has a place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__} without a message in {frame.name} ({frame.filename}:{frame.lineno})"
    doing = f" ({report.role.doing})" if report.role.doing else ""
    failure = RunError(f"{report.role.name} on {report.role.device} failed while {before}{doing}: {cause}")
    failure.__cause__ = error
    return failure


def _text(error: BaseException | None) -> str:
    """Return an error's message in one line that is not too long; "" if it has none or cannot make one."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        return ""
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]} [...] {text[-_LONGEST:]}"
