"""Where a drafter is accepted: by the length of the context it reads, and by the kind of prompt.

A cycle's context length is the position of its anchor: the tokens before it, prompt and answer, are what the drafter
reads. The first token of an answer comes from the prompt pass, so the first anchor stands right behind the prompt.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from paceline.decode.evaluate import averages
from paceline.records import Completion

_FIRST_BIN = 64  # tokens; every further bin is as long as all before it
WITHOUT = "(none)"  # what prompts without a category are called where others have one


def anchors(completion: Completion) -> Iterator[int]:
    """Yield the position of each cycle's anchor."""
    yield from accumulate(completion.acceptance_lengths[:-1], initial=len(completion.prompt_ids))


def by_context(completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """Return cycles and pooled acceptance length of each bin of context lengths that has any, shortest first.

    Bins are 0..63, 64..127, 128..255 and so on; `from` and `to` are the first and the last length of a bin.
    """
    bins: dict[int, list[int]] = {}
    for completion in completions:
        for anchor, produced in zip(anchors(completion), completion.acceptance_lengths, strict=False):
            bins.setdefault(_behind(anchor), []).append(produced)
    return [
        {"from": 0 if end == _FIRST_BIN else end // 2, "to": end - 1, "cycles": len(bins[end]), "tau": fmean(bins[end])}
        for end in sorted(bins)
    ]


def by_category(completions: Sequence[Completion], categories: Sequence[str | None]) -> list[dict[str, Any]]:
    """Return prompts, cycles and both acceptance lengths of each category, in order of their first prompt.

    Nothing where no prompt has a category. A category whose answers are all of one token has no cycle and no length.
    """
    if not any(categories):
        return []
    groups: dict[str, list[Completion]] = {}
    for completion, category in zip(completions, categories, strict=True):
        groups.setdefault(category or WITHOUT, []).append(completion)
    return [{"category": name, **_both(group)} for name, group in groups.items()]


def _both(group: Sequence[Completion]) -> dict[str, Any]:
    cycles, tau, tau_pooled = averages(group)
    return {"prompts": len(group), "cycles": cycles, "tau": tau, "tau_pooled": tau_pooled}


def _behind(anchor: int) -> int:
    """Return the first length behind an anchor's bin."""
    return max(_FIRST_BIN, 1 << anchor.bit_length())
