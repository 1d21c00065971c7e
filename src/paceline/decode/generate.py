"""Greedy completions of a list of prompts, by an engine of their own."""

from collections.abc import Iterator, Sequence

from paceline.decode.engine import Engine
from paceline.decode.prompts import check_prompts, reach_for
from paceline.decode.protocol import Target
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.records import Completion


def generate(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, rows: int
) -> Iterator[tuple[int, Completion]]:
    """Yield (prompt index, completion) as rows finish; greedy, a stop token is kept as the last token.

    `rows` prompts run at once. Prompts enter in order of length, so that an entering group wastes little padding.
    """
    check_prompts(prompts)
    if not prompts:
        return
    slots = reach_for(max(map(len, prompts)) + max_new_tokens)
    engine = Engine(target, Sampling(), rows=min(rows, len(prompts)), slots=slots)
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for request, completion in engine.run(Request(i, prompts[i], max_new_tokens) for i in longest_first):
        yield int(request.key), completion
