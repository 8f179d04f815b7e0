"""Rank losses straight from embeddings and labels, in tiles: linear memory at any size.

Everything is held in label order, so that the positives of a query are one run of columns [start, end) and need no
mask. Four steps forward, and none of them stores a score that is not a positive's:

    positive scores     s_ik for k ∈ P_i, from the same tile product as all others, so that equal vectors tie exactly
    rank tiles          r⁻(k) = Σ_{j ∈ N_i} H⁻(s_j - s_k) and Σ H⁻'(s_j - s_k), a split of the gallery at a time
    finished rows       r⁺, AP_i, w_k = r⁺ / (r⁺ + r⁻)² / |P_i|, and ∂AP_i/∂s_k of the positives
    reduction           the loss (triton/reduce.py)

The backward visits the tiles once more, as blocks of ∂L/∂s that are kept only until their two products with the unit
vectors are done (triton/products.py). Every sum has one owner and one order: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import LossRule
from roadmap.kernels.triton.launch import Arena, launch
from roadmap.kernels.triton.layout import AP_LOSS, BOUND, COUNTED, LOWEST, STATISTICS
from roadmap.kernels.triton.math import DEPTH, TILE, score_tile, sigmoid, step_and_slope
from roadmap.kernels.triton.reduce import reduced_loss
from roadmap.kernels.triton.rows import store_calibration
from roadmap.kernels.triton.units import UnitVectors, unit_vectors

POSITIVES_AT_ONCE = min(16, TILE // 4)  # ranks that one pass over the gallery counts; more positives take more passes
RANK_TILE = {"BN": TILE, "num_warps": 8, "num_stages": 3}
PAIRS_ROUNDED_TO = 4096
CROWDED_RANK_TILE = {"BN": TILE // 2, "num_warps": 8, "num_stages": 3}  # many positives: sigmoids outweigh the product
PROGRAMS = 528  # four for each of an H200's 132 multiprocessors: enough to even out uneven rows


@dataclass(frozen=True)
class PositivePairs:
    """P_i as runs of columns: positives of row i are columns start[i] ... end[i] - 1, its scores lie at offset[i].

    Row i is query `query_order[i]`, column j gallery item `gallery_order[j]`: both in the order of their labels.
    `total` and `largest` are at least the number of pairs and the most positives of one query.
    """

    query_order: Tensor
    gallery_order: Tensor
    start: Tensor
    end: Tensor
    offset: Tensor
    total: int
    largest: int


@dataclass(frozen=True)
class TileState:
    """What the forward leaves for the backward."""

    queries: UnitVectors
    gallery: UnitVectors
    in_batch: bool
    pairs: PositivePairs
    positive_scores: Tensor
    weights: Tensor
    positive_slopes: Tensor
    stats: Tensor
    factors: Tensor
    rule: LossRule


def positives_at_once(pairs: PositivePairs) -> int:
    return min(POSITIVES_AT_ONCE, max(4, pairs.largest))


def sorted_pairs(query_labels: Tensor, gallery_labels: Tensor | None) -> PositivePairs:
    """Queries and gallery in the order of their labels, and the runs of positives."""
    q_sorted, q_order = torch.sort(query_labels, stable=True)
    g_sorted, g_order = (q_sorted, q_order) if gallery_labels is None else torch.sort(gallery_labels, stable=True)
    start = torch.searchsorted(g_sorted, q_sorted, out_int32=True)
    end = torch.searchsorted(g_sorted, q_sorted, right=True, out_int32=True)
    size = end - start
    ends = size.cumsum(0)
    total, largest = (int(v) for v in torch.stack([ends[-1], size.max()]).tolist())  # the only read-back
    # Rounded up, so that batches of uneven classes, whose counts differ a little at every step, share a record.
    room = triton.cdiv(max(total, 1), PAIRS_ROUNDED_TO) * PAIRS_ROUNDED_TO
    return PositivePairs(q_order, g_order, start, end, ends - size, room, triton.next_power_of_2(max(largest, 1)))


@triton.jit
def _positive_scores(
    QHi, QLo, GHi, GLo, Start, End, Offset, Scores, M,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The programs of one row of tiles share out the columns between its first positive and its last."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    start = tl.load(Start + i, mask=i < M, other=2147483647)
    end = tl.load(End + i, mask=i < M, other=0)
    offset = tl.load(Offset + i, mask=i < M, other=0)
    for tile in range(tl.min(start, 0) // BN + tl.program_id(1), tl.cdiv(tl.max(end, 0), BN), tl.num_programs(1)):
        first = tile * BN
        if tl.max(((start < first + BN) & (end > first)).to(tl.int32), 0) > 0:
            s = score_tile(QHi, QLo, GHi, GLo, tl.program_id(0) * BM, first, DIM, DEPTH, BM, BN)
            j = first + tl.arange(0, BN)
            inside = (j[None, :] >= start[:, None]) & (j[None, :] < end[:, None])
            tl.store(Scores + (offset - start)[:, None] + j[None, :], s, mask=inside)


@triton.jit
def worth_it(highest, s_k, negligible, KS: tl.constexpr):
    """Whether some sigmoid of the tile under threshold k is above nothing. With many positives, asking costs more."""
    worth = True
    if KS <= 8:
        worth = tl.max(highest - s_k, 0) > negligible
    return worth


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _rank_tiles(
    QHi, QLo, GHi, GLo, Start, End, Offset, Scores, RankNeg, SlopeNeg, NegSum, NegCount, M, N, pairs, tiles,
    inv_tau, rho_tau, delta, top, negligible, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr,
    DIM: tl.constexpr, DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """KS ranks of BM queries over one split of the gallery, a tile of scores at a time."""
    split = tl.program_id(1)
    k_first = tl.program_id(2) * KS
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < M
    start = tl.load(Start + i, mask=ok, other=0)
    end = tl.load(End + i, mask=ok, other=0)
    offset = tl.load(Offset + i, mask=ok, other=0)
    size = end - start
    k_here = tl.minimum(tl.max(size, 0) - k_first, KS)
    k_all = tl.arange(0, KS)
    listed = k_first + k_all[None, :] < size[:, None]
    s_all = tl.load(Scores + offset[:, None] + k_first + k_all[None, :], mask=listed, other=4.0)
    lowest = tl.min(s_all, 1)
    rank = tl.zeros((BM, KS), tl.float32)
    slopes = tl.zeros((BM, KS), tl.float32)
    neg_sum = tl.zeros((BM,), tl.float32)
    neg_count = tl.zeros((BM,), tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(N, BN))):
        j = tile * BN + tl.arange(0, BN)
        s = score_tile(QHi, QLo, GHi, GLo, tl.program_id(0) * BM, tile * BN, DIM, DEPTH, BM, BN)
        neg = ((j[None, :] < start[:, None]) | (j[None, :] >= end[:, None])) & (j < N)[None, :]
        s = tl.where(neg, s, -4.0)  # what is no negative lies below all thresholds and adds nothing
        if CALIBRATE:
            neg_sum += tl.sum(tl.maximum(s - beta, 0.0), 1)
            neg_count += tl.sum((s > beta).to(tl.float32), 1)
        if RANKS:
            highest = tl.max(s, 1)
            if tl.max(highest - lowest, 0) > negligible:  # else every sigmoid of the tile has vanished
                for k in range(k_here):
                    s_k = tl.load(Scores + offset + k_first + k, mask=k_first + k < size, other=4.0)
                    if worth_it(highest, s_k, negligible, KS):
                        value, slope = step_and_slope(s - s_k[:, None], inv_tau, rho_tau, delta, top, SUPAP)
                        here = k_all[None, :] == k
                        rank += tl.where(here, tl.sum(value, 1)[:, None], 0.0)
                        slopes += tl.where(here, tl.sum(slope, 1)[:, None], 0.0)
    if RANKS:
        at = split.to(tl.int64) * pairs + offset[:, None] + k_first + k_all[None, :]
        valid = ok[:, None] & (k_first + k_all[None, :] < size[:, None])
        tl.store(RankNeg + at, rank, mask=valid)
        tl.store(SlopeNeg + at, slopes * inv_tau, mask=valid)
    if CALIBRATE:
        if k_first == 0:
            tl.store(NegSum + split.to(tl.int64) * M + i, neg_sum, mask=ok)
            tl.store(NegCount + split.to(tl.int64) * M + i, neg_count, mask=ok)


@triton.jit(do_not_specialize=["pairs", "splits"])
def _finished_rows(
    Start, End, Offset, Scores, RankNeg, SlopeNeg, NegSum, NegCount, Weight, ByPos, PosSlope, Stats, M, N, pairs,
    splits, inv_tau, steepest, alpha,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, ALL: tl.constexpr, IN_BATCH: tl.constexpr,
    INCLUDE_SELF: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """AP_i of one query from the counted ranks, and what the backward needs of each of its positives."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(Start + row)
    size = tl.load(End + row) - start
    offset = tl.load(Offset + row)
    own = row - start  # which of its positives the query is, in the in-batch call
    listed = size
    if IN_BATCH:
        if not INCLUDE_SELF:
            listed = size - 1
    share = 1.0 / tl.maximum(listed, 1).to(tl.float32)
    ap = 0.0
    weights = 0.0
    largest = 0.0
    lowest = 4.0
    pos_sum = 0.0
    pos_count = 0.0
    for k_first in range(0, size, KS):
        k = k_first + tl.arange(0, KS)
        ok = k < size
        s_k = tl.load(Scores + offset + k, mask=ok, other=0.0)
        lowest = tl.minimum(lowest, tl.min(tl.where(ok, s_k, 4.0), 0))
        if CALIBRATE:
            below = ok & (s_k < alpha)
            if IN_BATCH:
                below = below & (k != own)
            pos_sum += tl.sum(tl.where(below, alpha - s_k, 0.0), 0)
            pos_count += tl.sum(below.to(tl.float32), 0)
        if RANKS:
            if IN_BATCH:
                if not INCLUDE_SELF:
                    ok = ok & (k != own)
            rank_neg = tl.zeros((KS,), tl.float32)
            slope_neg = tl.zeros((KS,), tl.float32)
            for split in range(0, splits):
                at = tl.cast(split, tl.int64) * pairs + offset + k
                rank_neg += tl.load(RankNeg + at, mask=ok, other=0.0)
                slope_neg += tl.load(SlopeNeg + at, mask=ok, other=0.0)
            rank_pos = tl.zeros((KS,), tl.float32) + 1.0
            for j_first in range(0, size, KS):
                j = j_first + tl.arange(0, KS)
                s_j = tl.load(Scores + offset + j, mask=j < size, other=0.0)
                others = (j < size)[None, :] & (j[None, :] != k[:, None])
                if IN_BATCH:
                    if not INCLUDE_SELF:
                        others = others & (j != own)[None, :]
                if SUPAP:
                    counts = (s_j[None, :] >= s_k[:, None]).to(tl.float32)
                else:
                    counts = sigmoid(s_j[None, :] - s_k[:, None], inv_tau)
                rank_pos += tl.sum(tl.where(others, counts, 0.0), 1)
            total = rank_pos + rank_neg
            ap += tl.sum(tl.where(ok, rank_pos / total, 0.0), 0)
            weight = tl.where(ok, share * rank_pos / (total * total), 0.0)
            weights += tl.sum(weight, 0)
            largest = tl.maximum(largest, tl.max(weight * slope_neg, 0))
            tl.store(Weight + offset + k, weight, mask=k < size)
            tl.store(PosSlope + offset + k, weight * slope_neg, mask=k < size)
            if not SUPAP:
                tl.store(ByPos + offset + k, tl.where(ok, share * rank_neg / (total * total), 0.0), mask=k < size)
    if RANKS:
        tl.store(Stats + M * AP_LOSS + row, tl.where(listed > 0, 1.0 - ap / tl.maximum(listed, 1).to(tl.float32), 0.0))
        tl.store(Stats + M * COUNTED + row, (listed > 0).to(tl.float32))
        # Positives push each other by at most Σ ByPos · steepest <= |P_i| · share · steepest under SmoothAP.
        among = 0.0
        if not SUPAP:
            among = 2.0 * steepest
        tl.store(Stats + M * LOWEST + row, lowest)
        tl.store(Stats + M * BOUND + row, tl.maximum(weights * steepest, largest + among))
    if CALIBRATE:
        neg_sum = 0.0
        neg_count = 0.0
        for split in range(0, splits):
            neg_sum += tl.load(NegSum + tl.cast(split, tl.int64) * M + row)
            neg_count += tl.load(NegCount + tl.cast(split, tl.int64) * M + row)
        pos_pairs = size
        if IN_BATCH:
            pos_pairs = size - 1
        store_calibration(
            Stats, row, M, pos_sum, pos_count, pos_pairs.to(tl.float32), neg_sum, neg_count,
            (N - size).to(tl.float32), ALL,
        )  # fmt: skip


