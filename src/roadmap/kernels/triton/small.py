"""A whole loss in seven launches, for comparisons small enough to hold their scores: no sort, no read-back."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import LossRule
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import AP_FACTOR, NEG_FACTOR, NEG_SHARE, POS_FACTOR, POS_SHARE, STATISTICS
from roadmap.kernels.triton.math import DEPTH, TILE, score_tile
from roadmap.kernels.triton.reduce import embedding_gradient, reduced_loss
from roadmap.kernels.triton.rows import launch_rows
from roadmap.kernels.triton.units import UnitVectors, unit_vectors

SMALL_TILES = 1 << 20  # scores up to which quarter tiles fill the GPU better than whole ones


@dataclass(frozen=True)
class SmallState:
    """What the forward leaves for the backward."""

    queries: UnitVectors
    gallery: UnitVectors
    scores: Tensor
    slope: Tensor
    stats: Tensor
    factors: Tensor
    query_labels: Tensor
    gallery_labels: Tensor
    rule: LossRule


@triton.jit
def _scores(QHi, QLo, GHi, GLo, S, M, N, DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    s = score_tile(QHi, QLo, GHi, GLo, tl.program_id(0) * BM, tl.program_id(1) * BN, DIM, DEPTH, BM, BN)
    tl.store(S + i.to(tl.int64)[:, None] * N + j[None, :], s, mask=(i < M)[:, None] & (j < N)[None, :])


@triton.jit
def _score_gradient(
    S, Slope, W, Stats, Factors, QLabels, GLabels, M, N, alpha, beta,
    RANKS: tl.constexpr, CALIBRATE: tl.constexpr, IN_BATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂L/∂s_ij over one row, from ∂AP_i/∂s_ij and the factors of the reduction."""
    row = tl.program_id(0)
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
            if IN_BATCH:
                pairs = pairs & (j != row)
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
    """Out = W U, or (W + Wᵀ) U when every item is query and gallery at once."""
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
            at = j[:, None] * PADDED + d[None, :]
            u = tl.load(Hi + at).to(tl.float32) + tl.load(Lo + at).to(tl.float32)  # 4096 times the unit vectors
            # Three TF32 products would cost accuracy. The factor keeps the compiler from summing into `part` directly.
            part += tl.dot(w, u, input_precision="ieee") * 0.000244140625
        out += part
    tl.store(Out + i[:, None] * PADDED + d[None, :], out, mask=(i < rows)[:, None])


def cosine_scores(queries: Tensor, gallery: Tensor | None) -> tuple[Tensor, UnitVectors, UnitVectors]:
    """(M, N) scores, and the unit vectors they came from."""
    arena = Arena(queries.device)
    q = unit_vectors(arena, queries)
    g = q if gallery is None else unit_vectors(arena, gallery)
    return score_matrix(arena, q, g), q, g


def score_matrix(arena: Arena, q: UnitVectors, g: UnitVectors) -> Tensor:
    M, N = len(q.norms), len(g.norms)
    tile, warps = (min(64, TILE), 4) if M * N <= SMALL_TILES else (TILE, 8)
    scores = arena.empty(M, N)
    launch(_scores, (triton.cdiv(M, tile), triton.cdiv(N, tile)),
        q.hi, q.lo, g.hi, g.lo, scores, M, N, DIM=q.dimensions, DEPTH=DEPTH, BM=tile, BN=tile, num_warps=warps,
    )  # fmt: skip
    return scores


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


def forward(
    arena: Arena, loss: Tensor, queries: Tensor, query_labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor,
    rule: LossRule, grad: bool,
) -> SmallState | None:  # fmt: skip
    """Writes the loss; returns what its backward needs, if there will be one."""
    q = unit_vectors(arena, queries)
    g = q if gallery is None else unit_vectors(arena, gallery)
    scores = score_matrix(arena, q, g)
    M, N = scores.shape
    stats = arena.empty(STATISTICS, M)
    slope = arena.empty(M, N) if grad else None
    launch_rows(scores, None, None, query_labels, gallery_labels, slope, stats, rule, in_batch=gallery is None)
    norms = None if gallery is None else g.norms
    factors = reduced_loss(arena, loss, stats, q.norms, norms, rule, bounded=False)
    if slope is None:
        return None
    return SmallState(q, g, scores, slope, stats, factors, query_labels, gallery_labels, rule)


def backward(
    arena: Arena, state: SmallState, upstream: Tensor, grad_queries: Tensor | None, grad_gallery: Tensor | None
) -> None:
    """Writes the gradients that are asked for. In the in-batch call both roles meet in `grad_queries`."""
    M, N = state.scores.shape
    rule, calibration = state.rule, state.rule.calibration
    weights = arena.empty(M, N)
    launch(_score_gradient, (M,),
        state.scores, state.slope, weights, state.stats, state.factors, state.query_labels, state.gallery_labels, M, N,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=rule.ranks is not None, CALIBRATE=calibration is not None, IN_BATCH=state.gallery is state.queries,
        BLOCK=min(4096, triton.next_power_of_2(N)), num_warps=4,
    )  # fmt: skip
    add_score_gradients(arena, weights, state.queries, state.gallery, grad_queries, grad_gallery, upstream)


def _product(
    arena: Arena, weights: Tensor, units: UnitVectors, rows: int, inner: int, strides: tuple[int, int], both: bool
) -> Tensor:
    out = arena.empty(rows, units.dimensions)
    launch(_unit_gradient, (triton.cdiv(rows, 32), units.dimensions // DEPTH),
        weights, units.hi, units.lo, out, rows, inner, *strides,
        PADDED=units.dimensions, BOTH=both, BM=32, BN=DEPTH, BK=min(32, TILE), num_warps=4,
    )  # fmt: skip
    return out
