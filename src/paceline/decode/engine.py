"""Batched decoding of one target on one device: finished rows leave, waiting prompts enter.

An engine has a fixed number of rows. Prompts enter free rows by a padded prompt pass, then a step advances all rows: by
a token, or with a drafter by a block's cycle (see steps.py). A step neither waits for the device nor needs the host:
the host looks every few steps which rows have ended. The completions of one look are made while the device does the
next steps.

Shapes: R rows, N entering rows, T padded prompt length, W leading rows that a step advances.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from paceline.decode.memory import PREFILL_TOKENS
from paceline.decode.prompts import pad_right, reach_for
from paceline.decode.protocol import Target
from paceline.decode.requests import Request, Take, check_request, taking
from paceline.decode.rows import Fetched, Rows
from paceline.decode.sampling import Sampling, choose, noise_key
from paceline.decode.stats import Stats, Watch
from paceline.decode.steps import Drafts, DraftStep, PlainStep, Step
from paceline.records import Completion
from paceline.runtime.capture import Captured, Pool, new_pool
from paceline.runtime.compiling import OneShape
from paceline.runtime.gate import Gate

_STEPS_TO_CAPTURE = 2  # which a capture makes to warm up; they count
_NARROWEST = 8  # rows of a captured step
_MOST_COMPILED = 256  # steps of all engines together


@dataclass(slots=True)
class _Live:
    """A row in use, as the host knows it."""

    request: Request
    place: int  # of its newest token at the last look
    end: int  # the last place it may reach


@dataclass(frozen=True, slots=True)
class _Ended:
    """Rows that have ended and how to get their tokens, prompts included, and the notes of their cycles."""

    rows: list[_Live]
    fetched: Callable[[], Fetched]


class Engine:
    """Decodes requests on one target. Use it in one thread at a time; `stats` may be read from others."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        *,
        rows: int,
        slots: int,
        drafts: Drafts | None = None,
        captured: bool = False,
        compiled: bool = False,
        gate: Gate | None = None,
    ) -> None:
        """Prepare `rows` rows of `slots` tokens each (prompt and completion).

        With `drafts` decoding is speculative, and gives the same completions in fewer steps. `captured` replays decode
        steps as CUDA graphs, one for each width and reach, made when first needed; `compiled` fuses their operations
        with torch.compile, which takes up to a minute for each reach. Both happen alone (see Gate).

        Raises:
            UserError: the drafter cannot draft for this target.
        """
        device = target.device
        self.stats = Stats()
        self._target, self._sampling, self._slots, self._gate = target, sampling, slots, gate or Gate()
        self._captured, self._compiled = captured, compiled
        self._kept_slots = kept_slots(slots, drafts.drafter.settings.block_size if drafts else 1)
        self._rows = Rows(rows, self._kept_slots, target.stop_ids, device)
        self._step: Step = (
            DraftStep(target, drafts, sampling, self._rows) if drafts else PlainStep(target, sampling, self._rows)
        )
        self._live: list[_Live | None] = [None] * rows
        self._units: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool: Pool | None = None  # of the graphs; nothing in it outlives a step, so any may follow any
        self._watch = Watch(device)
        on_gpu = device.type == "cuda"
        # A look costs a GPU some idle time and a CPU nothing. Prompts enter in groups, as one padded prompt pass for
        # many costs little more than for one; a group waits until an eighth of the rows are free.
        self._look_every = (2 if drafts else 8) if on_gpu else 1
        self._least_entering = max(1, rows // 8)
        self._prefill_tokens = PREFILL_TOKENS if on_gpu else 1024  # padded tokens of one prompt pass
        # Slots are read up to the next multiple of this; a captured or compiled step is made for each.
        self._reach_step = 256 if compiled else 128 if captured else 64

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Completion]]:
        """Yield (request, completion) as rows finish; requests are taken when there are rows for them.

        Raises:
            UserError: a request cannot be answered.
        """
        yield from self.serve(taking(requests))

    def serve(self, take: Take, between: Callable[[], None] = lambda: None) -> Iterator[tuple[Request, Completion]]:
        """As `run`, with requests from a function that several engines may share.

        `between` is called every few steps; what it raises ends the engine's work.
        """
        self._live = [None] * len(self._live)  # whatever a run that was not finished left behind
        more, ended = True, None
        while True:
            between()
            free = self._live.count(None)
            entering: list[Request] = []
            if more and (free == len(self._live) or free >= self._least_entering):
                entering = take(free)
                more = bool(entering)
            if not entering and free == len(self._live):
                break
            marks = self._enter(entering)
            before = self._decode()
            if ended is not None:  # its completions are made while the device works
                yield from self._completions(ended)
            ended = self._look(marks, before)
        if ended is not None:
            yield from self._completions(ended)

    def prepare(self) -> None:
        """Capture or compile every step that decoding may ask for, so that none is made later. Run this alone.

        After a first prompt was read: then both caches are where they stay.
        """
        for width, reach in self.shapes():
            self._unit(width, reach)

    def shapes(self) -> list[tuple[int, int]]:
        """Return the width and reach of every step that is captured or compiled; nothing where steps are neither."""
        if not (self._captured or self._compiled):
            return []
        rows, kept, unit = len(self._live), self._kept_slots, self._reach_step
        widths = sorted({self._width(live) for live in range(1, rows + 1)})
        return [(width, min(reach, kept)) for reach in range(unit, kept + unit, unit) for width in widths]

    # Entering

    def _enter(self, entering: list[Request]) -> tuple[Any, Any]:
        """Read the prompts of entering requests; return the marks before and after."""
        with self._gate.work():
            before = self._watch.mark()
            for group in self._groups(entering):
                self._prefill(group)
            return before, self._watch.mark()

    def _groups(self, entering: list[Request]) -> Iterator[list[Request]]:
        """Yield requests of similar length that fit one prompt pass."""
        for request in entering:
            check_request(
                request,
                slots=self._slots,
                max_positions=self._target.max_positions,
                vocab_size=self._target.vocab_size,
            )
        waiting = sorted(entering, key=lambda request: len(request.prompt_ids))  # popped from the end: longest first
        while waiting:
            count = max(1, self._prefill_tokens // len(waiting[-1].prompt_ids))
            yield [waiting.pop() for _ in range(min(count, len(waiting)))]

    @torch.no_grad()
    def _prefill(self, group: list[Request]) -> None:
        device = self._target.device
        free = [row for row, live in enumerate(self._live) if live is None][: len(group)]
        ids_NT, _, last_N = pad_right([request.prompt_ids for request in group], device)
        ends = [len(request.prompt_ids) + request.max_new_tokens - 1 for request in group]
        noise = [noise_key(self._sampling.seed, request.key, request.copy) for request in group]
        rows_N, end_N, noise_N = torch.tensor([free, ends, noise], device=device)
        place_N = last_N + 1
        logits_NV = self._step.read(ids_NT, last_N, rows_N)
        token_N = choose(logits_NV, self._sampling, noise_N, place_N)
        self._rows.enter(rows_N, ids_NT, place_N, end_N, noise_N, token_N)
        for row, request, end in zip(free, group, ends, strict=True):
            self._live[row] = _Live(request, len(request.prompt_ids), end)
        self.stats.tokens += len(group)
        self.stats.prompt_tokens += sum(len(request.prompt_ids) for request in group)
        self.stats.padded_tokens += ids_NT.numel()

    # Decoding

    def _decode(self) -> Any:
        """Advance all rows by as many steps as there are between two looks, unless all end sooner; return a mark before
        them."""
        going = [live for live in self._live if live is not None]
        steps = min(self._look_every, max(live.end - live.place for live in going))
        if steps == 0:
            return self._watch.mark()
        width = self._compact(len(going))
        # The last step reads the tokens that the steps before it wrote, and those of its own.
        gained = max(steps, _STEPS_TO_CAPTURE) * self._step.most
        reach = reach_for(max(live.place for live in going) + gained, self._reach_step)
        step, made = self._unit(width, min(reach, self._kept_slots))
        with self._gate.work():
            before = self._watch.mark()
            for _ in range(steps - made):
                step()
        self.stats.steps += max(0, steps - made)
        self.stats.row_steps += max(0, steps - made) * width
        return before

    def _compact(self, live: int) -> int:
        """Bring live rows to the front where that saves work; return how many leading rows a step must advance.

        A captured step is made for one width, so there it is a power of two; compiling is too slow even for that.
        """
        width = self._width(live)
        sources = [row for row in range(width, len(self._live)) if self._live[row] is not None]
        if sources:
            holes = [row for row in range(width) if self._live[row] is None][: len(sources)]
            with self._gate.work(), torch.no_grad():
                self._step.move(sources, holes)
                self._rows.move(sources, holes)
            for source, hole in zip(sources, holes, strict=True):
                self._live[hole], self._live[source] = self._live[source], None
        return width

    def _width(self, live: int) -> int:
        if self._compiled:
            return len(self._live)
        if self._captured:
            return min(len(self._live), max(_NARROWEST, 1 << (live - 1).bit_length()))
        return live

    def _unit(self, width: int, reach: int) -> tuple[Callable[[], None], int]:
        """Return a step of this width and reach, and how many steps were made by making it."""
        if (width, reach) in self._units:
            return self._units[width, reach], 0
        step: Callable[[], None] = partial(self._step.advance, width, reach)
        made = 0
        if self._compiled or self._captured:
            with self._gate.alone(), _many_compiled() if self._compiled else nullcontext():
                if self._compiled:
                    step = OneShape(step, instead=step)
                if self._captured:
                    self._pool = self._pool or new_pool(self._target.device)
                    step, made = Captured(step, pool=self._pool), _STEPS_TO_CAPTURE
                    self.stats.captured += 1
                else:  # the first call compiles
                    step()
                    made = 1
        self._units[width, reach] = step
        return step, made

    # Leaving

    @torch.no_grad()
    def _look(self, marks: tuple[Any, Any], before: Any) -> _Ended | None:
        """Wait for the device, free the rows that have ended and begin to fetch their tokens."""
        with self._gate.work():
            after = self._watch.mark()
            ended, places = self._rows.look()
            self.stats.prefill_s += self._watch.between(*marks)
            self.stats.decode_s += self._watch.between(before, after)
            for live, place in zip(self._live, places, strict=True):
                if live is not None:
                    self.stats.tokens += place - live.place
                    live.place = place
            return self._fetch([row for row, live in enumerate(self._live) if live is not None and ended[row]])

    def _fetch(self, leaving: list[int]) -> _Ended | None:
        if not leaving:
            return None
        rows = [live for row in leaving if (live := self._live[row]) is not None]
        fetched = self._rows.fetch(leaving, 1 + max(row.place for row in rows))
        for row in leaving:
            self._live[row] = None
        return _Ended(rows, fetched)

    def _completions(self, ended: _Ended) -> Iterator[tuple[Request, Completion]]:
        for row, ids, notes in zip(ended.rows, *ended.fetched(), strict=True):
            prompt = row.request.prompt_ids
            tokens = tuple(ids[len(prompt) : row.place + 1])
            finish = "stop" if tokens[-1] in self._target.stop_ids else "length"
            begun = [place for place, note in enumerate(notes[: row.place]) if note]
            lengths = tuple(after - place for place, after in pairwise([*begun, row.place]))
            self.stats.finished += 1
            self.stats.finished_tokens += len(tokens)
            self.stats.slot_steps += sum(place + self._step.most for place in begun or range(len(prompt), row.place))
            accepted = tuple(notes[place] - 1 for place in begun)
            yield row.request, Completion(tuple(prompt), tokens, finish, lengths, accepted)


def kept_slots(slots: int, block_size: int) -> int:
    """Return the slots a row's caches have, so that a block may stand at its last place: a multiple of what fused
    attention likes."""
    return reach_for(slots + block_size - 1)


def _many_compiled() -> AbstractContextManager[None]:
    """Let dynamo compile more than 8 variants of a function: all steps are one function to it."""
    from torch._dynamo import config

    return config.patch(recompile_limit=_MOST_COMPILED)
