"""Attention of new tokens over a row cache, as a function that transformers' models call.

The query heads that share a key/value head are laid side by side as queries of that head. So keys and values are read
once and never expanded, and torch's fused kernels run although there is a mask.

Shapes: R rows, T new tokens of a row, S cache slots that are read, H query heads, M key/value heads, E head width.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.records import UserError

NAME = "paceline_rows"
_UNKNOWN = ("softcap", "s_aux", "sliding_window", "position_bias")  # what some models ask of an attention function


def row_attention(
    module: nn.Module,
    query: Float[Tensor, "R H T E"],
    key: Float[Tensor, "R M S E"],
    value: Float[Tensor, "R M S E"],
    attention_mask: Float[Tensor, "R 1 T S"] | None,
    scaling: float | None = None,
    **asked: Any,
) -> tuple[Float[Tensor, "R T H E"], None]:
    """Return what each new token reads. `attention_mask` is added to the scores; without one a prompt reads itself.

    Raises:
        UserError: the model asks for a kind of attention that this is not.
    """
    if wrong := [name for name in _UNKNOWN if asked.get(name) is not None]:
        raise UserError(
            f"Decoding knows plain full attention, but the target's {type(module).__name__} asks for "
            f"{', '.join(wrong)}. Use another target."
        )
    if attention_mask is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return attended, None
    rows, heads, new, width = query.shape
    groups = key.shape[1]
    folded = query.reshape(rows, groups, heads // groups * new, width)
    if new > 1:  # one token's mask is that of all its heads, and broadcasts
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    read = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return read.reshape(rows, heads, new, width).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, row_attention)
