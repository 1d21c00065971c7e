"""The drafter as training runs it: the maths of `Drafter` for one group, in fewer and larger matrix products.

It holds no weights of its own: its leaves are given. Those that join several of the drafter's matrices have them row
under row (`leaf_names`), so a leaf's gradient is theirs, one after the other. What differs from `Drafter.forward`:
- Keys and values of the context and of the blocks are one product over the rows of both, and come out as attention
  wants them: nothing is put together afterwards, values are read where the product wrote them. The query stays apart,
  because context rows have none; a slice of one leaf of all three would give autograd a gradient padded with zeros.
- In the first layer all mask slots of all blocks have one input, so its norm, query, key and value are computed once,
  and once an anchor token. Only turning, which depends on the position, is done for every slot.
- In the last layer nobody reads slot 0 behind attention: it has no loss.
- Cosines and sines are given (`turns`), not worked out in every layer.

Shapes: C context slots, A anchors, B block slots, Q = A * B, K = C + Q keys, N = A * (B - 1) slots with a loss, U
distinct inputs of slots, D = m * H, H width, E head width, X any width.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.config import DrafterSettings
from paceline.drafter.attention import Visibility, attend
from paceline.drafter.model import rotary

Product = Callable[[Tensor, Tensor], Tensor]  # rows times a weight transposed, as F.linear
Halves = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # both halves of the product's columns
Turns = tuple[Float[Tensor, "K E"], Float[Tensor, "K E"]]

_LEAF_OF = {"k_proj": "kv_proj", "v_proj": "kv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
# Rows of the first layer are whole multiples of this, as products in fp8 need.
_ROWS = 16


def leaf_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return which of the drafter's parameters each leaf joins, row under row; most are alone."""
    joined: dict[str, tuple[str, ...]] = {}
    for name in names:
        *place, module, weight = name.split(".")
        leaf = ".".join([*place, _LEAF_OF.get(module, module), weight])
        joined[leaf] = (*joined.get(leaf, ()), name)
    return joined


