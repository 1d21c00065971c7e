"""The Triton kernels of `block_attention`: forward, gradients of queries and own keys, gradients of the context's keys.

Rows of a tile are row = query * R + head, R heads that share a key/value head; a program works for one of these. Scores
are kept in units of log2, so that exponentials are exp2. Only tiles outside of a run's inner part are masked.

Pointers are named by what they point to; a stride by its tensor and what it steps over. Suffixes of tiles: R rows, K
keys, E head width.
"""

import math
import threading
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.drafter.block_attention import Tiles

# Ranks are threads of a process: whoever comes second finds the kernel compiled.
_launching = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What both kernels of backward read."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor  # sum of grad * out of each row; the first kernel fills it in
    start: Tensor
    anchor: Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    anchor: Tensor,
    runs: Tensor,
    tiles: Tiles,
) -> None:
    """Fill in the output and each row's log2-sum-exp2."""
    strides = (*q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3], *out.stride()[1:3])
    _launch(_forward, (q, k, v, out, lse, start, anchor, runs, *strides), q, k, len(start), len(runs), tiles)


def backward_queries(given: Given, dq: Tensor, dk: Tensor, dv: Tensor, runs: Tensor, tiles: Tiles) -> None:
    """Fill in all of dq, the blocks' own dk and dv, and delta."""
    g = given
    tensors = (g.q, g.k, g.v, g.grad, g.out, dq, dk, dv)
    strides = [step for tensor in tensors for step in tensor.stride()[1:3]]
    arguments = (*tensors, g.lse, g.delta, g.start, g.anchor, runs, *strides)
    _launch(_backward_queries, arguments, g.q, g.k, len(g.start), len(runs), tiles)


def backward_context(given: Given, dk: Tensor, dv: Tensor, runs: Tensor, tiles: Tiles) -> None:
    """Fill in the context's dk and dv."""
    g = given
    tensors = (g.q, g.k, g.v, g.grad, dk, dv)
    strides = [step for tensor in tensors for step in tensor.stride()[1:3]]
    arguments = (*tensors, g.lse, g.delta, g.start, g.anchor, runs, *strides)
    _launch(_backward_context, arguments, g.q, g.k, len(g.start), len(runs), tiles)


