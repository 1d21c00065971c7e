"""Prompts to finished conversations: requests for whatever makes completions, and what comes back to the folder.

Prompts are read when a request is wanted, so only conversations under way are in memory. A conversation's next turn is
asked for before any new prompt is.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.data.completions import Ledger
from paceline.data.completions_writer import CompletionsWriter
from paceline.data.conversation import Asker, Conversation, Turns, questions
from paceline.data.messages import BadRow, Message
from paceline.data.prompt_file import Prompt, PromptLines
from paceline.data.shard_log import Key
from paceline.decode.requests import Request
from paceline.records import Completion, PacelineError, UserError, many


@runtime_checkable
class Completer(Protocol):
    """What turns requests into completions: replicas of this process, or a server."""

    def complete(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Completion | PacelineError]]:
        """Yield what came of each request, in any order; an error concerns this request alone.

        Requests are taken when there is room for them. It may be called again once it has ended.
        """

    def note(self, left: int | None) -> str:
        """Return how fast and how busy it is and, where `left` says how many more there are, how long they take."""


@dataclass(frozen=True, slots=True)
class _Talk:
    key: Key
    raw: bytes
    conversation: Conversation


class Conversations:
    """All conversations of a prompt file that are not over."""

    def __init__(
        self, lines: PromptLines, asker: Asker, writer: CompletionsWriter, *, turns: Turns, drops: frozenset[str]
    ) -> None:
        """`drops` are the reasons for which answers are left out (conversation.CUT, LOOP)."""
        self._lines, self._asker, self._writer = lines, asker, writer
        self._turns, self._drops = turns, drops
        self._fresh: Iterator[tuple[Request, _Talk]] | None = self._begin()
        self._later: deque[tuple[Request, _Talk]] = deque()
        self._asked: dict[int | str, _Talk] = {}
        self._lock = threading.Lock()  # requests are taken by threads

    def run(self, completer: Completer, max_refused: float, on_progress: Callable[[], None]) -> None:
        """Answer everything.

        Raises:
            UserError: more than the share `max_refused` was refused, or the prompt file cannot be read.
            RunError: the completer or the disk failed.
        """
        while self._fresh is not None or self._later:
            # What becomes askable once all requests were taken waits for the next round.
            for request, outcome in completer.complete(self._requests()):
                self._take(request, outcome)
                on_progress()
                self._check_refused(max_refused)
        self._check_refused(max_refused)  # what is refused before it is asked comes with no answer

    def _check_refused(self, most: float) -> None:
        _check(self._writer.ledger, self._writer.total.errors, most, f"See {self._writer.folder}.")

    def _requests(self) -> Iterator[Request]:
        while True:
            with self._lock:
                found = self._later.popleft() if self._later else next(self._fresh, None) if self._fresh else None
                if found is None:
                    self._fresh = None
                    return
                request, talk = found
                self._asked[request.key] = talk
            yield request

    def _begin(self) -> Iterator[tuple[Request, _Talk]]:
        for line, raw in self._lines:
            keys = [(line, copy) for copy in range(self._writer.ledger.samples)]
            todo = [key for key in keys if not self._writer.is_over(key)]
            if not todo:
                continue
            try:
                prompt = self._lines.parse(line, raw)
                chunks = questions(prompt.messages, self._turns)
            except BadRow as error:
                for key in todo:
                    self._refuse(key, raw, error)
                continue
            for key in todo:
                talk = self._talk(key, prompt, chunks, raw, copies=len(keys))
                if request := self._next(talk):
                    yield request, talk

    def _talk(self, key: Key, prompt: Prompt, chunks: list[list[Message]], raw: bytes, *, copies: int) -> _Talk:
        name = _name(prompt.key, key, copies)
        rows = self._writer.rows_of(key)
        return _Talk(key, raw, Conversation(prompt, name, chunks, self._asker, rows, self._drops))

    def _next(self, talk: _Talk) -> Request | None:
        """Return the request for a conversation's next answer; None once it is over and written."""
        conversation = talk.conversation
        try:
            ids = conversation.ask()
        except BadRow as error:
            self._refuse(talk.key, talk.raw, error)
            return None
        if ids is None:
            self._keep(talk)
            return None
        return Request(conversation.request_name, ids, self._asker.max_new_tokens)

    def _take(self, request: Request, outcome: Completion | PacelineError) -> None:
        with self._lock:
            talk = self._asked.pop(request.key)
        conversation = talk.conversation
        if isinstance(outcome, PacelineError):
            return self._refuse(talk.key, talk.raw, outcome, conversation)
        conversation.answer(outcome)
        if conversation.over:
            return self._keep(talk)
        following = self._next(talk)
        if following is not None:
            self._keep(talk)
            with self._lock:
                self._later.append((following, talk))

    def _keep(self, talk: _Talk) -> None:
        conversation, left_out = talk.conversation, None
        if conversation.dropped:
            reason, row = conversation.dropped
            detail = f"{self._lines.place(talk.key[0])}: the answer {reason}."
            left_out = self._entry(talk.key, talk.raw, reason, detail, row)
        self._writer.keep(talk.key, conversation.rows, over=conversation.over, left_out=left_out)

    def _refuse(self, key: Key, raw: bytes, error: PacelineError, conversation: Conversation | None = None) -> None:
        reason = error.reason if isinstance(error, BadRow) else "no completion"
        entry = self._entry(key, raw, reason, str(error), _plain(raw))
        self._writer.keep(key, conversation.rows if conversation else [], over=True, left_out=entry)

    def _entry(self, key: Key, raw: bytes, reason: str, detail: str, row: Any) -> dict[str, Any]:
        own = self._lines.own_id(key[0], raw)  # a line's number may be the id of another
        return {
            "id": None if own is None else _name(own, key, self._writer.ledger.samples),
            "file": self._lines.name,
            "line": key[0],
            "reason": reason,
            "detail": detail,
            "row": row,
        }


def check_refused(ledger: Ledger, most: float) -> None:
    """Refuse to begin with prompts of which more than the share `most` cannot be asked.

    Raises:
        UserError: there are more, or none can be.
    """
    found = ledger.survey
    _check(ledger, found.refused * ledger.samples, most, found.first_refused)


def _check(ledger: Ledger, errors: int, most: float, more: str) -> None:
    of = ledger.conversations
    if errors > int(most * of) or errors == of:
        allowed = f"At most {int(most * of):,} of {many(of, 'prompt')} may be refused (--max-quarantined)"
        raise UserError(f"{more} {allowed}, {errors:,} are.")


def _name(key: str, at: Key, copies: int) -> str:
    return f"{key}/{at[1]}" if copies > 1 else key


def _plain(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="backslashreplace").rstrip("\r\n")
