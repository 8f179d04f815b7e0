"""The forward of the tiled losses: scores of the positives, ranks in tiles, rows, reduction. See tiles.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.calls import LossCall
from roadmap.kernels.triton import symmetric_forward
from roadmap.kernels.triton.launch import launch
from roadmap.kernels.triton.layout import AP_LOSS, BOUND, COUNTED, LOWEST, NOWHERE, own_column
from roadmap.kernels.triton.math import ABSENT, DEPTH, TILE, score_tile, sigmoid, step_and_slope
from roadmap.kernels.triton.measures import AP, gain_and_slopes, measure_constants, norm_of
from roadmap.kernels.triton.positive_scores import fill_positive_scores
from roadmap.kernels.triton.reduce import reduce_rows
from roadmap.kernels.triton.rows import store_calibration
from roadmap.kernels.triton.symmetric import is_symmetric
from roadmap.kernels.triton.tiles import PositivePairs, TileState, rank_grid, worth_it
from roadmap.kernels.triton.units import fill_units


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _rank_tiles(
    QHi, QLo, GHi, GLo, Start, End, Offset, Scores, RankNeg, SlopeNeg, NegSum, NegCount, M, N, pairs, tiles,
    inv_tau, rho_tau, delta, jump, top, negligible, beta,
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
        s = tl.where(neg, s, ABSENT)  # what is no negative lies below all thresholds and adds nothing
        if CALIBRATE:
            neg_sum += tl.sum(tl.maximum(s - beta, 0.0), 1)
            neg_count += tl.sum((s > beta).to(tl.float32), 1)
        if RANKS:
            highest = tl.max(s, 1)
            if tl.max(highest - lowest, 0) > negligible:  # else every sigmoid of the tile has vanished
                for k in range(k_here):
                    s_k = tl.load(Scores + offset + k_first + k, mask=k_first + k < size, other=4.0)
                    if worth_it(highest, s_k, negligible, KS):
                        value, slope = step_and_slope(s - s_k[:, None], inv_tau, rho_tau, delta, jump, top, SUPAP)
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


@triton.jit
def _own_positive(Own, row, start, size, OWN: tl.constexpr):
    """Which of its positives the query is, and 1; where it is none, a number that no positive has, and 0."""
    own = start * 0 - 1
    stands = start * 0
    if OWN != NOWHERE:
        column = own_column(Own, row, OWN)
        inside = (column >= start) & (column < start + size)
        own = tl.where(inside, column - start, -1).to(tl.int32)
        stands = inside.to(tl.int32)
    return own, stands


@triton.jit(do_not_specialize=["pairs", "splits"])
def _rows_from_ranks(
    Start, End, Offset, Own, Scores, RankNeg, SlopeNeg, NegSum, NegCount, Weight, ByPos, PosSlope, Stats, M, N, pairs,
    splits, inv_tau, steepest, alpha,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, ALL: tl.constexpr, OWN: tl.constexpr,
    INCLUDE_SELF: tl.constexpr, KS: tl.constexpr, SPLITS: tl.constexpr,
    MEASURE: tl.constexpr, CUTS: tl.constexpr, REACHABLE: tl.constexpr,
):  # fmt: skip
    """AP_i of one query from the counted ranks, and what the backward needs of each of its positives."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(Start + row)
    size = tl.load(End + row) - start
    offset = tl.load(Offset + row)
    own, stands = _own_positive(Own, row, start, size, OWN)
    listed = size
    if not INCLUDE_SELF:
        listed = size - stands
    norm = norm_of(listed, MEASURE, KS)
    share = 1.0 / norm
    ap = 0.0
    weights = 0.0
    largest = 0.0
    reach = 0.0
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
            if OWN != NOWHERE:
                below = below & (k != own)
            pos_sum += tl.sum(tl.where(below, alpha - s_k, 0.0) + s_k * 0.0, 0)  # NaN is below nothing, and must show
            pos_count += tl.sum(below.to(tl.float32), 0)
        if RANKS:
            if OWN != NOWHERE:
                if not INCLUDE_SELF:
                    ok = ok & (k != own)
            ranks = tl.zeros((KS, SPLITS), tl.float32)
            slopes = tl.zeros((KS, SPLITS), tl.float32)
            for first in range(0, splits, SPLITS):  # several at once: one after the other they would wait for memory
                split = first + tl.arange(0, SPLITS)
                at = split.to(tl.int64)[None, :] * pairs + (offset + k)[:, None]
                there = ok[:, None] & (split < splits)[None, :]
                ranks += tl.load(RankNeg + at, mask=there, other=0.0)
                slopes += tl.load(SlopeNeg + at, mask=there, other=0.0)
            rank_neg = tl.sum(ranks, 1)
            slope_neg = tl.sum(slopes, 1)
            rank_pos = tl.zeros((KS,), tl.float32) + 1.0
            for j_first in range(0, size, KS):
                j = j_first + tl.arange(0, KS)
                s_j = tl.load(Scores + offset + j, mask=j < size, other=0.0)
                others = (j < size)[None, :] & (j[None, :] != k[:, None])
                if OWN != NOWHERE:
                    if not INCLUDE_SELF:
                        others = others & (j != own)[None, :]
                if SUPAP:
                    counts = (s_j[None, :] >= s_k[:, None]).to(tl.float32)
                else:
                    counts = sigmoid(s_j[None, :] - s_k[:, None], inv_tau)
                rank_pos += tl.sum(tl.where(others, counts, 0.0), 1)
            gain, by_pos, weight = gain_and_slopes(rank_pos, rank_neg, listed, share, MEASURE, CUTS, REACHABLE)
            ap += tl.sum(tl.where(ok, gain, 0.0), 0)
            weight = tl.where(ok, weight, 0.0)
            weights += tl.sum(weight, 0)
            largest = tl.maximum(largest, tl.max(weight * slope_neg, 0))
            tl.store(Weight + offset + k, weight, mask=k < size)
            tl.store(PosSlope + offset + k, weight * slope_neg, mask=k < size)
            if not SUPAP:
                by_pos = tl.where(ok, by_pos, 0.0)
                if MEASURE != AP:
                    reach = tl.maximum(reach, tl.max(tl.abs(by_pos), 0))
                tl.store(ByPos + offset + k, by_pos, mask=k < size)
    if RANKS:
        tl.store(Stats + M * AP_LOSS + row, tl.where(listed > 0, 1.0 - ap / norm, 0.0))
        tl.store(Stats + M * COUNTED + row, (listed > 0).to(tl.float32))
        # Positives push each other by at most Σ_j |ByPos_j - ByPos_k| · steepest. Under SmoothAP ByPos <= share.
        among = 0.0
        if not SUPAP:
            among = 2.0 * steepest
            if MEASURE != AP:
                among = among * reach * listed
        tl.store(Stats + M * LOWEST + row, lowest)
        tl.store(Stats + M * BOUND + row, tl.maximum(weights * steepest, largest + among))
    if CALIBRATE:
        sums = tl.zeros((SPLITS,), tl.float32)
        counts = tl.zeros((SPLITS,), tl.float32)
        for first in range(0, splits, SPLITS):
            split = first + tl.arange(0, SPLITS)
            at = split.to(tl.int64) * M + row
            sums += tl.load(NegSum + at, mask=split < splits, other=0.0)
            counts += tl.load(NegCount + at, mask=split < splits, other=0.0)
        store_calibration(
            Stats, row, M, pos_sum, pos_count, (size - stands).to(tl.float32), tl.sum(sums, 0),
            tl.sum(counts, 0), (N - size).to(tl.float32), ALL,
        )  # fmt: skip


