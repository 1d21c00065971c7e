"""Greedy completions with continuous batching: finished rows leave, waiting prompts enter.

Shapes: R running rows, T prompt length of entering rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.decode.prompts import check_prompts, pad_right, reach_for
from paceline.decode.protocol import Target
from paceline.records import Completion


@dataclass(slots=True)
class _Row:
    """A running prompt and what it has produced."""

    index: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)


def generate(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, rows: int
) -> Iterator[tuple[int, Completion]]:
    """Yield (prompt index, completion) as rows finish; greedy, a stop token is kept as the last token.

    `rows` prompts run at once. Prompts enter in order of length, so that an entering group wastes little padding.
    """
    check_prompts(prompts)
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # popped from the end: longest first
    if not waiting:
        return
    rows = min(rows, len(waiting))
    cache = target.new_cache(rows, reach_for(len(prompts[waiting[-1]]) + max_new_tokens))
    running: list[_Row] = []
    while waiting or running:
        # Enter in groups: one padded prompt pass for many rows costs little more than for one.
        if waiting and (not running or rows - len(running) >= max(1, rows // 4)):
            entering = [
                _Row(i, prompts[i]) for i in (waiting.pop() for _ in range(min(len(waiting), rows - len(running))))
            ]
            _enter(target, cache, entering, first_row=len(running))
            running += entering
        else:
            _advance(target, cache, running)
        for at in reversed(range(len(running))):
            row = running[at]
            stopped = row.tokens[-1] in target.stop_ids
            if stopped or len(row.tokens) == max_new_tokens:
                yield row.index, Completion(tuple(row.prompt), tuple(row.tokens), "stop" if stopped else "length")
                last = running.pop()
                if last is not row:
                    running[at] = last
                    cache.move(len(running), at)


def _enter(target: Target, cache: object, entering: list[_Row], first_row: int) -> None:
    ids_RT, positions_RT, last_R = pad_right([row.prompt for row in entering], target.device)
    logits, _ = target.forward(
        ids_RT, positions_RT, cache, first_row=first_row, reach=ids_RT.shape[1], logits_at=last_R
    )
    _append(entering, logits[:, 0])


def _advance(target: Target, cache: object, running: list[_Row]) -> None:
    places = [len(row.prompt) + len(row.tokens) - 1 for row in running]
    ids_R1 = torch.tensor([[row.tokens[-1]] for row in running], device=target.device)
    positions_R1 = torch.tensor(places, device=target.device)[:, None]
    logits, _ = target.forward(ids_R1, positions_R1, cache, first_row=0, reach=reach_for(max(places) + 1))
    _append(running, logits[:, 0])


def _append(rows: list[_Row], logits_RV: torch.Tensor) -> None:
    for row, token in zip(rows, logits_RV.argmax(-1).tolist(), strict=True):
        row.tokens.append(token)
