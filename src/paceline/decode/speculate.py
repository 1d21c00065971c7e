"""Speculative decoding of a list of prompts: the completions of `generate`, with the lengths of their cycles."""

from collections.abc import Iterator, Sequence

from paceline.decode.generate import generate
from paceline.decode.protocol import Target
from paceline.decode.sampling import GREEDY, Sampling
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Completion


def speculate(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rows: int,
    sampling: Sampling = GREEDY,
) -> Iterator[tuple[int, Completion]]:
    """Yield (prompt index, completion with its cycles' lengths) as rows finish; `rows` prompts run at once.

    Raises:
        UserError: there are no prompts, one cannot be answered, or the drafter cannot draft for this target.
    """
    drafts = Drafts(drafter, ends)
    return generate(target, prompts, max_new_tokens=max_new_tokens, rows=rows, sampling=sampling, drafts=drafts)
