"""A whole loss in seven launches, for comparisons small enough to hold their scores: no sort, no read-back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import (
    AP_FACTOR,
    FACTORS,
    NEG_FACTOR,
    NEG_SHARE,
    NOWHERE,
    POS_FACTOR,
    POS_SHARE,
    STATISTICS,
    own_column,
    own_mode,
)
from roadmap.kernels.triton.math import DEPTH, TILE, score_tile
from roadmap.kernels.triton.reduce import backward_factors, embedding_gradient, reduce_rows
from roadmap.kernels.triton.rows import launch_rows
from roadmap.kernels.triton.units import UnitVectors, fill_units, room_for_units

SMALL_TILES = 1 << 20  # scores up to which quarter tiles fill the GPU better than whole ones


@dataclass(frozen=True)
class SmallState:
    """Where the forward writes and the backward reads, in one buffer."""

    queries: UnitVectors
    gallery: UnitVectors
    scores: Tensor
    stats: Tensor
    factors: Tensor
    slope: Tensor | None


def small_state(arena: Arena, call: LossCall, keep: bool) -> SmallState:
    """Room for a call; the same arena gives the same places again."""
    (M, N), D = call.shape, call.queries.shape[1]
    q = room_for_units(arena, M, D)
    g = q if call.gallery is None else room_for_units(arena, N, D)
    slope = arena.empty(M, N) if keep and call.rule.ranks is not None else None
    return SmallState(q, g, arena.empty(M, N), arena.empty(STATISTICS, M), arena.empty(FACTORS), slope)


@triton.jit
def _scores(QHi, QLo, GHi, GLo, S, M, N, DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    s = score_tile(QHi, QLo, GHi, GLo, tl.program_id(0) * BM, tl.program_id(1) * BN, DIM, DEPTH, BM, BN)
    tl.store(S + i.to(tl.int64)[:, None] * N + j[None, :], s, mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit
def _score_gradient(
    S, Slope, W, Stats, Factors, QLabels, GLabels, Own, M, N, alpha, beta,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂s_ij over one row, from ∂AP_i/∂s_ij and the factors of the reduction."""
    row = tl.program_id(0)
    own = own_column(Own, row, OWN)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        ok = j < N
        at = row.to(tl.int64) * N + j
        grad = tl.zeros((BLOCK,), tl.float32)
        if RANKS:
            grad -= tl.load(Factors + AP_FACTOR) * tl.load(Slope + at, mask=ok, other=0.0)
        if CALIBRATE:
            s = tl.load(S + at, mask=ok, other=0.0)
            same = tl.load(GLabels + j, mask=ok, other=0) == tl.load(QLabels + row)
            pairs = same
            if OWN != NOWHERE:
                pairs = pairs & (j != own)
            by_pos = tl.load(Factors + POS_FACTOR) * tl.load(Stats + M * POS_SHARE + row)
            by_neg = tl.load(Factors + NEG_FACTOR) * tl.load(Stats + M * NEG_SHARE + row)
            grad -= tl.where(pairs & (s < alpha), by_pos, 0.0)
            grad += tl.where((same == 0) & (s > beta), by_neg, 0.0)
        tl.store(W + at, grad, mask=ok)


