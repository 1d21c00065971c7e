"""What memory a card has and how much of it torch may allocate: what `plan --memory` is asked, and what it names."""

import re

from paceline.records import UserError
from paceline.train.memory import USABLE

CONTEXT = 512 << 20  # bytes, about: what CUDA takes for a process beside what torch allocates
_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_MOST = 2**50  # bytes


def read_memory(text: str) -> int:
    """Return the bytes that a text such as 24GiB stands for.

    Raises:
        UserError: it is none, or more than any card's.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GiB|MiB|GB|MB)", text.strip(), re.ASCII)
    size = float(found[1]) * _UNITS[found[2]] if found else 0
    if not found or size < 1:
        raise UserError(f"--memory is a card's memory with its unit, such as 24GiB or 80GB, got {text!r}.")
    if size > _MOST:
        short = text if len(text) < 20 else f"{text[:10]}...{text[-10:]}"
        raise UserError(
            f"--memory is one card's memory, at most {_MOST >> 40:,} TiB, got {short!r}. Give that of a card."
        )
    return int(size)


def usable_of(memory: int) -> int:
    """Return what torch may allocate of a card: the rest is CUDA's own, and gaps between blocks."""
    return int(USABLE * max(memory - CONTEXT, 0))


def card_for(size: int) -> str:
    """Return the memory, in tenths of a GiB as `--memory` takes it, of the smallest card with so many usable bytes."""
    tenths = int(10 * (size / USABLE + CONTEXT) / 2**30)
    while usable_of(read_memory(card := f"{tenths / 10:.1f} GiB")) < size:
        tenths += 1
    return card
