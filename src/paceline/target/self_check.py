"""Whether a loaded target gives what it should, tried with a few tokens before it is used.

An architecture that nobody here has seen can differ in ways that no setting names. What is captured is held against
what transformers itself computes, and what samples give together against what each gives alone.

Shapes: T tokens, V vocabulary, D = m * H.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.records import BlockSet, TokenBatch, UserError
from paceline.target.conventions import BUILDING

if TYPE_CHECKING:
    from paceline.target.model import DecodingTarget, FeatureTarget

# Relative, by token, for the token in the middle: other kernels round differently and experts may be chosen otherwise,
# which strikes some tokens. A sample that sees another one is off by as much as it has.
_LIMIT = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_LIMIT = 0.25
# Between the fast path and the plain one, where nothing is chosen otherwise; in fp8 products are other ones.
_FAST_LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3}  # transformers' norms are float32 whatever the format
_FAST_LOW_PRECISION_LIMIT, _FP8_LIMIT = 0.1, 0.7
_LONG, _SHORT = 24, 5  # tokens of the two samples
_READ = 17  # tokens of the longer one that decoding reads as a prompt


@contextmanager
def _nobody_builds() -> Iterator[None]:
    """Roles load beside one another, and whoever builds switches the process's default dtype."""
    with BUILDING:
        yield


@_nobody_builds()
@torch.inference_mode()
def check_features(target: "FeatureTarget", name: str, *, packed: bool) -> None:
    """Hold captured features against transformers' own hidden states, and samples in a batch against each alone.

    `packed`: whether samples will share a row.

    Raises:
        UserError: they differ.
    """
    long, short = _samples(target.vocab_size)
    features_TD, hidden_TD = target.captured_and_listed(long)
    if features_TD.shape != hidden_TD.shape or not torch.equal(features_TD, hidden_TD):
        raise UserError(
            f"Features must be the hidden states that transformers lists for the tapped layers, and those of {name} "
            "are not: its layers give more or other things than hidden states. Use another target."
        )
    alone_TD = torch.cat([features_TD, target.read(_batch([short]))])
    ways = {"data.layout trimmed": False} | ({"data.layout packed": True} if packed else {})
    for what, in_one_row in ways.items():
        # Padding follows the shorter sample in a row of its own; in a shared row the longer one stands before it.
        together_TD = target.read(_batch([long, short], packed=in_one_row))
        if not _is_near(together_TD, alone_TD):
            raise UserError(
                f"A sample's features must be the same alone and in a batch ({what}), and those of {name} are not: "
                "its layers let tokens see what follows them, or samples one another. Use another layout or target."
            )


class Wanted:
    """What the plain path gives of two samples, to hold the fast one against."""

    def __init__(self, plain: Callable[[TokenBatch], Tensor], vocab_size: int) -> None:
        self._batch = _batch(_samples(vocab_size))
        with _nobody_builds():
            self._features_TD = plain(self._batch)

    def why_not(self, fast: Callable[[TokenBatch], Tensor], *, fp8: bool) -> str:
        """Return why features of the fast path are not the plain one's, as the end of a sentence; "" if they are."""
        with _nobody_builds():
            error_T = _errors(fast(self._batch), self._features_TD)
        limit = _FP8_LIMIT if fp8 else _FAST_LIMIT.get(self._features_TD.dtype, _FAST_LOW_PRECISION_LIMIT)
        worst = max(part.median().item() for part in (error_T[:_LONG], error_T[_LONG:]))
        if worst <= limit:
            return ""
        return f"its features differ from transformers' own by {worst:.2g} of their size, more than {limit:g}"


@_nobody_builds()
@torch.no_grad()
def plain_logits(model: Any) -> Float[Tensor, "T V"]:
    """Return what a transformers model says of the tokens that `check_decoding` asks for."""
    long, _ = _samples(model.config.get_text_config().vocab_size)
    return model(torch.tensor([long], device=model.device), use_cache=False).logits[0]


@_nobody_builds()
def check_decoding(target: "DecodingTarget", plain_TV: Float[Tensor, "T V"], name: str) -> None:
    """Hold the logits of a prompt and of a block behind it, read over the row cache, against a plain forward's.

    Raises:
        UserError: they differ.
    """
    ids_1T = torch.tensor([_samples(target.vocab_size)[0]], device=target.device)
    place_1T = torch.arange(_LONG, device=target.device)[None]
    cache = target.new_cache(1, _LONG)
    first = torch.zeros(1, dtype=torch.int64, device=target.device)
    prompt_1V, _ = target.prefill(ids_1T[:, :_READ], first + _READ - 1, cache, first)
    block_1TV, _ = target.forward(ids_1T[:, _READ:], place_1T[:, _READ:], cache, first_row=0, reach=_LONG)
    if not _is_near(torch.cat([prompt_1V, block_1TV[0]]), plain_TV[_READ - 1 :]):
        raise UserError(
            f"Decoding must give the logits that transformers gives, and for {name} it does not: its attention or "
            "its head does what decoding here does not know. Let a server decode (--server), or use another target."
        )


def _samples(vocab_size: int) -> tuple[list[int], list[int]]:
    ids = [(7 + 7919 * place) % vocab_size for place in range(_LONG + _SHORT)]
    return ids[:_LONG], ids[_LONG:]


def _batch(samples: Sequence[Sequence[int]], *, packed: bool = False) -> TokenBatch:
    """Return what a target reads of some samples: a row each, padded on the right, or all in one row."""
    lengths = tuple(map(len, samples))
    if packed:
        ids = torch.tensor([[one for sample in samples for one in sample]])
        places = torch.arange(sum(lengths))
    else:
        width = max(lengths)
        ids = torch.tensor([[*sample, *[0] * (width - len(sample))] for sample in samples])
        places = torch.cat([torch.arange(length) + row * width for row, length in enumerate(lengths)])
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none[None], none[None].bool())
    return TokenBatch(0, 0, 0, True, tuple(range(len(samples))), ids, lengths, places, blocks)


def _is_near(found_TX: Tensor, wanted_TX: Tensor) -> bool:
    """Compare by token; of tokens that stand behind one another in a sample the middle one counts."""
    error_T = _errors(found_TX, wanted_TX)
    limit = _LIMIT.get(found_TX.dtype, _LOW_PRECISION_LIMIT)
    parts = [error_T[:-_SHORT], error_T[-_SHORT:]]
    return all(bool(part.median() <= limit) for part in parts)


def _errors(found_TX: Tensor, wanted_TX: Tensor) -> Tensor:
    """Return how far off each token is, as a share of its size."""
    return (found_TX - wanted_TX).float().norm(dim=-1) / wanted_TX.float().norm(dim=-1).clamp_min(1e-30)
