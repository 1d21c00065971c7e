"""Completions by OpenAI-compatible servers, one or several, with a bounded number of requests under way.

Prompts go as token ids where a server takes them and ids come back where it returns them; where only text does, the
completion is marked `retokenized`. A request that fails is sent again, elsewhere if there are several servers; one that
fails for good is an outcome of its own and does not end the run.
"""

import asyncio
import copy
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from paceline.decode.remote_dialects import Failed, Rejected, Wanted
from paceline.decode.remote_server import Server, back_off_s
from paceline.decode.remote_wire import Denied, Refused
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.stats import Stats, progress_note
from paceline.records import Completion, PacelineError, RunError, UserError, many

KEY_VARIABLE = "PACELINE_API_KEY"
_LAST_PORT = 65535
_CONNECT_S = 10.0
_GRACE_S = 5.0  # for connections to be closed
_LOOK_S = 0.1  # between two looks for a server that takes requests
_MOST_REFUSALS = 100  # of one request, by servers that have no room

Outcome = Completion | PacelineError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is asked of servers at once, and for how long."""

    concurrency: int = 64  # requests under way at all servers together
    attempts: int = 5  # after which a request has failed for good
    timeout_s: float = 1800.0  # of an answer
    patience_s: float = 600.0  # for how long all servers may be silent
    ready_timeout_s: float = 0.0  # for how long none may answer at the start

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            UserError: a number is out of its range.
        """
        for name, value, right in (
            ("concurrency", self.concurrency, self.concurrency >= 1),
            ("attempts", self.attempts, self.attempts >= 1),
            ("timeout_s", self.timeout_s, self.timeout_s > 0),
        ):
            if not right:
                raise UserError(f"Setting {name} of remote engines must be above 0, got {value}.")


