"""How the next token is chosen: greedy, or drawn with temperature, top-k and top-p.

The draw is one number in [0, 1) that follows from (seed, request, place of the token) alone: it does not depend on
which rows run together, their order, the replica or a restart. What can still differ is the logits themselves, whose
last bits depend on the shapes of matrix products (number of rows, padding of the prompt, slots that are read): where
two tokens are equal within rounding, greedy or at the edge of a draw, another batch may choose the other.

Shapes: R rows, V vocabulary, K tokens of top-k.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.records import UserError

# Settings of generation_config.json that change what is drawn and that are not followed here, with their idle values.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
    "num_beams": (None, 1),
    "stop_strings": (None,),
}
_MOST_SCORES = 2**26  # drawn from at once: some six times as many float32 numbers exist meanwhile


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. temperature 0: the most likely one; top_k 0 and top_p 1: all tokens can be drawn."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            UserError: a setting is out of its range.
        """
        for name, right, rule in (
            ("temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 100, "be 0 (greedy) or 0.001..100"),
            ("top_k", self.top_k >= 0, "be at least 0 (0: all tokens)"),
            ("top_p", 0 < self.top_p <= 1, "lie above 0 and up to 1 (1: all tokens)"),
            ("seed", 0 <= self.seed < 2**63, "lie in 0..2^63 - 1"),
        ):
            if not right:
                raise UserError(f"Sampling setting {name} must {rule}, got {getattr(self, name)}.")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


GREEDY = Sampling()


def sampling_of(folder: Path, **explicit: Any) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling that a model's generation_config.json asks for, with explicit settings that are not None put
    in its place, and what the file sets besides that is not followed here, as `name=value`.

    Defaults are transformers': greedy unless do_sample is set, and then temperature 1 and top_k 50. An explicit
    temperature alone turns sampling on.

    Raises:
        UserError: a setting is out of its range or the file cannot be read.
    """
    from transformers import GenerationConfig

    asked = {}
    if (folder / "generation_config.json").is_file():
        try:
            asked = GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{folder / 'generation_config.json'} cannot be read: {reason}") from None
    given = {name: value for name, value in explicit.items() if value is not None}
    if given["temperature"] != 0 if "temperature" in given else asked.get("do_sample"):
        defaults: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
        own = Sampling(**{name: idle if asked.get(name) is None else asked[name] for name, idle in defaults.items()})
    elif idle := [name for name in ("top_k", "top_p") if name in given]:
        raise UserError(f"Sampling setting {idle[0]} says nothing where nothing is drawn. Set a temperature above 0.")
    else:
        own = Sampling()
    ignored = tuple(f"{n}={asked[n]}" for n, idle in _NOT_FOLLOWED.items() if n in asked and asked[n] not in idle)
    return replace(own, **given), ignored


def noise_key(seed: int, key: int | str, copy: int) -> int:
    """Return the number from which all draws of one completion follow, in the range of int64."""
    digest = hashlib.blake2b(repr((seed, key, copy)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def choose(
    logits_RV: Float[Tensor, "R V"], sampling: Sampling, noise_R: Int[Tensor, " R"], places_R: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Return each row's next token, which will stand at `places`; does not wait for the device."""
    if sampling.greedy:
        return logits_RV.argmax(-1)
    rows = max(1, _MOST_SCORES // logits_RV.shape[-1])
    parts = zip(logits_RV.split(rows), noise_R.split(rows), places_R.split(rows), strict=True)
    return torch.cat([_draw(logits, sampling, noise, places) for logits, noise, places in parts])


def _draw(logits_RV: Tensor, sampling: Sampling, noise_R: Tensor, places_R: Tensor) -> Tensor:
    kept_RV = keep(logits_RV.float() / sampling.temperature, sampling.top_k, sampling.top_p)
    shares_RV = kept_RV.softmax(-1)
    sums_RV = shares_RV.cumsum(-1)
    drawn_R1 = (uniform(noise_R, places_R) * sums_RV[:, -1])[:, None]
    # The first token that can be drawn and whose sum is above: sums in parallel may waver in their last bit, and then
    # the first of all would now and then be one that must not be drawn.
    above_RV = (sums_RV > drawn_R1) & (shares_RV > 0)
    found_R, first_R = above_RV.to(torch.uint8).max(-1)
    return torch.where(found_R > 0, first_R, kept_RV.argmax(-1))


def keep(scores_RV: Float[Tensor, "R V"], top_k: int, top_p: float) -> Float[Tensor, "R V"]:
    """Return scores with -inf at tokens outside top-k and, among what is left, outside top-p; equals stay together.

    As transformers has it: top-p keeps the likeliest tokens up to the one with which their sum reaches top_p.
    """
    vocab = scores_RV.shape[-1]
    best_RK = None
    if 0 < top_k < vocab:
        best_RK = scores_RV.topk(top_k, dim=-1).values
        scores_RV = scores_RV.masked_fill(scores_RV < best_RK[:, -1:], -torch.inf)
    if top_p < 1:
        if best_RK is None:
            best_RK = scores_RV.sort(dim=-1, descending=True).values
        shares_RK = (best_RK - scores_RV.logsumexp(-1, keepdim=True)).exp()
        before_RK = shares_RK.cumsum(-1) - shares_RK
        least_R1 = best_RK.masked_fill(before_RK >= top_p, torch.inf).amin(-1, keepdim=True)
        scores_RV = scores_RV.masked_fill(scores_RV < least_R1, -torch.inf)
    return scores_RV


def uniform(noise_R: Int[Tensor, " R"], places_R: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Return numbers in [0, 1), SplitMix64's at `places` of the streams that start at `noise`."""
    mixed = noise_R + places_R * _signed(0x9E3779B97F4A7C15)  # int64 wraps around
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 40).float() * 2.0**-24


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch fills with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