def turns(positions_K: Int[Tensor, " K"], settings: DrafterSettings, dtype: torch.dtype) -> Turns:
    """Return cosine and sine of every key's rotary angles, context and then blocks, in float32 or wider.

    The sine's first half is negative, so turning x is x * cos + swapped(x) * sin with the halves of x swapped.
    """
    cos, sin = rotary(positions_K[None], settings.head_dim, settings.rope_theta, dtype)
    sin[..., : settings.head_dim // 2].neg_()
    return cos[0, 0], sin[0, 0]


def distinct_ids(token_A: Int[Tensor, " A"], mask_token_id: int) -> Int[Tensor, " U"]:
    """Return the tokens whose embeddings the twin reads: the anchors', then the mask token, to a whole multiple."""
    return F.pad(token_A, (0, distinct_rows(len(token_A)) - len(token_A)), value=mask_token_id)


def distinct_rows(anchors: int) -> int:
    """Return U: the anchors and at least one mask token, to a whole multiple."""
    return (anchors // _ROWS + 1) * _ROWS


def halves(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves of the product's columns."""
    first, second = F.linear(rows, weight).chunk(2, dim=-1)
    return first, second


class JoinedLayer(nn.Module):
    """The leaves of one layer."""

    def __init__(self, leaves: Mapping[str, nn.Parameter], prefix: str) -> None:
        super().__init__()
        self.input_layernorm = leaves[f"{prefix}.input_layernorm.weight"]
        self.q_proj = leaves[f"{prefix}.self_attn.q_proj.weight"]
        self.kv_proj = leaves[f"{prefix}.self_attn.kv_proj.weight"]
        self.o_proj = leaves[f"{prefix}.self_attn.o_proj.weight"]
        self.q_norm = leaves[f"{prefix}.self_attn.q_norm.weight"]
        self.k_norm = leaves[f"{prefix}.self_attn.k_norm.weight"]
        self.post_attention_layernorm = leaves[f"{prefix}.post_attention_layernorm.weight"]
        self.gate_up_proj = leaves[f"{prefix}.mlp.gate_up_proj.weight"]
        self.down_proj = leaves[f"{prefix}.mlp.down_proj.weight"]


class Joined(nn.Module):
    """The twin. `leaves` are named as `leaf_names` says; products are computed with `product` and `halves`."""

    def __init__(
        self,
        settings: DrafterSettings,
        leaves: Mapping[str, nn.Parameter],
        product: Product = F.linear,
        halves: Halves = halves,
    ) -> None:
        super().__init__()
        self.settings, self.product, self.halves = settings, product, halves
        self.fc, self.hidden_norm = leaves["fc.weight"], leaves["hidden_norm.weight"]
        self.layers = nn.ModuleList([JoinedLayer(leaves, f"layers.{at}") for at in range(settings.layers)])
        self.norm = leaves["norm.weight"]

    def forward(
        self,
        features_CD: Float[Tensor, "C D"],
        embeds_UH: Float[Tensor, "U H"],
        blocks: tuple[int, int],
        turns: Turns,
        visibility: Visibility,
    ) -> Float[Tensor, "N H"]:
        """Return the hidden states of the slots behind the anchors.

        `embeds_UH` are the embeddings of `distinct_ids`; `blocks` is (A, B).
        """
        context_CH, x = self.context(features_CD), embeds_UH
        for at, layer in enumerate(self.layers):
            assert isinstance(layer, JoinedLayer)
            first, last = at == 0, at == len(self.layers) - 1
            x = self.through(layer, context_CH, x, blocks, turns, visibility, first=first, last=last)
        return x

    def context(self, features_CD: Float[Tensor, "C D"]) -> Float[Tensor, "C H"]:
        """Return what every layer makes keys and values of."""
        return self._normed(self.product(features_CD, self.fc), self.hidden_norm)

    def through(
        self,
        layer: JoinedLayer,
        context_CH: Float[Tensor, "C H"],
        x: Float[Tensor, "_ H"],
        blocks: tuple[int, int],
        turns: Turns,
        visibility: Visibility,
        *,
        first: bool,
        last: bool,
    ) -> Float[Tensor, "_ H"]:
        """Return the residual stream of Q slots behind a layer.

        The `first` one reads the embeddings of the U distinct inputs, the others the stream of Q slots. What comes
        behind the `last` one are the hidden states of the N slots with a loss, normalised.
        """
        if first:
            # No gradient goes here. Chosen, not put together: the stream would then be kept for backward twice.
            A, slots_B = blocks[0], torch.arange(blocks[1], device=x.device)
            x_QH = torch.where(slots_B[:, None] == 0, x[:A, None], x[A]).flatten(0, 1)
            q, k, v = self._first(layer, context_CH, x, blocks)
        else:
            x_QH = x
            q, k, v = self._qkv(layer, context_CH, x_QH)
        out_QX = self._attended(q, k, v, turns, visibility)
        if last:
            out_QX, x_QH = (_behind_anchors(rows, *blocks) for rows in (out_QX, x_QH))
        x_QH = x_QH + self.product(out_QX, layer.o_proj)
        x_QH = x_QH + self._mlp(layer, x_QH)
        return self._normed(x_QH, self.norm) if last else x_QH

    def _qkv(self, layer: JoinedLayer, context_CH: Tensor, x_QH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries (Q, heads, E) and keys, and values (K, heads, E)."""
        # One tensor of both inputs, whose end the query's product reads.
        rows_KH = torch.cat([context_CH, self._normed(x_QH, layer.input_layernorm)])
        q_QNE = self._heads(self.product(rows_KH[len(context_CH) :], layer.q_proj))
        k_KME, v_KME = map(self._heads, self.halves(rows_KH, layer.kv_proj))
        return self._normed(q_QNE, layer.q_norm), self._normed(k_KME, layer.k_norm), v_KME

    def _first(
        self, layer: JoinedLayer, context_CH: Tensor, embeds_UH: Tensor, blocks: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `_qkv` does, computed once for each distinct input."""
        C = len(context_CH)
        q_UNE, k, v = self._qkv(layer, context_CH, embeds_UH)
        k_KME, v_KME = (torch.cat([rows[:C], _spread(rows[C:], *blocks)]) for rows in (k, v))
        return _spread(q_UNE, *blocks), k_KME, v_KME

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, turns: Turns, visibility: Visibility) -> Tensor:
        cos_K1E, sin_K1E = turns[0][:, None], turns[1][:, None]
        C = len(k) - len(q)
        q_QNE, k_KME = _turned(q, cos_K1E[C:], sin_K1E[C:]), _turned(k, cos_K1E, sin_K1E)
        # Heads stay the inner axis in memory, as the products write and read them.
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q_QNE, k_KME, v))
        out_1NQE = attend(q, k, v, visibility)
        return out_1NQE[0].transpose(0, 1).flatten(1)

    def _mlp(self, layer: JoinedLayer, x_QH: Tensor) -> Tensor:
        normed_QH = self._normed(x_QH, layer.post_attention_layernorm)
        gate, up = self.halves(normed_QH, layer.gate_up_proj)
        # Not kept for backward, where gate and up, which are, give it again for the price of writing it.
        gated = checkpoint(_gated, gate, up, use_reentrant=False, preserve_rng_state=False)
        return self.product(gated, layer.down_proj)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.settings.head_dim))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise in the weight's precision and come back to x's."""
        wide = x.to(weight.dtype)
        return F.rms_norm(wide, weight.shape, weight, self.settings.rms_norm_eps).to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _turned(x_KNE: Tensor, cos_K1E: Tensor, sin_K1E: Tensor) -> Tensor:
    # Written with flip, whose gradient is a flip: those of slices would be padded with zeros and added.
    swapped = x_KNE.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (x_KNE * cos_K1E + swapped * sin_K1E).to(x_KNE.dtype)


def _spread(rows_UX: Tensor, anchors: int, slots: int) -> Tensor:
    """Return a row for every slot: an anchor's own, then the mask token's, which stands behind the anchors'."""
    mask_AbX = rows_UX[anchors : anchors + 1, None].expand(anchors, slots - 1, *rows_UX.shape[1:])
    return torch.cat([rows_UX[:anchors, None], mask_AbX], dim=1).flatten(0, 1)


def _behind_anchors(rows_QX: Tensor, anchors: int, slots: int) -> Tensor:
    return rows_QX.unflatten(0, (anchors, slots))[:, 1:].flatten(0, 1)
