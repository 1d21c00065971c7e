"""Completions of a list of prompts, by an engine of their own."""

from collections.abc import Iterator, Sequence

from paceline.decode.engine import Engine
from paceline.decode.prompts import check_prompts, reach_for
from paceline.decode.protocol import Target
from paceline.decode.requests import Request, check_request
from paceline.decode.sampling import GREEDY, Sampling
from paceline.decode.steps import Drafts
from paceline.records import Completion


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rows: int,
    sampling: Sampling = GREEDY,
    drafts: Drafts | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Yield (prompt index, completion) as rows finish; a stop token is kept as the last token.

    `rows` prompts run at once. Prompts enter in order of length, so that an entering group wastes little padding. A
    prompt's index is the key of what is drawn for it.

    Raises:
        UserError: there are no prompts, or one cannot be answered; before anything is decoded.
    """
    check_prompts(prompts)
    requests = [Request(index, prompt, max_new_tokens) for index, prompt in enumerate(prompts)]
    slots = reach_for(max(map(len, prompts)) + max_new_tokens)
    for request in requests:
        check_request(request, slots=slots, max_positions=target.max_positions, vocab_size=target.vocab_size)
    engine = Engine(target, sampling, rows=min(rows, len(prompts)), slots=slots, drafts=drafts)
    for request, completion in engine.run(sorted(requests, key=lambda request: -len(request.prompt_ids))):
        yield int(request.key), completion