class Remote:
    """Servers of one target, checked when this is made; a pipeline.conversing.Completer."""

    name = "remote"

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocab_size: int,
        sampling: Sampling,
        served_name: str | None = None,
        limits: Limits | None = None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Ask every server which model it has, and how it takes and gives tokens.

        `urls` are base URLs with or without /v1. `model` is the target's name or folder and `served_name` what servers
        call it where that is something else. `on_note` is told, in the caller's thread, what is worth a line. A key for
        the servers is read from the environment variable PACELINE_API_KEY.

        Raises:
            UserError: a URL is wrong, a server has another model or wants another key, or none answers.
        """
        for url in urls or [""]:
            check_url(url)
        # The caller goes on using its tokenizer, and one tokenizer must not be used in two threads.
        self._wanted = Wanted(copy.deepcopy(tokenizer), tuple(stop_ids), vocab_size, sampling)
        self._limits, self._on_note = limits or Limits(), on_note
        self._done: queue.SimpleQueue[Future[Outcome] | str] = queue.SimpleQueue()
        distinct = dict.fromkeys(url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls)
        self._servers = [Server(url, model, served_name, self._tell) for url in distinct]
        self._seconds = 0.0
        self._began: float | None = None
        self.retokenized = 0  # completions of which only text came back
        with self._connection() as (client, loop):
            asyncio.run_coroutine_threadsafe(self._check_all(client), loop).result()
        while not self._done.empty():
            self._on_note(str(self._done.get()))

    def complete(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Outcome]]:
        """Yield what came of each request, in any order; an error concerns this request alone.

        No more requests are taken than are under way at once.

        Raises:
            RunError: no server has answered for `patience_s`, or one wants another key; what was answered is yielded.
        """
        self._began = time.monotonic()
        self._done = queue.SimpleQueue()  # without what a round that was not finished left behind
        try:
            with self._connection() as (client, loop):
                yield from self._exchange(iter(requests), client, loop)
        finally:
            self._seconds += time.monotonic() - self._began
            self._began = None

    @property
    def stats(self) -> list[Stats]:
        """What each server did so far; decode_s is the time in which it had a request."""
        return [server.stats for server in self._servers]

    def note(self, left: int | None) -> str:
        """Return tokens/s, mean length, time left, each server's busy share and how many answers were retokenized."""
        seconds = self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)
        total = None if left is None else sum(one.finished for one in self.stats) + left
        told = progress_note(self.stats, seconds, total)
        return f"{told}, {self.retokenized:,} retokenized" if self.retokenized else told

    def _exchange(
        self, source: Iterator[Request], client: httpx2.AsyncClient, loop: asyncio.AbstractEventLoop
    ) -> Iterator[tuple[Request, Outcome]]:
        flying: dict[Future[Outcome], Request] = {}
        fatal: BaseException | None = None
        more = True
        while more or flying:
            while more and len(flying) < self._limits.concurrency:
                request = next(source, None)
                more = request is not None
                if request is not None:
                    future = asyncio.run_coroutine_threadsafe(self._answer(client, request), loop)
                    flying[future] = request
                    future.add_done_callback(self._done.put)
            if not flying:
                break
            done = self._done.get()
            if isinstance(done, str):
                self._on_note(done)
                continue
            request = flying.pop(done)
            try:
                outcome = done.result()
            except (CancelledError, RunError) as error:
                if fatal is None:
                    fatal, more = error, False
                    for future in list(flying):  # what is done already stays done and is yielded
                        future.cancel()
                continue
            self.retokenized += isinstance(outcome, Completion) and outcome.retokenized
            yield request, outcome
        while not self._done.empty():
            self._on_note(str(self._done.get()))
        if fatal is not None:
            raise fatal

    def _tell(self, note: str) -> None:
        self._done.put(note)

    @contextmanager
    def _connection(self) -> Iterator[tuple[httpx2.AsyncClient, asyncio.AbstractEventLoop]]:
        """Run an event loop in a thread. At the end what is under way is cancelled, which servers take notice of."""
        client = new_client(self._limits.timeout_s, self._limits.concurrency)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="remote", daemon=True)
        thread.start()
        try:
            yield client, loop
        finally:
            ended = asyncio.run_coroutine_threadsafe(_end(client), loop)
            ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
            # Not for ever: a generator that nobody closed may end with the interpreter, when threads stand still.
            thread.join(_GRACE_S)
            if not loop.is_running():
                loop.close()

    # In the event loop's thread

    async def _answer(self, client: httpx2.AsyncClient, request: Request) -> Outcome:
        """Return what came of a request; raise RunError if it makes no sense to go on with any."""
        attempts = refusals = 0
        server: Server | None = None
        while True:
            server = await self._pick(server)
            try:
                return await server.complete(client, request, self._wanted)
            except Rejected as error:
                return RunError(f"{server.url} does not answer the prompt: {error}.")
            except Denied as error:
                raise RunError(denied(server.url, error)) from None
            except Failed as error:
                refusals += isinstance(error, Refused)
                attempts += not isinstance(error, Refused)
                failed = error
            if attempts == self._limits.attempts or refusals == _MOST_REFUSALS:
                return RunError(
                    f"{server.url} gave no answer in {many(attempts + refusals, 'attempt')}, at last: {failed}."
                )
            if not isinstance(failed, Refused):
                await asyncio.sleep(max(back_off_s(attempts), min(failed.retry_after_s, self._limits.patience_s)))

    async def _pick(self, last: Server | None) -> Server:
        """Wait for a server that takes requests; another one than the last if there is one."""
        while True:
            now = time.monotonic()
            if ready := [server for server in self._servers if server.ready(now)]:
                return min(ready, key=lambda server: (server is last, server.flying))
            if all(self._is_lost(server, now) for server in self._servers):
                causes = " ".join(server.wrong or f"{server.url}: {server.cause}." for server in self._servers)
                raise RunError(f"No server has answered for {self._limits.patience_s:,.0f} s. {causes}")
            await asyncio.sleep(_LOOK_S)

    def _is_lost(self, server: Server, now: float) -> bool:
        if server.wrong is not None:
            return True
        down_s = 0.0 if server.down_since is None else now - server.down_since
        return server.flying == 0 and down_s >= self._limits.patience_s

    async def _check_all(self, client: httpx2.AsyncClient) -> None:
        until = time.monotonic() + self._limits.ready_timeout_s
        while True:
            causes = await asyncio.gather(*(self._check(server, client) for server in self._servers))
            if None in causes:
                break
            if time.monotonic() >= until:
                raise UserError(f"No server answers. {' '.join(cause for cause in causes if cause)}")
            await asyncio.sleep(min(1.0, max(0.0, until - time.monotonic())))
        for cause in causes:
            if cause is not None:
                self._tell(f"{cause} It is tried again from time to time.")

    async def _check(self, server: Server, client: httpx2.AsyncClient) -> str | None:
        """Return why a server cannot be checked now."""
        try:
            await server.check(client, self._wanted)
        except Denied as error:
            raise UserError(denied(server.url, error)) from None
        except Failed as error:
            server.went_wrong(error, time.monotonic())
            return f"{server.url}: {error}."
        return None


def new_client(timeout_s: float, concurrency: int) -> httpx2.AsyncClient:
    """Return a client with the key of the environment, whose connections stay open."""
    key = os.environ.get(KEY_VARIABLE)
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(timeout_s, connect=_CONNECT_S, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=concurrency),
    )


def check_url(url: str) -> None:
    """Refuse what is no server's address, or holds a key.

    Raises:
        UserError: it is one of these.
    """
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        reason = f": {error}" if "@" not in url else ""  # which may quote a key
        raise UserError(f"A server's URL cannot be read{reason}. It looks like http://localhost:8000.") from None
    if parts.userinfo:
        raise UserError(f"The URL of {parts.host} holds a user or a key. Put a key into {KEY_VARIABLE} instead.")
    if parts.query or parts.fragment:
        raise UserError(
            f"A server's URL ends with its path, but that of {parts.host} has more behind it. Put a key into "
            f"{KEY_VARIABLE} instead."
        )
    if parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > _LAST_PORT:
        shown = "something else with a @ in it" if "@" in url else repr(url)  # what is before it may be a key
        raise UserError(f"A server's URL must look like http://localhost:8000, got {shown}.")


def denied(url: str, error: Denied) -> str:
    """Return what to say of a server that wants another key."""
    advice = "does not fit" if os.environ.get(KEY_VARIABLE) else "is not set"
    return f"{url} wants a key ({error}), and the environment variable {KEY_VARIABLE} {advice}."


async def _end(client: httpx2.AsyncClient) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
