"""How the rows of an engine advance: by a token, or by what the target agrees to of a drafted block.

Both read prompts and do one unit of work for the leading rows over buffers that stay where they are: nothing in a unit
waits for the device or needs the host, so a graph of it is the unit itself. The engine decides which rows there are.

Sampled drafts are exact without a rule of their own. The drafter proposes its best token, so its proposal is a single
point, and rejection sampling against a point is this: draw from the target at every slot, keep drafts as long as they
are what was drawn, then take the first draw that differs. A draw follows from seed, request and place alone, so what
comes out is the text of plain decoding, token for token, wherever the target's logits are the same.

Shapes: W leading rows, N entering rows, T padded prompt length, B block slots, K = B - 1 drafted ones, V vocabulary,
D = m * H.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline import blocks
from paceline.decode.draft import DraftSession
from paceline.decode.protocol import Target
from paceline.decode.rows import Rows
from paceline.decode.sampling import Sampling, choose
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import UserError


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Who proposes blocks: a drafter and its target's embedding and head."""

    drafter: Drafter
    ends: FrozenEnds


class Step(Protocol):
    """What an engine asks of either way."""

    most: int  # tokens that a row may gain

    def read(self, ids_NT: Tensor, last_N: Tensor, rows_N: Tensor) -> Tensor:
        """Read right-padded prompts into rows; return the logits at each one's last token."""

    def advance(self, width: int, reach: int) -> None:
        """Advance the leading rows, of which the first `reach` slots are read at most."""

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy what is cached of rows onto other rows."""


class PlainStep:
    """A token a row, from the target alone."""

    most = 1

    def __init__(self, target: Target, sampling: Sampling, rows: Rows) -> None:
        self._target, self._sampling, self._rows = target, sampling, rows
        self._cache: Any = target.new_cache(*rows.ids_RS.shape)

    def read(self, ids_NT: Tensor, last_N: Tensor, rows_N: Tensor) -> Float[Tensor, "N V"]:
        """Read prompts; see Step."""
        return self._target.prefill(ids_NT, last_N, self._cache, rows_N)[0]

    @torch.no_grad()
    def advance(self, width: int, reach: int) -> None:
        """Append each row's next token."""
        rows = self._rows
        place_W = rows.place_R[:width]
        logits_W1V, _ = self._target.forward(
            rows.newest(width)[:, None], place_W[:, None], self._cache, first_row=0, reach=reach
        )
        rows.advance(choose(logits_W1V[:, 0], self._sampling, rows.noise_R[:width], place_W + 1)[:, None])

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows; see Step."""
        self._cache.move(sources, destinations)


class DraftStep:
    """A cycle: draft a block, verify it with the target in one forward, keep what the target agrees to.

    A row gains the accepted drafts and the target's own next token (bonus). When a block is drafted, the drafter's
    context covers exactly the positions before the anchor, which is the row's newest token. Near a row's last place
    the block shrinks to the room that is left, as in the reference loop.
    """

    def __init__(self, target: Target, drafts: Drafts, sampling: Sampling, rows: Rows) -> None:
        """Prepare both caches.

        Raises:
            UserError: the drafter drafts nothing, or is not this target's.
        """
        check_drafts(drafts, target)
        self._target, self._sampling, self._rows = target, sampling, rows
        self._cache: Any = target.new_cache(*rows.ids_RS.shape)
        self._drafts = DraftSession(drafts.drafter, drafts.ends, *rows.ids_RS.shape)
        self.most = drafts.drafter.settings.block_size

    def read(self, ids_NT: Tensor, last_N: Tensor, rows_N: Tensor) -> Float[Tensor, "N V"]:
        """Read prompts, the drafter their features; see Step.

        Raises:
            UserError: the target taps other layers than the drafter reads.
        """
        logits_NV, features_NTD = self._target.prefill(ids_NT, last_N, self._cache, rows_N)
        wanted = self._drafts.drafter.fc.in_features
        found = 0 if features_NTD is None else features_NTD.shape[-1]
        if features_NTD is None or found != wanted:
            raise UserError(
                f"A drafter must read what its target's tapped layers give, got features of width {found} where "
                f"{wanted} are read (drafter.taps). Load the target with the drafter's taps."
            )
        self._drafts.extend(features_NTD, torch.arange(ids_NT.shape[1], device=ids_NT.device).expand_as(ids_NT), rows_N)
        return logits_NV

    @torch.no_grad()
    def advance(self, width: int, reach: int) -> None:
        """Make a cycle."""
        rows, B = self._rows, self.most
        anchor_W, anchor_id_W = rows.place_R[:width], rows.newest(width)
        size_W = (1 + rows.end_R[:width] - anchor_W).clamp(max=B)
        drafted_WK = self._drafts.propose(anchor_id_W, anchor_W, size_W, reach)
        positions_WB = blocks.block_positions(anchor_W, B)
        block_WB = torch.cat([anchor_id_W[:, None], drafted_WK], dim=1)
        logits_WBV, features_WBD = self._target.forward(block_WB, positions_WB, self._cache, first_row=0, reach=reach)
        choice_WB = self._choose(logits_WBV, rows.noise_R[:width], positions_WB + 1)
        accepted_W = _accepted(drafted_WK, choice_WB, size_W)
        assert features_WBD is not None  # `read` has seen that there are
        self._drafts.extend(features_WBD, positions_WB)
        rows.note_cycle(accepted_W)
        rows.advance(choice_WB, 1 + accepted_W)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows; see Step."""
        self._cache.move(sources, destinations)
        self._drafts.move(sources, destinations)

    def _choose(self, logits_WBV: Tensor, noise_W: Tensor, places_WB: Tensor) -> Int[Tensor, "W B"]:
        """Return the target's choice after every slot: the token for the next one."""
        noise_WB = noise_W[:, None].expand_as(places_WB)
        return choose(logits_WBV.flatten(0, 1), self._sampling, noise_WB.flatten(), places_WB.flatten()).view_as(
            places_WB
        )


def _accepted(
    drafted_WK: Int[Tensor, "W K"], choice_WB: Int[Tensor, "W B"], size_W: Int[Tensor, " W"]
) -> Int[Tensor, " W"]:
    """Return how many leading drafts of each block are the target's choice; none behind the block's size."""
    slot_K = torch.arange(1, 1 + drafted_WK.shape[1], device=drafted_WK.device)
    return blocks.leading_matches((drafted_WK == choice_WB[:, :-1]) & (slot_K < size_W[:, None]))


def check_drafts(drafts: Drafts, target: Target) -> None:
    """Refuse a drafter that cannot draft for a target.

    Raises:
        UserError: its blocks hold no drafts, its width or mask token is not the target's, or its ends are another's.
    """
    shape, width = drafts.drafter.settings, drafts.drafter.hidden_size
    vocab, ends_width = drafts.ends.embed_VH.shape
    if shape.block_size < 2:
        raise UserError(
            f"A drafter's block_size must be at least 2, an anchor and a draft, got {shape.block_size}: it drafts "
            "nothing. Decode plainly or use another drafter."
        )
    if width != ends_width:
        raise UserError(
            f"A drafter must have its target's width, got hidden_size {width} where the target has {ends_width}: it "
            "was trained for another target. Use the target it was trained for."
        )
    if not shape.mask_token_id < min(vocab, target.vocab_size):
        raise UserError(
            f"drafter.mask_token_id must be a row of the target's embedding, got {shape.mask_token_id} of {vocab} "
            "rows: the drafter was trained for another target. Use the target it was trained for."
        )
