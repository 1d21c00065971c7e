"""The drafter in decoding: one block a row, over a cached context that grows with the accepted tokens.

Shapes: R rows, T new context tokens of a row, C context slots, B block slots, M key/value heads, E head width.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline import blocks
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import ContextKV, Drafter
from paceline.runtime.linear import product, twin, use_onednn


class DraftSession:
    """A drafter with the context of some rows: their keys and values in every layer, written in place."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, rows: int, slots: int) -> None:
        self.drafter, self.ends, self.slots = twin(drafter), ends, slots  # what is given may be trained further
        use_onednn(self.drafter)
        shape, weight = drafter.settings, drafter.fc.weight
        size = (shape.layers, 2, rows, shape.kv_heads, slots, shape.head_dim)
        self._store = torch.zeros(size, dtype=weight.dtype, device=weight.device)

    @torch.no_grad()
    def extend(
        self,
        features_RTD: Float[Tensor, "R T D"],
        positions_RT: Int[Tensor, "R T"],
        rows_R: Int[Tensor, " R"] | None = None,
    ) -> None:
        """Add context tokens of some rows (the leading ones) at their positions. Tokens behind a row's end may be
        wrong: they are not read before they are written again."""
        if rows_R is None:
            rows_R = torch.arange(len(positions_RT), device=positions_RT.device)
        context = self.drafter.context(features_RTD.to(self._store.dtype), positions_RT)
        for layer, keys_values in enumerate(context):
            for kind, states_RMTE in enumerate(keys_values):
                self._store[layer, kind][rows_R[:, None], :, positions_RT] = states_RMTE.transpose(1, 2)

    @torch.no_grad()
    def propose(
        self, anchor_ids_R: Int[Tensor, " R"], anchors_R: Int[Tensor, " R"], sizes_R: Int[Tensor, " R"], reach: int
    ) -> Int[Tensor, "R K"]:
        """Return the drafter's best tokens for slots 1..B-1 of a block at each row's anchor position.

        A row reads context slots before its anchor, the first `reach` at most, and the first `sizes` slots of its
        block; what it proposes behind those is to be ignored.
        """
        hidden_RBH = self.hidden(anchor_ids_R, anchors_R, sizes_R, reach)
        head_VH = self.ends.head_VH
        # Flat, so that all rows are one product: torch makes one a row of what does not lie in one piece.
        drafted_KH = hidden_RBH[:, 1:].flatten(0, 1).to(head_VH.dtype)
        return product(drafted_KH, head_VH).argmax(-1).view(len(hidden_RBH), -1)

    def hidden(self, anchor_ids_R: Tensor, anchors_R: Tensor, sizes_R: Tensor, reach: int) -> Float[Tensor, "R B H"]:
        """Return the block's hidden states; arguments as in `propose`."""
        B = self.drafter.settings.block_size
        ids_RB = blocks.block_ids(anchor_ids_R, self.drafter.settings.mask_token_id, B)
        present_RB = torch.arange(B, device=ids_RB.device) < sizes_R[:, None]
        reach = min(reach, self.slots)
        start_R1, anchor_R1 = torch.zeros_like(anchors_R)[:, None], anchors_R[:, None]
        seen = Dense(blocks.block_mask(start_R1, anchor_R1, present_RB[:, None], reach))
        embeds_RBH = self.ends.embed(ids_RB).to(self._store.dtype)
        return self.drafter(embeds_RBH, blocks.block_positions(anchors_R, B), self._context(len(ids_RB), reach), seen)

    def _context(self, rows: int, reach: int) -> list[ContextKV]:
        return [(layer[0, :rows, :, :reach], layer[1, :rows, :, :reach]) for layer in self._store]

    @torch.no_grad()
    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows' contexts onto other rows."""
        at = torch.tensor([sources, destinations], device=self._store.device)
        self._store[:, :, at[1]] = self._store[:, :, at[0]]
