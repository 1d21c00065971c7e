"""Attention of new tokens over a row cache, as a function that transformers' models call.

The query heads that share a key/value head are laid side by side as queries of that head. So keys and values are read
once and never expanded, and torch's fused kernels run although there is a mask.

Shapes: R rows, T new tokens of a row, S cache slots that are read, H query heads, M key/value heads, E head width,
V width of a value.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.drafter.ends import soft_cap
from paceline.records import UserError

NAME = "paceline_rows"
_UNKNOWN = ("position_bias",)  # what some models ask of an attention function


def row_attention(
    module: nn.Module,
    query: Float[Tensor, "R H T E"],
    key: Float[Tensor, "R M S E"],
    value: Float[Tensor, "R M S V"],
    attention_mask: Float[Tensor, "#R 1 T S"] | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "R T H V"], None]:
    """Return what each new token reads. `attention_mask` is added to the scores; without one a prompt reads itself.

    A sliding window is in the mask (see DecodingTarget). Scores are capped softly at `softcap`; `s_aux` are attention
    sinks, a score a head that takes its share of the softmax and gives nothing.

    Raises:
        UserError: the model asks for a kind of attention that this is not.
    """
    if wrong := [name for name in _UNKNOWN if asked.get(name) is not None]:
        raise UserError(
            f"Decoding knows full and sliding attention, but the target's {type(module).__name__} asks for "
            f"{', '.join(wrong)}. Use another target."
        )
    if softcap is not None or s_aux is not None:
        return _plainly(query, key, value, attention_mask, scaling, softcap, s_aux), None
    if attention_mask is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return attended, None
    rows, heads, new, width = query.shape
    groups = key.shape[1]
    folded = query.reshape(rows, groups, heads // groups * new, width)
    if new > 1:  # one token's mask is that of all its heads, and broadcasts
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    read = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return read.reshape(rows, heads, new, -1).transpose(1, 2).contiguous(), None


def _plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return what `row_attention` does, by the formula: no fused kernel caps scores or knows sinks."""
    rows, heads, new, width = query.shape
    groups = key.shape[1]
    if mask is None:
        mask = query.new_full((new, key.shape[2]), -torch.inf).triu(1)[None, None]
    apart = query.reshape(rows, groups, heads // groups, new, width)
    scores = apart @ key[:, :, None].transpose(-1, -2) * (width**-0.5 if scaling is None else scaling)
    scores = soft_cap(scores, softcap or 0.0) + mask[:, :, None]
    if sinks_H is not None:
        sinks = sinks_H.view(1, groups, -1, 1, 1).expand(rows, -1, -1, new, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=wide)[..., : key.shape[2]].to(value.dtype)
    read = shares @ value[:, :, None]
    return read.reshape(rows, heads, new, -1).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, row_attention)