@triton.jit
def _among_positives(
    Start, End, Offset, Scores, ByPos, PosSlope, inv_tau,
    IN_BATCH: tl.constexpr, INCLUDE_SELF: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """SmoothAP only: ∂AP_i/∂s_k += Σ_{k' ∈ P_i, k' ≠ k} (b_k' - b_k) sigmoid'(s_k - s_k'), with b = ∂AP_i/∂r⁺.

    sigmoid' is even, so that what k gains from k' through rank⁺(k') is what it loses through its own rank⁺.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(Start + row)
    size = tl.load(End + row) - start
    offset = tl.load(Offset + row)
    own = row - start
    for k_first in range(0, size, KS):
        k = k_first + tl.arange(0, KS)
        s_k = tl.load(Scores + offset + k, mask=k < size, other=0.0)
        b_k = tl.load(ByPos + offset + k, mask=k < size, other=0.0)
        slope = tl.load(PosSlope + offset + k, mask=k < size, other=0.0)
        for j_first in range(0, size, KS):
            j = j_first + tl.arange(0, KS)
            s_j = tl.load(Scores + offset + j, mask=j < size, other=0.0)
            b_j = tl.load(ByPos + offset + j, mask=j < size, other=0.0)
            others = (j < size)[None, :] & (j[None, :] != k[:, None])
            if IN_BATCH:
                if not INCLUDE_SELF:
                    others = others & (j != own)[None, :] & (k != own)[:, None]
            smooth = sigmoid(s_k[:, None] - s_j[None, :], inv_tau)
            push = (b_j[None, :] - b_k[:, None]) * smooth * (1.0 - smooth) * inv_tau
            slope += tl.sum(tl.where(others, push, 0.0), 1)
        tl.store(PosSlope + offset + k, slope, mask=k < size)


def forward(
    arena: Arena,
    loss: Tensor,
    queries: Tensor,
    gallery: Tensor | None,
    pairs: PositivePairs,
    rule: LossRule,
    grad: bool,
) -> TileState:
    """Writes the loss; returns what its backward needs."""
    in_batch = gallery is None
    q = unit_vectors(arena, queries, pairs.query_order)
    g = q if gallery is None else unit_vectors(arena, gallery, pairs.gallery_order)
    M, N = len(q.norms), len(g.norms)
    ranks, calibration = rule.ranks, rule.calibration
    tile = {"DIM": q.dimensions, "DEPTH": DEPTH, "BM": TILE, "BN": TILE}
    rank_tile = tile | (RANK_TILE if pairs.largest <= POSITIVES_AT_ONCE else CROWDED_RANK_TILE)
    vectors = (q.hi, q.lo, g.hi, g.lo)
    runs = (pairs.start, pairs.end, pairs.offset)
    row_tiles, column_tiles = triton.cdiv(M, TILE), triton.cdiv(N, TILE)
    scores, weights, by_pos, pos_slopes = (arena.empty(pairs.total) for _ in range(4))
    shared = min(column_tiles, triton.cdiv(PROGRAMS // 2, row_tiles))
    launch(_positive_scores, (row_tiles, shared), *vectors, *runs, scores, M, **tile, num_warps=8)

    passes = triton.cdiv(pairs.largest, POSITIVES_AT_ONCE) if ranks else 1
    column_tiles = triton.cdiv(N, rank_tile["BN"])
    splits = min(column_tiles, triton.cdiv(PROGRAMS, row_tiles * passes))
    tiles = triton.cdiv(column_tiles, splits)
    splits = triton.cdiv(column_tiles, tiles)
    rank_neg, slope_neg = (arena.empty(splits, pairs.total if ranks else 0) for _ in range(2))
    neg_sum, neg_count = (arena.empty(splits, M if calibration else 0) for _ in range(2))
    supap = ranks is not None and ranks.kind == "supap"
    inv_tau = 1 / ranks.tau if ranks else 0.0
    launch(_rank_tiles, (row_tiles, splits, passes),
        *vectors, *runs, scores, rank_neg, slope_neg, neg_sum, neg_count, M, N, pairs.total, tiles,
        inv_tau,
        ranks.rho * ranks.tau if ranks else 0.0,
        ranks.delta if ranks else 0.0,
        ranks.top if ranks else 0.0,
        ranks.negligible if ranks else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=supap, CALIBRATE=calibration is not None,
        KS=positives_at_once(pairs), **rank_tile,
    )  # fmt: skip
    stats = arena.empty(STATISTICS, M)
    block = min(64, max(pairs.largest, 2))
    own = {"IN_BATCH": in_batch, "INCLUDE_SELF": rule.include_self, "KS": block}
    warps = 1 if block <= 16 else 4
    launch(_finished_rows, (M,),
        *runs, scores, rank_neg, slope_neg, neg_sum, neg_count, weights, by_pos, pos_slopes, stats, M, N, pairs.total,
        splits, inv_tau,
        ranks.steepest if ranks else 0.0,
        calibration.alpha if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=supap, CALIBRATE=calibration is not None,
        ALL=calibration is not None and calibration.average == "all", **own, num_warps=warps,
    )  # fmt: skip
    if grad and ranks is not None and not supap:
        launch(_among_positives, (M,), *runs, scores, by_pos, pos_slopes, inv_tau, **own, num_warps=warps)
    factors = reduced_loss(arena, loss, stats, q.norms, None if in_batch else g.norms, rule, bounded=True)
    return TileState(q, g, in_batch, pairs, scores, weights, pos_slopes, stats, factors, rule)
