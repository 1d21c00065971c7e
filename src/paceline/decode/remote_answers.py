"""From a server's answer to a completion as the built-in engine would have made it."""

from paceline.decode.remote_dialects import Answer, Failed, Rejected, Wanted
from paceline.decode.requests import Request
from paceline.records import Completion


def to_completion(answer: Answer, request: Request, wanted: Wanted) -> Completion:
    """Return the completion that an answer stands for: it ends at the target's first stop token, which is kept.

    Raises:
        Rejected: the server read another prompt, cut the answer early, or has other tokens than the target.
        Failed: there is nothing in the answer.
    """
    prompt = tuple(request.prompt_ids)
    if answer.prompt_tokens is not None and answer.prompt_tokens != len(prompt):
        raise Rejected(f"the server read {answer.prompt_tokens:,} tokens of a prompt of {len(prompt):,}")
    ids, retokenized = answer.ids, answer.ids is None
    if ids is None:
        ids = tuple(wanted.tokenizer(answer.text, add_special_tokens=False, verbose=False)["input_ids"])
    wrong = next((token for token in ids if not 0 <= token < wanted.vocab_size), None)
    if wrong is not None:
        raise Rejected(f"the server returned token id {wrong:,}; the target has 0..{wanted.vocab_size - 1:,}")
    stop = next((at for at, token in enumerate(ids) if token in wanted.stop_ids), None)
    if stop is not None:
        return Completion(prompt, ids[: stop + 1], "stop", retokenized=retokenized)
    if answer.finish == "stop":
        ids = _ended(ids, answer, wanted)
    elif not retokenized and len(ids) < request.max_new_tokens:
        # Its context ended; text says nothing of it, as its tokens may be fewer than the server's.
        raise Rejected(f"the server ended the answer after {len(ids):,} of {request.max_new_tokens:,} new tokens")
    elif not retokenized:
        ids = ids[: request.max_new_tokens]
    if not ids:
        raise Failed("an answer without tokens")
    return Completion(prompt, ids, answer.finish, retokenized=retokenized)


def _ended(ids: tuple[int, ...], answer: Answer, wanted: Wanted) -> tuple[int, ...]:
    """Put the stop token back that text does not show.

    Ids that end with none of the target's were ended by a stop token that only the server knows; they stay as they are.
    """
    if answer.ids and answer.stopped_at is None:
        return ids
    ending = answer.stopped_at if answer.stopped_at in wanted.stop_ids else next(iter(wanted.stop_ids), None)
    return ids if ending is None else (*ids, ending)