@triton.jit
def _among_positives(
    Start, End, Offset, Own, Scores, ByPos, PosSlope, inv_tau,
    OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """SmoothAP only: ∂AP_i/∂s_k += Σ_{k' ∈ P_i, k' ≠ k} (b_k' - b_k) sigmoid'(s_k - s_k'), with b = ∂AP_i/∂r⁺.

    sigmoid' is even, so that what k gains from k' through rank⁺(k') is what it loses through its own rank⁺.
    """
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(Start + row)
    size = tl.load(End + row) - start
    offset = tl.load(Offset + row)
    own, _stands = _own_positive(Own, row, start, size, OWN)
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
            if OWN != NOWHERE:
                if not INCLUDE_SELF:
                    others = others & (j != own)[None, :] & (k != own)[:, None]
            smooth = sigmoid(s_k[:, None] - s_j[None, :], inv_tau)
            push = (b_j[None, :] - b_k[:, None]) * smooth * (1.0 - smooth) * inv_tau
            slope += tl.sum(tl.where(others, push, 0.0), 1)
        tl.store(PosSlope + offset + k, slope, mask=k < size)


def forward(state: TileState, out: Tensor, call: LossCall, pairs: PositivePairs, grad: bool) -> None:
    """Writes the loss, or its terms, into `out`, and into the state what its backward needs."""
    q, g, rule = state.queries, state.gallery, call.rule
    fill_units(q, call.queries)
    if call.gallery is not None:
        fill_units(g, call.gallery)
    fill_positive_scores(state, call, pairs)
    if is_symmetric(call):
        symmetric_forward.count_ranks(state, call, pairs)
    else:
        _count_ranks(state, call, pairs)
    finish_rows(state, call, pairs, grad)
    norms = None if call.gallery is None else g.norms
    reduce_rows(out, state.factors, state.stats, q.norms, norms, rule, call.as_terms, bounded=True)


def _count_ranks(state: TileState, call: LossCall, pairs: PositivePairs) -> None:
    q, g, (M, N) = state.queries, state.gallery, call.shape
    ranks, calibration = call.rule.ranks, call.rule.calibration
    row_tiles, splits, passes, tiles = rank_grid(call, pairs)
    launch(_rank_tiles, (row_tiles, splits, passes),
        q.hi, q.lo, g.hi, g.lo, pairs.start, pairs.end, pairs.offset, state.positive_scores,
        state.rank_neg, state.slope_neg, state.neg_sum, state.neg_count, M, N, pairs.total, tiles,
        *call.rule.rank_numbers,
        ranks.negligible if ranks else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=call.rule.is_supap, CALIBRATE=calibration is not None,
        KS=pairs.positives_at_once, DIM=q.dimensions, DEPTH=DEPTH, BM=TILE, **pairs.tile,
    )  # fmt: skip


def finish_rows(state: TileState, call: LossCall, pairs: PositivePairs, grad: bool) -> None:
    """AP and calibration of every row, from the counted ranks; SmoothAP's positives among each other."""
    M, N = call.shape
    ranks, calibration = call.rule.ranks, call.rule.calibration
    runs = (pairs.start, pairs.end, pairs.offset, pairs.own)
    block = min(64, max(pairs.largest, 2))
    own = {"OWN": pairs.own_mode(call), "INCLUDE_SELF": call.rule.include_self, "KS": block}
    warps = 1 if block <= 16 else 4
    inv_tau = 1 / ranks.tau if ranks else 0.0
    launch(_rows_from_ranks, (M,),
        *runs, state.positive_scores, state.rank_neg, state.slope_neg, state.neg_sum, state.neg_count, state.weights,
        state.by_pos, state.positive_slopes, state.stats, M, N, pairs.total, len(state.rank_neg), inv_tau,
        ranks.steepest if ranks else 0.0,
        calibration.alpha if calibration else 0.0,
        RANKS=ranks is not None, SUPAP=call.rule.is_supap, CALIBRATE=calibration is not None,
        ALL=calibration is not None and calibration.average == "all", **own, **measure_constants(call.rule),
        SPLITS=min(32, triton.next_power_of_2(len(state.rank_neg))),
        num_warps=warps,
    )  # fmt: skip
    if grad and ranks is not None and not call.rule.is_supap:
        scores, slopes = state.positive_scores, state.positive_slopes
        launch(_among_positives, (M,), *runs, scores, state.by_pos, slopes, inv_tau, **own, num_warps=warps)
