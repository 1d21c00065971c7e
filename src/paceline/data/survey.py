"""A look at all prompts before anything is generated: how many they are, what is wrong with them, how long they get."""

import hashlib
from array import array
from collections.abc import Callable

import numpy as np

from paceline.data.completions import Survey
from paceline.data.conversation import Asker, Turns, questions
from paceline.data.messages import BadRow, Message
from paceline.data.prompt_file import Prompt, PromptLines, no_prompt
from paceline.records import UserError

_SLACK = 16  # tokens that an answer may gain for each turn when its text is tokenized again


def survey(
    lines: PromptLines, asker: Asker, turns: Turns, shard_lines: int, on_progress: Callable[[int], None]
) -> Survey:
    """Read every prompt once; in memory stay 16 bytes of each. `on_progress` gets the prompts seen.

    Raises:
        UserError: the file cannot be read or holds no prompt, or two prompts have one id.
    """
    counts: list[int] = []
    keys, where = array("Q"), array("Q")
    slots = refused = 0
    first_refused = ""
    for seen, (line, raw) in enumerate(lines, 1):
        index = (line - 1) // shard_lines
        counts += [0] * (index + 1 - len(counts))
        counts[index] += 1
        try:
            prompt = lines.parse(line, raw)
            keys.append(_hash(prompt.key))
            where.append(line)
            slots = max(slots, _slots(prompt, asker, turns))
        except BadRow as error:
            refused += 1
            first_refused = first_refused or str(error)
        on_progress(seen)
    if not counts:
        raise no_prompt(lines)
    _check_unique(lines, np.frombuffer(keys, np.uint64), np.frombuffer(where, np.uint64))
    return Survey(tuple(counts), slots, refused, first_refused)


def _slots(prompt: Prompt, asker: Asker, turns: Turns) -> int:
    """Return the tokens that a conversation and its answers may have, at most."""
    chunks = questions(prompt.messages, turns)
    tokens = len(asker.first_ids(prompt, chunks[0]))
    if len(chunks) > 1:
        whole: list[Message] = [*chunks[0]]
        for chunk in chunks[1:]:
            whole += [{"role": "assistant", "content": ""}, *chunk]
        try:
            tokens = len(asker.ids(whole, prompt.tools))
        except BadRow:  # empty answers are not for every template
            return asker.limit
    return min(asker.limit, tokens + len(chunks) * asker.max_new_tokens + (len(chunks) - 1) * _SLACK)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _check_unique(lines: PromptLines, keys: "np.ndarray", where: "np.ndarray") -> None:
    """Refuse two prompts of one id; equal hashes are only where to look."""
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(same):
        return
    suspects = {int(where[order[at + more]]) for at in same for more in (0, 1)}
    seen: dict[str, int] = {}
    for line, raw in lines:
        if line in suspects:
            try:
                key = lines.parse(line, raw).key
            except BadRow:
                continue
            if key in seen:
                raise UserError(
                    f"Prompts must have ids of their own, got {key!r} in {lines.place(seen[key])} and in "
                    f"{lines.place(line)}. A prompt without an id is called by its line."
                )
            seen[key] = line