def _launch(
    kernel: Any, arguments: tuple[Any, ...], q: Tensor, k: Tensor, block_count: int, programs: int, tiles: Tiles
) -> None:
    heads, queries, width = q.shape[1:]
    kv_heads = k.shape[1]
    scale = 1 / math.sqrt(width)
    with _launching, torch.cuda.device_of(q):
        kernel[(programs * kv_heads,)](
            *arguments,
            k.shape[2] - queries,
            queries,
            scale,
            scale / math.log(2),
            KV_HEADS=kv_heads,
            SHARING=heads // kv_heads,
            SLOTS=queries // block_count,
            WIDTH=width,
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


@no_type_check
@triton.jit
def _attend(
    state_acc, state_peak, state_sum,
    q_RE, k, v, k_slot, v_slot, low_R, high_R, count, first, left, inner_behind, scale2,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with `count` tiles of keys: those from `first`, and after `left` of them those from `inner_behind`."""
    acc_RE, peak_R, sum_R = state_acc, state_peak, state_sum
    place_K = tl.arange(0, KEYS)
    place_E = tl.arange(0, WIDTH)
    for step in range(count):
        tile = first + step
        if MASKED:
            tile = tl.where(step < left, tile, inner_behind + step - left)
        key_K = tile * KEYS + place_K
        k_KE = tl.load(k + key_K[:, None] * k_slot + place_E[None, :])
        v_KE = tl.load(v + key_K[:, None] * v_slot + place_E[None, :])
        score_RK = tl.dot(q_RE, tl.trans(k_KE))
        if MASKED:
            seen_RK = (key_K[None, :] >= low_R[:, None]) & (key_K[None, :] < high_R[:, None])
            score_RK = tl.where(seen_RK, score_RK, float("-inf"))
        # Every row has seen its own block, so its peak is finite.
        new_peak_R = tl.maximum(peak_R, tl.max(score_RK, 1) * scale2)
        p_RK = tl.exp2(score_RK * scale2 - new_peak_R[:, None])
        shrink_R = tl.exp2(peak_R - new_peak_R)
        sum_R = sum_R * shrink_R + tl.sum(p_RK, 1)
        acc_RE = acc_RE * shrink_R[:, None]
        acc_RE = tl.dot(p_RK.to(v_KE.dtype), v_KE, acc_RE)
        peak_R = new_peak_R
    return acc_RE, peak_R, sum_R


@no_type_check
@triton.jit
def _forward(
    q, k, v, out, lse, start, anchor, runs,
    q_head, q_slot, k_head, k_slot, v_head, v_slot, out_head, out_slot,
    context, queries, scale, scale2,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    run = runs + tl.program_id(0) // KV_HEADS * 5
    tile = tl.load(run)
    OWN: tl.constexpr = ROWS // SHARING
    row_R = tl.arange(0, ROWS)
    place_E = tl.arange(0, WIDTH)
    query_R = tile * OWN + row_R // SHARING
    head_R = head * SHARING + row_R % SHARING
    q_RE = tl.load(q + (head_R * q_head + query_R * q_slot)[:, None] + place_E[None, :])
    k += head * k_head
    v += head * v_head

    # The own blocks' slots, which no other tile of rows sees.
    place_K = tl.arange(0, OWN)
    own_K = context + tile * OWN + place_K
    k_KE = tl.load(k + own_K[:, None] * k_slot + place_E[None, :])
    v_KE = tl.load(v + own_K[:, None] * v_slot + place_E[None, :])
    same_RK = (row_R // (SHARING * SLOTS))[:, None] == (place_K // SLOTS)[None, :]
    score_RK = tl.where(same_RK, tl.dot(q_RE, tl.trans(k_KE)) * scale2, float("-inf"))
    peak_R = tl.max(score_RK, 1)
    p_RK = tl.exp2(score_RK - peak_R[:, None])
    sum_R = tl.sum(p_RK, 1)
    acc_RE = tl.dot(p_RK.to(v_KE.dtype), v_KE)

    first, inner_first = tl.load(run + 1), tl.load(run + 2)
    inner_behind, behind = tl.load(run + 3), tl.load(run + 4)
    low_R = tl.load(start + query_R // SLOTS)
    high_R = tl.load(anchor + query_R // SLOTS)
    left = inner_first - first
    acc_RE, peak_R, sum_R = _attend(
        acc_RE, peak_R, sum_R, q_RE, k, v, k_slot, v_slot, low_R, high_R,
        left + behind - inner_behind, first, left, inner_behind, scale2, WIDTH, KEYS, True,
    )  # fmt: skip
    acc_RE, peak_R, sum_R = _attend(
        acc_RE, peak_R, sum_R, q_RE, k, v, k_slot, v_slot, low_R, high_R,
        inner_behind - inner_first, inner_first, left, inner_behind, scale2, WIDTH, KEYS, False,
    )  # fmt: skip

    to_RE = out + (head_R * out_head + query_R * out_slot)[:, None] + place_E[None, :]
    tl.store(to_RE, (acc_RE / sum_R[:, None]).to(out.dtype.element_ty))
    tl.store(lse + head * queries * SHARING + tile * ROWS + row_R, peak_R + tl.log2(sum_R))


@no_type_check
@triton.jit
def _gather_dq(
    dq_RE, q_RE, grad_RE, lse_R, delta_R, k, v, k_slot, v_slot, low_R, high_R, count, first, left, inner_behind, scale2,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    place_K = tl.arange(0, KEYS)
    place_E = tl.arange(0, WIDTH)
    for step in range(count):
        tile = first + step
        if MASKED:
            tile = tl.where(step < left, tile, inner_behind + step - left)
        key_K = tile * KEYS + place_K
        k_KE = tl.load(k + key_K[:, None] * k_slot + place_E[None, :])
        v_KE = tl.load(v + key_K[:, None] * v_slot + place_E[None, :])
        p_RK = tl.exp2(tl.dot(q_RE, tl.trans(k_KE)) * scale2 - lse_R[:, None])
        if MASKED:
            seen_RK = (key_K[None, :] >= low_R[:, None]) & (key_K[None, :] < high_R[:, None])
            p_RK = tl.where(seen_RK, p_RK, 0.0)
        dscore_RK = p_RK * (tl.dot(grad_RE, tl.trans(v_KE)) - delta_R[:, None])
        dq_RE = tl.dot(dscore_RK.to(k_KE.dtype), k_KE, dq_RE)
    return dq_RE


@no_type_check
@triton.jit
def _backward_queries(
    q, k, v, grad, out, dq, dk, dv, lse, delta, start, anchor, runs,
    q_head, q_slot, k_head, k_slot, v_head, v_slot, grad_head, grad_slot, out_head, out_slot,
    dq_head, dq_slot, dk_head, dk_slot, dv_head, dv_slot,
    context, queries, scale, scale2,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    run = runs + tl.program_id(0) // KV_HEADS * 5
    tile = tl.load(run)
    OWN: tl.constexpr = ROWS // SHARING
    row_R = tl.arange(0, ROWS)
    place_E = tl.arange(0, WIDTH)
    query_R = tile * OWN + row_R // SHARING
    head_R = head * SHARING + row_R % SHARING
    packed_R = head * queries * SHARING + tile * ROWS + row_R
    q_RE = tl.load(q + (head_R * q_head + query_R * q_slot)[:, None] + place_E[None, :])
    grad_RE = tl.load(grad + (head_R * grad_head + query_R * grad_slot)[:, None] + place_E[None, :])
    out_RE = tl.load(out + (head_R * out_head + query_R * out_slot)[:, None] + place_E[None, :])
    delta_R = tl.sum(grad_RE.to(tl.float32) * out_RE.to(tl.float32), 1)
    tl.store(delta + packed_R, delta_R)
    lse_R = tl.load(lse + packed_R)
    k += head * k_head
    v += head * v_head

    # The own blocks' keys are seen by these rows alone, so their gradients are complete here.
    place_K = tl.arange(0, OWN)
    own_K = context + tile * OWN + place_K
    k_KE = tl.load(k + own_K[:, None] * k_slot + place_E[None, :])
    v_KE = tl.load(v + own_K[:, None] * v_slot + place_E[None, :])
    same_RK = (row_R // (SHARING * SLOTS))[:, None] == (place_K // SLOTS)[None, :]
    p_RK = tl.exp2(tl.dot(q_RE, tl.trans(k_KE)) * scale2 - lse_R[:, None])
    p_RK = tl.where(same_RK, p_RK, 0.0)
    dscore_RK = (p_RK * (tl.dot(grad_RE, tl.trans(v_KE)) - delta_R[:, None])).to(k_KE.dtype)
    dq_RE = tl.dot(dscore_RK, k_KE)
    dv_KE = tl.dot(tl.trans(p_RK.to(grad_RE.dtype)), grad_RE)
    dk_KE = tl.dot(tl.trans(dscore_RK), q_RE) * scale
    tl.store(dv + head * dv_head + own_K[:, None] * dv_slot + place_E[None, :], dv_KE.to(dv.dtype.element_ty))
    tl.store(dk + head * dk_head + own_K[:, None] * dk_slot + place_E[None, :], dk_KE.to(dk.dtype.element_ty))

    first, inner_first = tl.load(run + 1), tl.load(run + 2)
    inner_behind, behind = tl.load(run + 3), tl.load(run + 4)
    low_R = tl.load(start + query_R // SLOTS)
    high_R = tl.load(anchor + query_R // SLOTS)
    left = inner_first - first
    dq_RE = _gather_dq(
        dq_RE, q_RE, grad_RE, lse_R, delta_R, k, v, k_slot, v_slot, low_R, high_R,
        left + behind - inner_behind, first, left, inner_behind, scale2, WIDTH, KEYS, True,
    )  # fmt: skip
    dq_RE = _gather_dq(
        dq_RE, q_RE, grad_RE, lse_R, delta_R, k, v, k_slot, v_slot, low_R, high_R,
        inner_behind - inner_first, inner_first, left, inner_behind, scale2, WIDTH, KEYS, False,
    )  # fmt: skip
    to_RE = dq + (head_R * dq_head + query_R * dq_slot)[:, None] + place_E[None, :]
    tl.store(to_RE, (dq_RE * scale).to(dq.dtype.element_ty))


@no_type_check
@triton.jit
def _gather_dkv(
    dk_KE, dv_KE, k_KE, v_KE, key_K, q, grad, lse, delta, start, anchor, q_head, q_slot, grad_head, grad_slot,
    count, first, left, inner_behind, scale2,
    SHARING: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with `count` tiles of rows; scores are keys by rows, so that no product needs them turned."""
    row_R = tl.arange(0, ROWS)
    place_E = tl.arange(0, WIDTH)
    QUERIES: tl.constexpr = ROWS // SHARING
    for step in range(count):
        tile = first + step
        if MASKED:
            tile = tl.where(step < left, tile, inner_behind + step - left)
        query_R = tile * QUERIES + row_R // SHARING
        head_R = row_R % SHARING
        q_RE = tl.load(q + (head_R * q_head + query_R * q_slot)[:, None] + place_E[None, :])
        grad_RE = tl.load(grad + (head_R * grad_head + query_R * grad_slot)[:, None] + place_E[None, :])
        lse_R = tl.load(lse + tile * ROWS + row_R)
        delta_R = tl.load(delta + tile * ROWS + row_R)
        score_KR = tl.dot(k_KE, tl.trans(q_RE))
        dp_KR = tl.dot(v_KE, tl.trans(grad_RE))
        p_KR = tl.exp2(score_KR * scale2 - lse_R[None, :])
        if MASKED:
            low_R = tl.load(start + query_R // SLOTS)
            high_R = tl.load(anchor + query_R // SLOTS)
            seen_KR = (key_K[:, None] >= low_R[None, :]) & (key_K[:, None] < high_R[None, :])
            p_KR = tl.where(seen_KR, p_KR, 0.0)
        dv_KE = tl.dot(p_KR.to(grad_RE.dtype), grad_RE, dv_KE)
        dscore_KR = p_KR * (dp_KR - delta_R[None, :])  # while the tensor cores work on dv
        dk_KE = tl.dot(dscore_KR.to(q_RE.dtype), q_RE, dk_KE)
    return dk_KE, dv_KE


@no_type_check
@triton.jit
def _backward_context(
    q, k, v, grad, dk, dv, lse, delta, start, anchor, runs,
    q_head, q_slot, k_head, k_slot, v_head, v_slot, grad_head, grad_slot, dk_head, dk_slot, dv_head, dv_slot,
    context, queries, scale, scale2,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KV_HEADS
    run = runs + tl.program_id(0) // KV_HEADS * 5
    key_K = tl.load(run) * KEYS + tl.arange(0, KEYS)
    place_E = tl.arange(0, WIDTH)
    k_KE = tl.load(k + head * k_head + key_K[:, None] * k_slot + place_E[None, :])
    v_KE = tl.load(v + head * v_head + key_K[:, None] * v_slot + place_E[None, :])
    dk_KE = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    dv_KE = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    q += head * SHARING * q_head
    grad += head * SHARING * grad_head
    lse += head * queries * SHARING
    delta += head * queries * SHARING
    first, inner_first = tl.load(run + 1), tl.load(run + 2)
    inner_behind, behind = tl.load(run + 3), tl.load(run + 4)
    left = inner_first - first
    dk_KE, dv_KE = _gather_dkv(
        dk_KE, dv_KE, k_KE, v_KE, key_K, q, grad, lse, delta, start, anchor, q_head, q_slot, grad_head, grad_slot,
        left + behind - inner_behind, first, left, inner_behind, scale2, SHARING, SLOTS, WIDTH, ROWS, True,
    )  # fmt: skip
    dk_KE, dv_KE = _gather_dkv(
        dk_KE, dv_KE, k_KE, v_KE, key_K, q, grad, lse, delta, start, anchor, q_head, q_slot, grad_head, grad_slot,
        inner_behind - inner_first, inner_first, left, inner_behind, scale2, SHARING, SLOTS, WIDTH, ROWS, False,
    )  # fmt: skip
    tl.store(dv + head * dv_head + key_K[:, None] * dv_slot + place_E[None, :], dv_KE.to(dv.dtype.element_ty))
    tl.store(dk + head * dk_head + key_K[:, None] * dk_slot + place_E[None, :], (dk_KE * scale).to(dk.dtype.element_ty))
