"""Answers in text that is rendered already: what opens and closes them is taken from the chat template itself.

Shapes: S tokens of a text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from paceline.data.chat_template import Template
from paceline.data.messages import BadRow, Message
from paceline.records import UserError


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around an answer."""

    openings: tuple[tuple[int, str], ...]  # first token and text of each opening, the longest text first
    stop_id: int  # the token that ends an answer

    def answers(self, ids_S: Int[np.ndarray, " S"], text: str, encoding: Any) -> Iterator[tuple[int, int]]:
        """Yield the character after each opening and the place in `ids_S` of the stop token that follows.

        Raises:
            BadRow: an answer is not closed.
        """
        stops = np.flatnonzero(ids_S == self.stop_id)
        done = -1
        for at in np.flatnonzero(np.isin(ids_S, [first for first, _ in self.openings])).tolist():
            begin = encoding.token_to_chars(at)[0]
            opening = next((o for first, o in self.openings if first == ids_S[at] and text.startswith(o, begin)), None)
            if at < done or opening is None or begin + len(opening) == len(text):  # the last: an opening without answer
                continue
            following = stops[np.searchsorted(stops, at) :]
            # An opening may hold the stop token itself, as the end of what it writes before the answer.
            closing = next((s for s in following.tolist() if encoding.token_to_chars(s)[0] >= begin + len(opening)), -1)
            if closing < 0:
                raise BadRow(
                    "no end-of-turn token",
                    f"The text's last answer is not closed by token {self.stop_id}, as the chat template closes it. "
                    "Complete the text.",
                )
            yield begin + len(opening), closing
            done = closing


def find_frame(template: Template, tokenize: Callable[[str], list[int]], special: frozenset[int]) -> Frame:
    """Return what the template writes around an answer: in the last place, and in an earlier one where that differs.

    Raises:
        BadRow: the template refuses a plain conversation.
        UserError: it opens an answer without a special token first, or closes it without one.
    """
    ask: Message = {"role": "user", "content": "0"}
    asked = template.text([ask], None)
    earlier, closing = _around([template.text([ask, _answer(digit), ask], None) for digit in "01"])
    _, closing = _around([template.text([ask, _answer(digit)], None) for digit in "01"])
    openings = [opened.removeprefix(asked) for opened in (template.text([ask], None, generate=True), earlier)]
    firsts = {opening: tokenize(opening)[:1] for opening in openings}
    wrong = next((text for text, ids in firsts.items() if not special.intersection(ids)), None)
    if wrong is not None:
        raise UserError(
            f"The chat template must open an answer with a special token to find it in preformatted text, got {wrong!r}"
            ". Give messages instead, or declare the token special in the tokenizer."
        )
    stops = [token for token in tokenize(closing) if token in special]
    if not stops:
        raise UserError(
            f"The chat template must close an answer with a special token to find it in preformatted text, got "
            f"{closing!r}. Give messages instead, or declare the token special in the tokenizer."
        )
    longest_first = sorted(firsts, key=len, reverse=True)
    return Frame(tuple((firsts[opening][0], opening) for opening in longest_first), stops[-1])


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _around(variants: list[str]) -> tuple[str, str]:
    one, other = variants
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return one[:at], one[at + 1 :]
