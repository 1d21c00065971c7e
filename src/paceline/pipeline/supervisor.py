"""Runs roles in threads: handshake, start, end; and the first failure ends all.

Every role reports loading, compiling and ready, or its error. Roles load side by side and warm one after the other,
each alone (see Gate). The run goes on only when all are ready and agree. A role that fails is named with its device,
what it was doing and the cause; the others are woken and leave at their next batch; who has not left after a grace is
left behind in its daemon thread; nothing hangs.
"""

import contextvars
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.records import PacelineError, RunError
from paceline.runtime.gate import Gate

GRACE_S = 5.0  # how long other roles may take to leave after a failure


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
    state: str  # loading, compiling, ready, running, done, failed
    seconds: float
    facts: dict[str, object] | None = None
    error: BaseException | None = None


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
    ) -> None:
        self._roles, self._cpu_threads, self._release, self._ended = roles, threads, release, ended
        self._on_state, self._gate, self._on_ready = on_state, gate, on_ready
        self._reports: queue.Queue[RoleState] = queue.Queue()
        self._go = threading.Event()
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def run(self, ready_timeout_s: float) -> None:
        """Start all roles, wait until they are ready, let them work and wait for their end.

        Raises:
            RunError: a role failed, disagreed or was not ready in time.
        """
        self._threads = [
            # In a copy of this context: since torch 2.12 dynamo's and inductor's settings are context variables.
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._body, role, count), name=role.name, daemon=True
            )
            for role, count in zip(self._roles, self._cpu_threads, strict=True)
        ]
        try:
            for thread in self._threads:
                thread.start()
            self.wait_until_ready(ready_timeout_s)
            self._on_ready()
            self._go.set()
            self._collect("done", deadline=None)
        finally:
            self._stop()

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for every role's ready and compare what they agree on."""
        ready = self._collect("ready", deadline=time.monotonic() + timeout_s, timeout_s=timeout_s)
        first, *others = ready.values()
        for other in others:
            for key, value in (first.facts or {}).items():
                if (other.facts or {}).get(key) != value:
                    raise RunError(
                        f"{first.role.name} and {other.role.name} disagree on the {key}: "
                        f"{value} against {(other.facts or {}).get(key)}. Check target and drafter settings."
                    )

    def _collect(self, state: str, deadline: float | None, timeout_s: float = 0.0) -> dict[str, RoleState]:
        reached: dict[str, RoleState] = {}
        latest = {role.name: "starting" for role in self._roles}
        while len(reached) < len(self._roles):
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                report = self._reports.get(timeout=left)
            except queue.Empty:
                late = ", ".join(f"{n} is still {latest[n]}" for n in latest if n not in reached)
                raise RunError(
                    f"Not every role was ready after pipeline.ready_timeout_s ({timeout_s:g} s): {late}. "
                    f"Raise the limit or look at what that role waits for."
                ) from None
            before, latest[report.role.name] = latest[report.role.name], report.state
            self._on_state(report)
            if report.state == "failed":
                raise _failure(report, before) from report.error
            if report.state == state or (state == "done" and report.state == "stopped"):  # by who ended the stream
                reached[report.role.name] = report
        return reached

    def _body(self, role: Role, cpu_threads: int) -> None:
        began = time.monotonic()

        def tell(state: str, **more: Any) -> None:
            self._reports.put(RoleState(role, state, round(time.monotonic() - began, 3), **more))

        try:
            torch.get_num_threads()  # initialises this thread's own count, which would undo the next line later
            torch.set_num_threads(cpu_threads)
            if torch.device(role.device).type == "cuda":
                torch.cuda.set_device(role.device)
            tell("loading")
            with self._gate.work():
                role.load()
            self._leave_if_stopping()
            tell("compiling")
            with self._gate.alone():
                facts = role.warm()
            tell("ready", facts=facts)
            self._go.wait()
            self._leave_if_stopping()
            tell("running")
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
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))


def _failure(report: RoleState, before: str) -> RunError:
    error = report.error
    cause = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    if error is not None and not str(error).strip():  # an empty message still has a place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__} without a message in {frame.name} ({frame.filename}:{frame.lineno})"
    doing = f" ({report.role.doing})" if report.role.doing else ""
    return RunError(
        f"{report.role.name} on {report.role.device} failed while {before}{doing}: {' '.join(cause.split())}"
    )
