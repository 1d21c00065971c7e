"""Whether speculative decoding gave the target's own output, and how near the tie was where it did not.

Verifying reads a block at once and plain decoding a token, by other kernels. In float32 both choose the same tokens
unless two logits are equal within rounding. In bfloat16 rounding is coarse, so outputs part at near ties, and from
there on they are different texts: only a prompt's first difference says something. There the target reads the common
beginning once more, plainly, in the same number format, and the gap between the logits of the two tokens is held
against the format's rounding.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.decode.prompts import pad_right, reach_for
from paceline.decode.protocol import Target
from paceline.records import Completion

# Of the largest logit's size, in units of the format's last place. One unit is what storing the logits alone loses; the
# layers before lose more. float32 must agree.
NEAR_TIE_UNITS = {torch.float32: 0, torch.bfloat16: 4}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which a prompt's two decodings differ."""

    prompt: int
    place: int  # of the token in the answer
    gap: float | None  # between the two tokens' logits; None: one answer ends where the other goes on
    bound: float  # up to which it is a near tie

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it; in float32 nothing does, not even two logits that are equal."""
        return self.gap is not None and self.gap <= self.bound and self.bound > 0


def differences(
    target: Target,
    plain: Sequence[Completion],
    speculative: Sequence[Completion],
    on_examined: Callable[[int], object] = lambda done: None,
) -> list[Difference]:
    """Return the first difference of each prompt that has one."""
    found = []
    for prompt, (one, other) in enumerate(zip(plain, speculative, strict=True)):
        place = first_place(one.token_ids, other.token_ids)
        if place is not None:
            found.append(_examined(target, prompt, place, one, other))
            on_examined(len(found))
    return found


def first_place(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place in which two answers differ; behind the shorter one if it is the other's beginning."""
    pairs = zip(one, other, strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return None if len(one) == len(other) == place else place


def _examined(target: Target, prompt: int, place: int, one: Completion, other: Completion) -> Difference:
    if place in (len(one.token_ids), len(other.token_ids)):
        return Difference(prompt, place, None, 0.0)
    logits_V = next_logits(target, (*one.prompt_ids, *one.token_ids[:place]))
    gap = (logits_V[one.token_ids[place]] - logits_V[other.token_ids[place]]).abs().item()
    return Difference(prompt, place, gap, near_tie_bound(logits_V))


def next_logits(target: Target, ids: Sequence[int]) -> Float[Tensor, " V"]:
    """Return what the target plainly thinks of the token behind `ids`, in its own number format."""
    ids_RT, _, last_R = pad_right([ids], target.device)
    logits_RV, _ = target.prefill(ids_RT, last_R, target.new_cache(1, reach_for(len(ids))), torch.zeros_like(last_R))
    return logits_RV[0]


def near_tie_bound(logits_V: Float[Tensor, " V"]) -> float:
    """Return the gap up to which two logits count as equal within rounding."""
    largest = logits_V.abs().max().float()
    unit = torch.finfo(logits_V.dtype).eps * 2.0 ** torch.floor(torch.log2(largest)).item()
    return NEAR_TIE_UNITS[logits_V.dtype] * unit
