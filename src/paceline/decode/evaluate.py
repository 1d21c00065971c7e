"""How well a drafter drafts: acceptance measured by true speculative decoding, and speed against plain decoding.

Two averages of the acceptance length are in use and both are given: the mean over prompts of each prompt's mean cycle
(paper, z-lab, SGLang) and the pooled mean over all cycles.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.decode.generate import generate
from paceline.decode.protocol import Target
from paceline.decode.sampling import Sampling
from paceline.decode.speculate import speculate
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Completion, RunError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Acceptance over a set of prompts."""

    prompts: int
    cycles: int
    tokens: int  # tokens that cycles produced; the first token of an answer comes from the prompt pass
    tau: float  # mean over prompts of the mean tokens a cycle produced, bonus included
    tau_pooled: float  # tokens / cycles
    per_slot_acceptance: tuple[float, ...]  # [k]: share of cycles whose slots 1..k were all accepted; [0] is 1


def acceptance(completions: Sequence[Completion], block_size: int) -> Evaluation:
    """Return the acceptance of finished speculative completions.

    A cycle that ends an answer counts with the tokens it kept, as in the reference loop. An answer of one token has
    no cycle and is left out of the averages; RunError if that leaves none.
    """
    cycles, tau, tau_pooled = averages(completions)
    if tau is None or tau_pooled is None:
        raise RunError("No prompt needed a draft cycle: every answer ended with its first token. Use other prompts.")
    accepted = [count for completion in completions for count in completion.accepted_drafts]
    return Evaluation(
        prompts=len(completions),
        cycles=cycles,
        tokens=sum(map(sum, (completion.acceptance_lengths for completion in completions))),
        tau=tau,
        tau_pooled=tau_pooled,
        per_slot_acceptance=tuple(fmean(count >= k for count in accepted) for k in range(block_size)),
    )


def averages(completions: Sequence[Completion]) -> tuple[int, float | None, float | None]:
    """Return the cycles and both acceptance lengths, the mean over requests and the pooled one; None without cycles."""
    cycled = [completion.acceptance_lengths for completion in completions if completion.acceptance_lengths]
    lengths = [length for cycles in cycled for length in cycles]
    return len(lengths), fmean(map(fmean, cycled)) if cycled else None, fmean(lengths) if lengths else None


def decode_all(completions: "Callable[[], Any]", count: int, progress: Callable[[int, int], None]) -> list[Completion]:
    """Run a decoding generator to its end and return its completions in prompt order."""
    done: dict[int, Completion] = {}
    for index, completion in completions():
        done[index] = completion
        progress(len(done), count)
    return [done[i] for i in range(count)]


def measure_speedup(
    target: Target,
    drafter: Drafter,
    ends: FrozenEnds,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """Return the speed of plain and of speculative decoding, one prompt at a time, and their ratio.

    Prompt passes are in both. The two take turns, so a machine that slows down slows both.
    """
    seconds, tokens = {"plain": 0.0, "speculative": 0.0}, {"plain": 0, "speculative": 0}
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "rows": 1, "sampling": sampling}
    for at, prompt in enumerate(prompts):
        for kind in seconds:
            began = time.perf_counter()
            if kind == "plain":
                finished = list(generate(target, [prompt], **how))
            else:
                finished = list(speculate(target, drafter, ends, [prompt], **how))
            seconds[kind] += time.perf_counter() - began
            tokens[kind] += len(finished[0][1].token_ids)
        progress(at + 1, len(prompts))
    plain, speculative = (seconds[kind] / tokens[kind] for kind in seconds)
    return {
        "plain_s_per_token": plain,
        "speculative_s_per_token": speculative,
        "plain_tokens_per_s": 1 / plain,
        "speculative_tokens_per_s": 1 / speculative,
        "speedup_vs_autoregressive": plain / speculative,
    }
