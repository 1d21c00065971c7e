"""Block geometry, written once: anchors, labels, positions, visibility and weights, for training and decoding.

A block is an anchor token (slot 0) and B-1 mask tokens. Slot k predicts the token AT position anchor + k; slot 0 is
known and has no loss. A block reads the target's features strictly before its anchor and every slot of itself, and
nothing else (arXiv 2602.06036). Everything here is a pure function.

Shapes: G groups with a context of their own (1 in training, rows in decoding), A blocks of a group, B slots of a
block, C context slots, S tokens of a sample, T of samples end to end, n anchor candidates.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def default_gamma(block_size: int) -> float:
    """Return the decay constant of the slot weights: the paper's 4, 5, 7 for blocks of 8, 10, 16, linear between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float) -> Float[Tensor, " B"]:
    """Return the loss weight of each slot in float64: 0 for the anchor, then exp(-(k-1)/gamma)."""
    slots_B = torch.arange(block_size, dtype=torch.float64)
    return torch.where(slots_B > 0, torch.exp(-(slots_B - 1) / gamma), 0.0)


def anchor_candidates(loss_mask_S: Bool[np.ndarray, " S"]) -> Int[np.ndarray, " n"]:
    """Return the positions that may be anchors: supervised tokens followed by a supervised token.

    The first of them is the first token of an answer, which is also the first anchor in decoding.
    """
    return np.flatnonzero(loss_mask_S[:-1] & loss_mask_S[1:])


def sample_anchors(
    candidates_n: Int[np.ndarray, " n"], count: int, *, seed: int, epoch: int, sample: int
) -> Int[np.ndarray, " k"]:
    """Return min(count, n) of the candidates, which ascend, drawn without replacement and ascending as well.

    The draw is a function of (seed, epoch, sample) alone: batches, layouts and replicas do not change it. Only raw
    words of the counter-based Philox generator are used, whose stream is fixed for good, unlike `choice`.
    """
    if len(candidates_n) <= count:
        return candidates_n.copy()
    words_n = np.random.Philox(key=[seed, sample], counter=[0, 0, 0, epoch]).random_raw(len(candidates_n))
    drawn_n = words_n <= np.partition(words_n, count - 1)[count - 1]  # the `count` smallest, without sorting
    if np.count_nonzero(drawn_n) > count:  # equal words: the first ones
        drawn_n[np.argsort(words_n, kind="stable")[count:]] = False
    return candidates_n[drawn_n]


def context_positions(lengths: Sequence[int]) -> Int[Tensor, " T"]:
    """Return each token's rotary position for samples laid end to end: counted from its sample's start."""
    return torch.cat([torch.arange(length) for length in lengths])


def block_labels(
    ids_T: Int[np.ndarray, " T"],
    loss_mask_T: Bool[np.ndarray, " T"],
    anchors_A: Int[np.ndarray, " A"],
    ends_A: Int[np.ndarray, " A"],
    block_size: int,
) -> tuple[Int[np.ndarray, "A B"], Bool[np.ndarray, "A B"]]:
    """Return each slot's label, the token at anchor + slot, and whether the slot has a loss (label 0 where not).

    Samples lie end to end; `ends_A` is where the sample of each anchor ends, and no label lies behind it.
    """
    place_AB = anchors_A[:, None] + np.arange(block_size)
    valid_AB = place_AB < ends_A[:, None]
    np.minimum(place_AB, len(ids_T) - 1, out=place_AB)
    valid_AB &= loss_mask_T[place_AB]
    valid_AB[:, 0] = False
    return ids_T[place_AB] * valid_AB, valid_AB


def block_ids(anchor_ids_A: Int[Tensor, "*A"], mask_token_id: int, block_size: int) -> Int[Tensor, "*A B"]:
    """Return the drafter's input tokens: the anchor, then mask tokens."""
    ids_AB = anchor_ids_A.new_full((*anchor_ids_A.shape, block_size), mask_token_id)
    ids_AB[..., 0] = anchor_ids_A
    return ids_AB


def block_positions(anchor_positions_A: Int[Tensor, "*A"], block_size: int) -> Int[Tensor, "*A B"]:
    """Return each slot's rotary position: anchor + slot."""
    return anchor_positions_A[..., None] + torch.arange(block_size, device=anchor_positions_A.device)


def block_mask(
    start_GA: Int[Tensor, "G A"], anchor_GA: Int[Tensor, "G A"], present_GAB: Bool[Tensor, "G A B"], context_slots: int
) -> Bool[Tensor, "G AB CAB"]:
    """Return who sees whom, dense: queries are all slots of a group's blocks, keys its context and then these slots.

    A query of a block sees context slots `start <= slot < anchor` and the present slots of its own block. Slot 0 of
    every block must be present, so no row is empty.
    """
    G, A, B = present_GAB.shape
    slots_C = torch.arange(context_slots, device=start_GA.device)
    context_GAC = (slots_C >= start_GA[..., None]) & (slots_C < anchor_GA[..., None])
    context_GQC = context_GAC[:, :, None].expand(G, A, B, context_slots).reshape(G, A * B, context_slots)
    own_AA = torch.eye(A, dtype=torch.bool, device=start_GA.device)
    own_GAAB = own_AA[None, :, :, None] & present_GAB[:, None]
    own_GQK = own_GAAB[:, :, None].expand(G, A, B, A, B).reshape(G, A * B, A * B)
    return torch.cat([context_GQC, own_GQK], dim=-1)


def block_tiles(
    start_A: Int[Tensor, " A"], anchor_A: Int[Tensor, " A"], context_slots: int, block_size: int, tile: int
) -> tuple[Bool[Tensor, "rows columns"], Bool[Tensor, "rows columns"]]:
    """Return which tiles of `block_mask` (one group) hold something, and which of those hold everything.

    A tile is `tile` queries by `tile` keys. It must hold whole blocks, and context and block slots must be whole tiles.
    Built from the blocks' intervals, never from the dense mask, so it takes no more than the tiles themselves.
    """
    per_tile = tile // block_size
    start_RI, anchor_RI = start_A.view(-1, 1, per_tile), anchor_A.view(-1, 1, per_tile)
    low_C1 = torch.arange(0, context_slots, tile, device=start_A.device)[:, None]
    touched = (start_RI < low_C1 + tile) & (anchor_RI > low_C1) & (start_RI < anchor_RI)
    covered = (start_RI <= low_C1) & (anchor_RI >= low_C1 + tile)
    rows = len(start_RI)
    own = torch.eye(rows, dtype=torch.bool, device=start_A.device)
    some = torch.cat([touched.any(-1), own], dim=1)
    # A tile of own slots holds several blocks, which do not see each other: full only if it is a single block.
    whole = torch.cat([covered.all(-1), own & (per_tile == 1)], dim=1)
    return some, whole


def leading_matches(matches_K: Bool[Tensor, "*A K"]) -> Int[Tensor, "*A"]:
    """Return how many of the drafted slots are right before the first wrong one."""
    return matches_K.long().cumprod(-1).sum(-1)
