"""One server: what it serves, how it wants to be asked, and whether it answers at present."""

import random
import time
from collections.abc import Callable

import httpx2

from paceline.decode.remote_answers import to_completion
from paceline.decode.remote_dialects import DIALECTS, Answer, Dialect, Failed, Garbled, Rejected, Wanted
from paceline.decode.remote_wire import Refused, exchange
from paceline.decode.requests import Request
from paceline.decode.stats import Stats
from paceline.records import Completion, UserError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
_FAILURES_IN_A_ROW = 3  # until it is told, and until requests that fail mean that the server does


def back_off_s(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row: doubled each time and scattered by a quarter."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures - 1, 10)) * random.uniform(0.75, 1.25)


class Server:
    """One base URL. The event loop's thread uses it; others may read `stats`."""

    def __init__(self, url: str, model: str, served_name: str | None, tell: Callable[[str], None]) -> None:
        """`model` is the target's name; `served_name` is what the server calls it, if not that. `tell` takes notes."""
        self.url, self.stats = url, Stats()
        self.dialect: Dialect | None = None  # None: not checked yet
        self.flying = 0  # requests under way
        self.wrong: str | None = None  # why it is of no use any more
        self.cause = ""  # of the last failure
        self.down_since: float | None = None
        self._model, self._served_name, self._tell = model, served_name, tell
        self._name = served_name or model  # what requests call the model
        self._failures = 0  # in a row
        self._due = self._failed_at = 0.0
        self._trying = self._told = False
        self._seen = 0.0  # when `flying` changed last

    # Whether it may be asked

    def ready(self, now: float) -> bool:
        """Return whether a request may be sent; one at a time after failures, when their wait is over."""
        if self.wrong is not None:
            return False
        return self._steady or (now >= self._due and not self._trying)

    @property
    def _steady(self) -> bool:
        return self.dialect is not None and self.down_since is None

    def _went_well(self, sent: float) -> None:
        if sent < self._failed_at:  # says nothing of what is now
            return
        if self._told:
            self._tell(f"{self.url} answers again.")
        self._failures = 0
        self.down_since, self._told = None, False

    def went_wrong(self, error: Failed, sent: float) -> None:
        """Count a failure; after one of the server itself, or several others in a row, it is left alone for a while.

        Requests that were under way together fail together, which counts once.
        """
        if sent < self._failed_at:
            return
        now = time.monotonic()
        self.cause, self._failed_at = str(error), now
        self._failures += 1
        if self._steady and not isinstance(error, Refused) and self._failures < _FAILURES_IN_A_ROW:
            return
        if self.down_since is None:
            self.down_since = now
        self._due = now + max(back_off_s(self._failures), error.retry_after_s)
        if self._failures >= _FAILURES_IN_A_ROW and not self._told:
            self._told = True
            self._tell(f"{self.url} gives no answers ({self.cause}); it is tried again from time to time.")

    # Asking

    async def complete(self, client: httpx2.AsyncClient, request: Request, wanted: Wanted) -> Completion:
        """Return the completion; after failures it is first seen whether the server is what it was.

        Raises:
            Rejected: the server will not or cannot answer this request.
            Failed: there was no answer; Refused if there is none at present to any request.
            Denied: the server wants another key.
        """
        sent = time.monotonic()
        trial = self._trying = not self._steady
        self._count(1)
        try:
            if trial:
                await self.check(client, wanted)
                self._went_well(sent)
                trial, self._trying, sent = False, False, time.monotonic()
            assert self.dialect is not None, "check() finds one"
            done = to_completion(await self._ask(client, self.dialect, request, wanted), request, wanted)
        except Failed as error:
            self.went_wrong(error, sent)
            raise
        except UserError as error:  # it serves something else by now
            self.wrong = str(error)
            self._tell(f"{error} It gets no more requests.")
            raise Refused(str(error)) from None
        finally:
            self._trying = self._trying and not trial
            self._count(-1)
        self._went_well(sent)
        self.stats.finished += 1
        self.stats.finished_tokens += len(done.token_ids)
        self.stats.tokens += len(done.token_ids)
        self.stats.prompt_tokens += len(done.prompt_ids)
        return done

    def _count(self, more: int) -> None:
        now = time.monotonic()
        if self.flying:
            self.stats.decode_s += now - self._seen
        self.flying, self._seen = self.flying + more, now

    async def _ask(self, client: httpx2.AsyncClient, dialect: Dialect, request: Request, wanted: Wanted) -> Answer:
        return dialect.read(await exchange(client, self.url + dialect.path, dialect.body(request, wanted, self._name)))

    # What it is

    async def check(self, client: httpx2.AsyncClient, wanted: Wanted) -> None:
        """Find out that the server has the right model and how it wants to be asked.

        Raises:
            UserError: it has another model, or completions cannot be asked of it.
            Failed, Denied: see `complete`.
        """
        try:
            served = _names(await exchange(client, self.url + "/v1/models"))
        except Rejected:
            served = []
        if served:
            self._name = self._known(served)
        answers = await self._probe(client, wanted)
        dialect, answer = next((found for found in answers if found[1].ids is not None), answers[0])
        if not served:  # `transformers serve` may list none and have one: its answers say which, with a revision
            self._known([[str(answer.model).partition("@")[0]]])
        if self.dialect is not dialect:
            self.dialect = dialect
            self._tell(self._how(dialect, answer, wanted))

    async def _probe(self, client: httpx2.AsyncClient, wanted: Wanted) -> list[tuple[Dialect, Answer]]:
        """Return the dialects that work, up to the first that gives ids, with their answers to a token's completion."""
        request = Request("probe", tuple(wanted.tokenizer("Hello")["input_ids"]) or wanted.stop_ids, 1)
        answers: list[tuple[Dialect, Answer]] = []
        refusals = []
        for dialect in DIALECTS if self.dialect is None else (self.dialect,):
            if answers and not dialect.gives_ids:
                break
            try:
                answers.append((dialect, await self._ask(client, dialect, request, wanted)))
            except Rejected as error:
                refusals.append(str(error))
            except Garbled:
                if not answers:
                    raise  # otherwise a page for people where another server has a second way to ask
            if answers and answers[-1][1].ids is not None:
                break
        if not answers:
            raise UserError(f"{self.url} gives no completions: {'; '.join(dict.fromkeys(refusals))}.")
        return answers

    def _known(self, served: list[list[str]]) -> str:
        """Return what the server calls the target."""
        for names in served:
            if any(_same(name, self._served_name, self._model) for name in names):
                return names[0]
        found = ", ".join(names[0] for names in served[:5])
        if self._served_name is not None:
            raise UserError(f"{self.url} serves {found}, not {self._served_name} (--served-name).")
        raise UserError(
            f"{self.url} serves {found}, not {self._model}. Start it with that model, or say with --served-name which "
            "of its models is the same."
        )

    def _how(self, dialect: Dialect, answer: Answer, wanted: Wanted) -> str:
        gives = "token ids" if answer.ids is not None else "only text, which is tokenized again"
        lacks = [name for name in dialect.lacks if name != "top_k" or wanted.sampling.top_k]
        missing = f" It cannot be told {' and '.join(lacks)}." if lacks else ""
        return f"{self.url} serves {self._name} and returns {gives} ({dialect.name}).{missing}"


def _names(listed: dict[str, object]) -> list[list[str]]:
    """Return the names of each model in a list of models: its id, vLLM's `root` and llama.cpp's `aliases`."""
    data = listed.get("data")
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    return [
        [str(name) for name in (model["id"], *(model.get("aliases") or ()), model.get("root")) if name]
        for model in models
        if model.get("id")
    ]


def _same(name: str, served_name: str | None, model: str) -> bool:
    if served_name is not None:
        return name == served_name
    return name == model or _last(name) == _last(model)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
