"""Inputs of `prepare` to measure with: long conversations of real text, and any number of short ones.

The text is the source of Python's own standard library, prose in docstrings included: it is on every machine that runs
this. Where more is asked for than there is, it is read again from another place on, so no two rows are equal.
"""

import json
import sysconfig
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from paceline.records import RunError

_SHIFT = 997  # characters by which a further reading is shifted
_UNREAD = "." * 330  # with it, ten thousand short rows are more than one of the pieces that processes take
SHORT_WORDS = 5  # in the prompt and in the completion of a short row: about 40 tokens with a chat template


def library_pieces(characters: int) -> Iterator[str]:
    """Yield pieces of the standard library's source of so many characters, without end.

    Raises:
        RunError: this Python's library has no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if not {"site-packages", "dist-packages"} & {*path.parts})
    if not paths:
        raise RunError(f"The texts to measure with are Python's own source files, and {folder} holds none.")
    for reading in count():
        rest, skip = "", reading * _SHIFT
        for path in paths:
            rest += path.read_text(encoding="utf-8", errors="ignore")
            rest, skip = rest[skip:], max(0, skip - len(rest))
            whole = len(rest) - len(rest) % characters
            yield from (rest[at : at + characters] for at in range(0, whole, characters))
            rest = rest[whole:]


def write_long_rows(path: Path, rows: int, characters: int) -> None:
    """Write conversations of two questions and two answers, a quarter of the characters each."""
    turns = ("user", "assistant", "user", "assistant")
    pieces = (piece for piece in library_pieces(characters // len(turns)) if piece.strip())
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            contents = islice(pieces, len(turns))
            messages = [{"role": role, "content": text} for role, text in zip(turns, contents, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_short_rows(path: Path, rows: int) -> None:
    """Write pairs of a prompt and a completion of a few words each; a number in the prompt tells them apart.

    As in many files, there is another key, which `prepare` does not read.
    """
    words = [word for piece in islice(library_pieces(10_000), 100) for word in piece.split() if len(word) < 10]
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            at = row * 2 * SHORT_WORDS % (len(words) - 2 * SHORT_WORDS)
            prompt = f"{row} " + " ".join(words[at : at + SHORT_WORDS])
            completion = " ".join(words[at + SHORT_WORDS : at + 2 * SHORT_WORDS])
            file.write(json.dumps({"prompt": prompt, "completion": completion, "note": _UNREAD}) + "\n")
