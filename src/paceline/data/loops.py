"""Completions that end in a loop: the same few tokens again and again.

A completion counts as one if its end is the same cycle of at most 64 tokens at least 4 times in a row, over at least 64
tokens. So a line of dashes or a repeated word is none, nor is text that changes from round to round, such as a counter.
"""

from collections.abc import Sequence

LONGEST_CYCLE = 64  # tokens
LEAST_ROUNDS = 4
LEAST_TOKENS = 64


def ends_in_loop(token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> bool:
    """Return whether a completion ends in a loop, its stop token left out."""
    end = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in stop_ids)
    tail = list(token_ids[max(0, end - LEAST_ROUNDS * LONGEST_CYCLE) : end])
    for cycle in range(1, LONGEST_CYCLE + 1):
        span = max(LEAST_ROUNDS * cycle, LEAST_TOKENS)
        if len(tail) >= span and tail[len(tail) - span + cycle :] == tail[len(tail) - span : -cycle]:
            return True
    return False
