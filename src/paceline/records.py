"""The records on the arrows between stages, the errors that people see, and how counts are said in them.

Shapes: R rows that the target computes, S padded length, T real tokens, K anchors in use, B slots of a block,
m tapped layers, H target width. A stage receives a record and never calls the stage that made it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # records are named by torch-free modules too
    from torch import Tensor


class PacelineError(Exception):
    """An error whose text is one clear sentence for a person."""


class UserError(PacelineError):
    """Bad input: rule, value found, where it was set, what to do. The command exits with status 2."""


class RunError(PacelineError):
    """A run that could not go on. The command exits with status 1."""


class Hung(RunError):
    """A run in which a thread never came back. It cannot be ended, so the command leaves it behind."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it came from, and so on, each once: an error may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def many(count: int, what: str, plural: str = "") -> str:
    """Return how many there are of something, as a person says it: 1 row, 2 rows; `plural` where no s makes it."""
    return f"{count:,} {what if count == 1 else plural or what + 's'}"


INTERRUPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: a script does not go on, and a scheduler may start it again


class Interrupted(PacelineError):
    """A run that was asked to stop before its end and can go on later. The command exits with status 75."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSet:
    """The K blocks of a micro-batch in flat context coordinates, sorted by anchor.

    A block of anchor `a` sees the context slots `start <= slot < anchor` and itself. `valid` marks the slots with a
    loss: never slot 0, never a label behind the sample's end or outside the supervised tokens.
    """

    start_K: Tensor  # int64 [K], first context slot of the anchor's sample
    anchor_K: Tensor  # int64 [K], the anchor's own flat slot
    position_K: Tensor  # int64 [K], the anchor's position in its sample
    token_K: Tensor  # int64 [K], the anchor's token id
    labels_KB: Tensor  # int64 [K, B], token at anchor + slot, 0 where not valid
    valid_KB: Tensor  # bool [K, B]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """One micro-batch as the loader makes it and a target replica reads it."""

    seq: int  # place in the run's stream of micro-batches
    epoch: int
    step: int  # optimizer step it belongs to, from 0
    closes_step: bool  # the last micro-batch of its step
    samples: tuple[int, ...]  # rows of the datasets, numbered through
    input_ids: Tensor  # int64 [R, S], right-padded with 0; a row holds one sample, or all of them when packed
    lengths: tuple[int, ...]  # real tokens of each sample
    places_T: Tensor  # int64 [T], where each real token is in input_ids.flatten(), samples end to end
    blocks: BlockSet
    held_out: bool = False  # only looked at, after its step: nothing is learnt from it

    @property
    def packed(self) -> bool:
        """Whether samples share a row."""
        return len(self.lengths) > len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)


@runtime_checkable
class Lent(Protocol):
    """Memory that is somebody else's once it was read."""

    def reading(self) -> AbstractContextManager[None]:
        """Hold while it is read; work that is queued on this thread's stream counts."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureBatch:
    """One micro-batch as it reaches the drafter: real tokens only, laid end to end."""

    tokens: TokenBatch
    features_TD: Tensor  # [T, m * H], or packed as bytes: uint8 [T, m * H + m] (drafter.packed)
    positions_T: Tensor  # int64 [T], position of each token in its sample
    loan: Lent | None = None  # the memory of both, where it is not the batch's own

    def reading(self) -> AbstractContextManager[None]:
        """Hold while features and positions are read, once: then the memory may be another batch's."""
        return nullcontext() if self.loan is None else self.loan.reading()

    @property
    def nbytes(self) -> int:
        """What the batch occupies while it waits for the drafter."""
        return self.features_TD.nbytes


@dataclass(frozen=True, slots=True)
class StepReport:
    """Sums over one optimizer step; nothing in here is a mean except by its name."""

    step: int
    epoch: int
    loss_sum: float  # sum of weight * cross-entropy
    weight_sum: float
    accepted_K: tuple[int, ...]  # blocks whose slots 1..k were all right, k = 1..B-1
    available_K: tuple[int, ...]  # blocks whose slots 1..k all have a label
    blocks: int  # anchors in use
    anchor_slots: int  # anchors the steps' micro-batches had room for
    tokens: int  # real context tokens
    padded_tokens: int  # what the target saw, padding included
    visible: int  # context tokens that blocks saw, each counted for every block that did
    lr: float
    grad_norm: float
    applied: bool  # False: loss or norm was not finite or above its limit, or no slot had a label; nothing changed

    @property
    def loss(self) -> float:
        """Weighted mean cross-entropy of the step, in nats; not a number where no slot has a label."""
        return self.loss_sum / self.weight_sum if self.weight_sum else math.nan

    @property
    def acceptance(self) -> float:
        """Mean acceptance length the step's blocks would have had, bonus token included."""
        shares = (right / max(of, 1) for right, of in zip(self.accepted_K, self.available_K, strict=True))
        return 1.0 + sum(shares)


@dataclass(frozen=True, slots=True)
class Suspect:
    """One micro-batch of a step that was not applied."""

    samples: tuple[int, ...]  # rows of the datasets, numbered through
    features_sum: int  # of the features' bytes as numbers of 64 bits, modulo 2**64
    loss_sum: float
    weight_sum: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A step that was not applied, as one drafter rank saw it."""

    step: int
    rank: int
    loss: float
    grad_norm: float
    rule: str  # that was broken: loss or grad_norm
    limit: float
    why: str  # the same as a part of a sentence
    suspects: tuple[Suspect, ...]  # the rank's own micro-batches, in their order


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """A target, or a run of its layers, by what its memory follows from."""

    entries: int  # of all its weights
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What a decoding engine returned for one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # stop token included when there is one
    finish: str  # "stop" or "length"
    acceptance_lengths: tuple[int, ...] = ()  # tokens each cycle produced; empty for plain decoding
    accepted_drafts: tuple[int, ...] = ()  # drafts the target agreed to in each cycle, also behind the answer's end
    retokenized: bool = False  # a server gave text only: token_ids are what the target's tokenizer makes of it
