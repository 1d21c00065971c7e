"""What an engine is asked for, and how several engines share one stream of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from paceline.records import UserError, many


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to make. `key` and `copy` are the caller's; they and the seed decide what is drawn."""

    key: int | str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    copy: int = 0  # which of several completions of the prompt


# Returns up to n more requests; none at all only when there will be none.
Take = Callable[[int], list[Request]]


def taking(requests: Iterable[Request]) -> Take:
    """Return a Take from requests that are made when they are asked for."""
    source = iter(requests)
    return lambda count: list(islice(source, count))


def copies(requests: Iterable[Request], count: int) -> Iterator[Request]:
    """Yield every request `count` times, as copies 0, 1 and so on."""
    for request in requests:
        for copy in range(count):
            yield replace(request, copy=copy)


def check_request(request: Request, *, slots: int, max_positions: int, vocab_size: int) -> None:
    """Refuse a request that cannot be answered.

    Raises:
        UserError: the prompt is empty, holds an id that the model has not, or leaves no room for its answer.
    """
    prompt, new = request.prompt_ids, request.max_new_tokens
    name = f"Prompt {request.key!r}"
    if not len(prompt):
        raise UserError(f"{name} has no tokens, so there is nothing to continue. Remove it or give it text.")
    if new < 1:
        raise UserError(f"{name} may have {many(new, 'new token')}. Allow at least 1.")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise UserError(f"{name} holds token id {wrong}; the target has 0..{vocab_size - 1}. Use its own tokenizer.")
    limit, whose = min((max_positions, "positions the target has"), (slots, "slots a row of the engine has"))
    if len(prompt) + new > limit:
        raise UserError(
            f"{name} has {many(len(prompt), 'token')} and may have {new:,} new ones, together more than the {limit:,} "
            f"{whose}. Shorten one of them."
        )
