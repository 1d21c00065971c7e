"""Greedy speculative decoding: draft a block, verify it with the target in one forward, keep what the target agrees to.

A cycle produces the accepted drafts and the target's own next token (bonus), so at least one token. The output is the
target's plain greedy output. Invariant: when a block is drafted, the drafter's context covers exactly the positions
before the anchor. Near the token limit a block shrinks to the room that is left, as in the reference loop.

Shapes: R running rows, B block slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline import blocks
from paceline.decode.draft import DraftSession
from paceline.decode.prompts import check_prompts, pad_right, reach_for
from paceline.decode.protocol import Target
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Completion


@dataclass(slots=True)
class _Row:
    index: int
    prompt: Sequence[int]
    limit: int  # tokens the row may produce
    tokens: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)  # tokens each cycle produced
    accepted: list[int] = field(default_factory=list)  # drafts the target agreed to in each cycle

    @property
    def anchor(self) -> int:
        """Position of the newest token, which the target has not read yet."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        """Slots a block may have: the anchor and the tokens that may still come."""
        return 1 + self.limit - len(self.tokens)


@dataclass(slots=True, eq=False)
class _Session:
    """The two models and their caches for one group of rows."""

    target: Target
    cache: object
    drafts: DraftSession
    block_size: int

    def move(self, source: int, destination: int) -> None:
        self.cache.move([source], [destination])  # type: ignore[attr-defined]
        self.drafts.move(source, destination)


def speculate(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rows: int,
) -> Iterator[tuple[int, Completion]]:
    """Yield (prompt index, completion with its cycles' lengths) as rows finish; `rows` prompts run at once."""
    check_prompts(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), rows):
        group = [_Row(i, prompts[i], max_new_tokens) for i in order[at : at + rows]]
        yield from _run_group(target, drafter, ends, group, max_new_tokens)


def _run_group(
    target: Target, drafter: Drafter, ends: FrozenEnds, running: list[_Row], max_new_tokens: int
) -> Iterator[tuple[int, Completion]]:
    B = drafter.settings.block_size
    slots = reach_for(max(len(row.prompt) for row in running) + max_new_tokens + B)
    drafts = DraftSession(drafter, ends, len(running), slots)
    session = _Session(target, target.new_cache(len(running), slots), drafts, B)
    _prefill(session, running)
    while True:
        for at in reversed(range(len(running))):
            row = running[at]
            stopped = row.tokens[-1] in target.stop_ids
            if stopped or len(row.tokens) == row.limit:
                finish = "stop" if stopped else "length"
                yield row.index, _completion(row, finish)
                last = running.pop()
                if last is not row:
                    running[at] = last
                    session.move(len(running), at)
        if not running:
            return
        _cycle(session, running)


def _completion(row: _Row, finish: str) -> Completion:
    return Completion(tuple(row.prompt), tuple(row.tokens), finish, tuple(row.cycles), tuple(row.accepted))


def _prefill(session: _Session, running: list[_Row]) -> None:
    ids_RT, positions_RT, last_R = pad_right([row.prompt for row in running], session.target.device)
    logits, features = session.target.forward(
        ids_RT, positions_RT, session.cache, first_row=0, reach=ids_RT.shape[1], logits_at=last_R
    )
    session.drafts.extend(_tapped(features), positions_RT)
    for row, token in zip(running, logits[:, 0].argmax(-1).tolist(), strict=True):
        row.tokens.append(token)


def _cycle(session: _Session, running: list[_Row]) -> None:
    device, B = session.target.device, session.block_size
    anchor_ids_R = torch.tensor([row.tokens[-1] for row in running], device=device)
    anchors_R = torch.tensor([row.anchor for row in running], device=device)
    sizes_R = torch.tensor([min(B, row.room) for row in running], device=device)
    reach = reach_for(int(max(row.anchor for row in running)) + B)
    # 1. draft
    drafted_RK = session.drafts.propose(anchor_ids_R, anchors_R, sizes_R, reach)
    block_RB = torch.cat([anchor_ids_R[:, None], drafted_RK], dim=1)
    # 2. verify: the target's choice after slot k is the token for slot k + 1
    positions_RB = blocks.block_positions(anchors_R, B)
    logits, features = session.target.forward(block_RB, positions_RB, session.cache, first_row=0, reach=reach)
    choice_RB = logits.argmax(-1)
    # 3. accept the leading matches, then the target's own token
    inside_RK = torch.arange(1, B, device=device) < sizes_R[:, None]
    accepted_R = blocks.leading_matches((drafted_RK == choice_RB[:, :-1]) & inside_RK)
    session.drafts.extend(_tapped(features), positions_RB)
    for row, count, choices in zip(running, accepted_R.tolist(), choice_RB.tolist(), strict=True):
        produced = _until_stop(choices[: min(count + 1, row.room - 1)], session.target.stop_ids)
        row.tokens += produced
        row.cycles.append(len(produced))
        row.accepted.append(count)


def _until_stop(tokens: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    for at, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: at + 1]
    return tokens


def _tapped(features: Tensor | None) -> Tensor:
    if features is None:
        raise ValueError("speculative decoding needs a target with tapped layers")
    return features