@triton.jit
def _unit_gradient(
    W, Hi, Lo, Out, rows, inner, stride_row, stride_inner,
    PADDED: tl.constexpr, BOTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Out = W U, or (W + Wᵀ) U when every item is query and gallery at once.

    64-bit addresses of vectors: a single query may be compared with two million of them.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.program_id(1) * BN + tl.arange(0, BN)
    out = tl.zeros((BM, BN), tl.float32)
    # Sums of sums of sums: the rounding of one long sum grows with its length, and would be all of the error.
    for first in range(0, inner, 8 * BK):
        part = tl.zeros((BM, BN), tl.float32)
        for start in range(first, tl.minimum(first + 8 * BK, inner), BK):
            j = start + tl.arange(0, BK)
            ok = (i < rows)[:, None] & (j < inner)[None, :]
            w = tl.load(W + i[:, None] * stride_row + j[None, :] * stride_inner, mask=ok, other=0.0)
            if BOTH:
                w += tl.load(W + j[None, :] * stride_row + i[:, None] * stride_inner, mask=ok, other=0.0)
            at = tl.cast(start, tl.int64) * PADDED + (tl.arange(0, BK)[:, None] * PADDED + d[None, :])
            u = tl.load(Hi + at).to(tl.float32) + tl.load(Lo + at).to(tl.float32)  # 4096 times the unit vectors
            # Three TF32 products would cost accuracy. The factor keeps the compiler from summing into `part` directly.
            part += tl.dot(w, u, input_precision="ieee") * 0.000244140625
        out += part
    corner = tl.program_id(0).to(tl.int64) * (BM * PADDED)
    tl.store(Out + corner + (tl.arange(0, BM)[:, None] * PADDED + d[None, :]), out, mask=(i < rows)[:, None])


def cosine_scores(queries: Tensor, gallery: Tensor | None) -> tuple[Tensor, UnitVectors, UnitVectors]:
    """(M, N) scores, and the unit vectors they came from."""
    q, g = cosine_units(queries, gallery)
    scores = torch.empty(len(q.norms), len(g.norms), device=queries.device, dtype=torch.float32)
    fill_scores(scores, q, g)
    return scores, q, g


def cosine_units(queries: Tensor, gallery: Tensor | None) -> tuple[UnitVectors, UnitVectors]:
    arena = Arena(queries.device)
    q = room_for_units(arena, *queries.shape)
    fill_units(q, queries)
    if gallery is None:
        return q, q
    g = room_for_units(arena, *gallery.shape)
    fill_units(g, gallery)
    return q, g


def fill_scores(scores: Tensor, q: UnitVectors, g: UnitVectors) -> None:
    M, N = scores.shape
    tile, warps = (min(64, TILE), 4) if M * N <= SMALL_TILES else (TILE, 8)
    launch(_scores, (triton.cdiv(M, tile), triton.cdiv(N, tile)),
        q.hi, q.lo, g.hi, g.lo, scores, M, N, DIM=q.dimensions, DEPTH=DEPTH, BM=tile, BN=tile, num_warps=warps,
    )  # fmt: skip


def add_score_gradients(
    arena: Arena, weights: Tensor, q: UnitVectors, g: UnitVectors, grad_queries: Tensor | None,
    grad_gallery: Tensor | None, upstream: Tensor | None = None,
) -> None:  # fmt: skip
    """From `weights` = ∂L/∂s, (M, N), to the gradients at the embeddings, written where a tensor is given.

    Where `g` is `q`, every item is query and gallery at once and both roles meet in `grad_queries`.
    """
    M, N = weights.shape
    if grad_queries is not None:
        grad = _product(arena, weights, g, M, N, (N, 1), both=g is q)
        embedding_gradient(grad, q.hi, q.lo, q.norms, q.order, upstream, grad_queries)
    if grad_gallery is not None:
        grad = _product(arena, weights, q, N, M, (1, N), both=False)
        embedding_gradient(grad, g.hi, g.lo, g.norms, g.order, upstream, grad_gallery)


def forward(state: SmallState, out: Tensor, call: LossCall) -> None:
    """Writes the loss, or its terms, into `out`, and into the state what its backward needs."""
    q, g = state.queries, state.gallery
    fill_units(q, call.queries)
    if call.gallery is not None:
        fill_units(g, call.gallery)
    fill_scores(state.scores, q, g)
    launch_rows(
        state.scores, None, None, call.query_labels, call.gallery_labels, call.own, state.slope, state.stats, call.rule,
        own_mode(call.gallery, call.own),
    )  # fmt: skip
    norms = None if call.gallery is None else g.norms
    reduce_rows(out, state.factors, state.stats, q.norms, norms, call.rule, call.as_terms, bounded=False)


def backward(
    arena: Arena, state: SmallState, call: LossCall, upstream: Tensor, grad_queries: Tensor | None,
    grad_gallery: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are asked for. In the in-batch call both roles meet in `grad_queries`."""
    M, N = call.shape
    rule, calibration = call.rule, call.rule.calibration
    factors, left = backward_factors(arena, state.factors, upstream, call.as_terms)
    weights = arena.empty(M, N)
    launch(_score_gradient, (M,),
        state.scores, state.slope, weights, state.stats, factors, call.query_labels, call.gallery_labels, call.own,
        M, N,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=rule.ranks is not None, CALIBRATE=calibration is not None, OWN=own_mode(call.gallery, call.own),
        BLOCK=min(4096, triton.next_power_of_2(N)), num_warps=4,
    )  # fmt: skip
    add_score_gradients(arena, weights, state.queries, state.gallery, grad_queries, grad_gallery, left)


def _product(
    arena: Arena, weights: Tensor, units: UnitVectors, rows: int, inner: int, strides: tuple[int, int], both: bool
) -> Tensor:
    out = arena.empty(rows, units.dimensions)
    launch(_unit_gradient, (triton.cdiv(rows, 32), units.dimensions // DEPTH),
        weights, units.hi, units.lo, out, rows, inner, *strides,
        PADDED=units.dimensions, BOTH=both, BM=32, BN=DEPTH, BK=min(32, TILE), num_warps=4,
    )  # fmt: skip
    return out
