"""Completions by several replicas of a target, each in a thread of this process with its own device.

All take requests from one stream when they have free rows, and all give their completions to one queue. What a
completion is does not depend on who makes it, so the number of replicas changes only the order of results.
"""

import contextvars
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from paceline.decode.engine import Engine
from paceline.decode.protocol import Target
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.stats import Stats
from paceline.pipeline.channel import Closed
from paceline.pipeline.supervisor import GRACE_S, RoleState, Supervisor
from paceline.records import Completion, RunError, UserError
from paceline.runtime.compiling import warm_compiler
from paceline.runtime.gate import Gate


class SharedRequests:
    """One stream of requests for several takers, each request for one of them.

    Requests are made when they are asked for, up to `ahead` of them; so the end is seen in time, and the last requests
    are shared out instead of all going to whoever asks first.
    """

    def __init__(self, requests: Iterable[Request], takers: int, ahead: int) -> None:
        self._source, self._takers, self._ahead = iter(requests), takers, ahead
        self._waiting: list[Request] = []
        self._ended = self._stopped = False
        self._lock = threading.Lock()

    def take(self, count: int) -> list[Request]:
        """Return up to `count` requests, none only at the end."""
        self.check()
        with self._lock:
            if not self._ended:
                more = list(itertools.islice(self._source, self._ahead + count - len(self._waiting)))
                self._waiting += more
                self._ended = len(self._waiting) < self._ahead + count
            if self._ended:
                count = min(count, -(-len(self._waiting) // self._takers))
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken

    def check(self) -> None:
        """Raise Closed if the stream was stopped."""
        if self._stopped:
            raise Closed

    def stop(self) -> None:
        """End every taker soon."""
        self._stopped = True


class _Results:
    """A bounded queue of completions, which the reader may close. None marks its end."""

    def __init__(self, size: int) -> None:
        self._queue: queue.Queue[tuple[Request, Completion] | None] = queue.Queue(size)
        self._closed = False

    def put(self, result: tuple[Request, Completion] | None) -> None:
        """Wait for room; raise Closed once nobody reads any more."""
        while not self._closed:
            with suppress(queue.Full):
                return self._queue.put(result, timeout=0.1)
        raise Closed

    def __iter__(self) -> Iterator[tuple[Request, Completion]]:
        while (result := self._queue.get()) is not None:
            yield result

    def close(self) -> None:
        self._closed = True


class GenerationReplica:
    """One copy of the target and its engine on one device."""

    def __init__(
        self,
        index: int,
        device: str,
        *,
        build: Callable[[str], Target],
        make_engine: Callable[[Target], Engine],
        slots: int,
        source: SharedRequests,
        results: _Results,
    ) -> None:
        self.name, self.device, self.doing = f"generation replica {index}", device, ""
        self._build, self._make_engine, self._slots = build, make_engine, slots
        self._source, self._results = source, results
        self.engine: Engine | None = None

    def load(self) -> None:
        """Load the weights."""
        self._target = self._build(self.device)

    def warm(self) -> dict[str, object]:
        """Allocate all rows and decode one completion of the largest size."""
        self.doing = "a rehearsal of the longest completion"
        engine = self._make_engine(self._target)
        longest = min(self._slots, self._target.max_positions)
        prompt = (0,) * max(1, longest - 2)
        list(engine.run([Request("rehearsal", prompt, max(1, longest - len(prompt)))]))
        engine.stats = Stats()
        self.engine, self.doing = engine, ""
        return {"vocabulary": self._target.vocab_size, "stop tokens": self._target.stop_ids}

    def run(self) -> None:
        """Complete requests until there are none or nobody wants the results."""
        assert self.engine is not None, "warm() comes before run()"
        with suppress(Closed):
            for result in self.engine.serve(self._source.take, self._source.check):
                self._results.put(result)


class Generation:
    """The completions of a stream of requests, made by one replica a device; iterate it once.

    `stats` and `seconds` say how far it is (see progress_note).
    """

    def __init__(
        self,
        requests: Iterable[Request],
        devices: Sequence[str],
        *,
        build: Callable[[str], Target],
        sampling: Sampling,
        rows: int,
        slots: int,
        captured: bool,
        compiled: bool = False,
        cpu_threads: int = 1,
        ready_timeout_s: float = 600.0,
        on_state: Callable[[RoleState], None] = lambda state: None,
    ) -> None:
        """`build` loads the target onto a device; rows, slots, captured and compiled are each replica's Engine's."""
        self._devices, self._compiled, self._ready_timeout_s = devices, compiled, ready_timeout_s
        self._source = SharedRequests(requests, len(devices), ahead=rows * len(devices))
        self._results = _Results(2 * rows * len(devices))
        self._began: float | None = None
        self._error: BaseException | None = None
        gate = Gate()
        self._replicas = [
            GenerationReplica(
                index,
                device,
                build=build,
                make_engine=partial(
                    Engine, sampling=sampling, rows=rows, slots=slots, captured=captured, compiled=compiled, gate=gate
                ),
                slots=slots,
                source=self._source,
                results=self._results,
            )
            for index, device in enumerate(devices)
        ]
        self._supervisor = Supervisor(
            self._replicas,
            threads=[cpu_threads] * len(devices),
            release=self._source.stop,
            ended=Closed,
            on_state=on_state,
            gate=gate,
            on_ready=self._start_clock,
        )

    @property
    def stats(self) -> list[Stats]:
        """What each replica has done so far; empty until all are ready."""
        return [replica.engine.stats for replica in self._replicas if replica.engine is not None]

    @property
    def seconds(self) -> float:
        """Seconds since all replicas were ready."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def __iter__(self) -> Iterator[tuple[Request, Completion]]:
        """Yield (request, completion) in the order in which they end.

        Raises:
            UserError: a request cannot be answered.
            RunError: a replica failed; it is named with its device and cause. What was finished before is yielded.
        """
        if self._compiled:
            warm_compiler(self._devices[0])
        # In a thread of its own, so that results are handed out here while the supervisor waits for its roles.
        supervising = threading.Thread(
            target=contextvars.copy_context().run, args=(self._supervise,), name="generation", daemon=True
        )
        supervising.start()
        try:
            yield from self._results
        finally:
            self._source.stop()
            self._results.close()
            supervising.join(2 * GRACE_S)  # they leave at their next look
        if isinstance(self._error, RunError) and isinstance(self._error.__cause__, UserError):
            raise self._error.__cause__
        if self._error is not None:
            raise self._error

    def _supervise(self) -> None:
        try:
            self._supervisor.run(self._ready_timeout_s)
        except BaseException as error:
            self._error = error
        finally:
            with suppress(Closed):
                self._results.put(None)

    def _start_clock(self) -> None:
        self._began = time.monotonic()
