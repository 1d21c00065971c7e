"""The features of some prompts, captured as training does and as decoding does.

Shapes: T tokens of a prompt, D = m * H, R rows, S padded length.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.decode.prompts import pad_right, reach_for
from paceline.records import BlockSet, TokenBatch
from paceline.target.model import DecodingTarget, FeatureTarget


def training_features(target: FeatureTarget, some: Sequence[Sequence[int]]) -> list[Float[Tensor, "T D"]]:
    """Return each prompt's features as a training run captures them: together, padded, without cache."""
    ids_RS, _, _ = pad_right(some, torch.device("cpu"))
    lengths = tuple(map(len, some))
    places = [torch.arange(length) + row * ids_RS.shape[1] for row, length in enumerate(lengths)]
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none[None], none[None].bool())
    batch = TokenBatch(0, 0, 0, True, tuple(range(len(some))), ids_RS, lengths, torch.cat(places), blocks)
    return list(target.features(batch).split(list(lengths)))


def decoding_features(target: DecodingTarget, some: Sequence[Sequence[int]]) -> list[Float[Tensor, "T D"]]:
    """Return each prompt's features as decoding captures them: over a row cache."""
    features = []
    for ids in some:
        ids_RT, _, last_R = pad_right([ids], target.device)
        cache = target.new_cache(1, reach_for(len(ids)))
        _, tapped = target.prefill(ids_RT, last_R, cache, torch.zeros_like(last_R))
        assert tapped is not None, "a drafter has taps"
        features.append(tapped[0])
    return features
