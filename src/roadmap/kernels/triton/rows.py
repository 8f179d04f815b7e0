"""Rank losses when the scores are at hand: one program per query, walking its row of the score matrix.

Serves the calls that bring their own scores and masks, and small batches, where the whole (M, N) matrix is a few
megabytes and the fewest launches win: no sort, no list of pairs, no read-back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from roadmap.kernels.rules import LossRule, RankRule
from roadmap.kernels.triton.launch import launch
from roadmap.kernels.triton.layout import (
    AP_LOSS,
    COUNTED,
    NEG_COUNT,
    NEG_SHARE,
    NEG_SUM,
    NOWHERE,
    POS_COUNT,
    POS_SHARE,
    POS_SUM,
    own_column,
)
from roadmap.kernels.triton.math import step_and_slope
from roadmap.kernels.triton.measures import gain_and_slopes, measure_constants, norm_of

WIDEST = 4096  # items of a row that a program holds at once


@triton.jit
def _members(
    Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS: tl.constexpr, OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr
):
    """Which of the gallery items j are in P_i, in N_i, and relevant but not the query itself."""
    listed = j < N
    if MASKS:
        at = row.to(tl.int64) * N + j
        pos = tl.load(Pos + at, mask=listed, other=0) != 0
        neg = tl.load(Neg + at, mask=listed, other=0) != 0
        pairs = pos
    else:
        same = tl.load(GLabels + j, mask=listed, other=0) == tl.load(QLabels + row)
        neg = listed & (same == 0)
        pos = listed & same
        pairs = pos
        if OWN != NOWHERE:
            pairs = pairs & (j != own)
            if not INCLUDE_SELF:
                pos = pairs
    return pos, neg, pairs


@triton.jit
def _calibration_of_row(
    S, Pos, Neg, QLabels, GLabels, Stats, row, own, M, N, alpha, beta,
    ALL: tl.constexpr, MASKS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pos_sum = 0.0
    pos_count = 0.0
    neg_sum = 0.0
    neg_count = 0.0
    pos_pairs = 0.0
    neg_pairs = 0.0
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = tl.load(S + row.to(tl.int64) * N + j, mask=j < N, other=0.0)
        _pos, neg, pairs = _members(Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS, OWN, False)
        below = pairs & (s < alpha)
        above = neg & (s > beta)
        pos_sum += tl.sum(tl.where(below, alpha - s, 0.0), 0)
        neg_sum += tl.sum(tl.where(above, s - beta, 0.0), 0)
        pos_count += tl.sum(below.to(tl.float32), 0)
        neg_count += tl.sum(above.to(tl.float32), 0)
        pos_pairs += tl.sum(pairs.to(tl.float32), 0)
        neg_pairs += tl.sum(neg.to(tl.float32), 0)
    store_calibration(Stats, row, M, pos_sum, pos_count, pos_pairs, neg_sum, neg_count, neg_pairs, ALL)


@triton.jit
def store_calibration(
    Stats, row, M, pos_sum, pos_count, pos_pairs, neg_sum, neg_count, neg_pairs, ALL: tl.constexpr, mask=None
):
    """One row's share of Eq. (7): over the violating pairs of the batch, or over each query's own pairs."""
    pos_share = 1.0
    neg_share = 1.0
    if ALL:
        pos_share = 1.0 / tl.maximum(pos_pairs, 1.0)
        neg_share = 1.0 / tl.maximum(neg_pairs, 1.0)
        pos_count = (pos_pairs > 0).to(tl.float32)
        neg_count = (neg_pairs > 0).to(tl.float32)
    tl.store(Stats + M * POS_SUM + row, pos_sum * pos_share, mask=mask)
    tl.store(Stats + M * POS_COUNT + row, pos_count, mask=mask)
    tl.store(Stats + M * NEG_SUM + row, neg_sum * neg_share, mask=mask)
    tl.store(Stats + M * NEG_COUNT + row, neg_count, mask=mask)
    tl.store(Stats + M * POS_SHARE + row, pos_share + pos_sum * 0.0, mask=mask)
    tl.store(Stats + M * NEG_SHARE + row, neg_share + neg_sum * 0.0, mask=mask)


@triton.jit
def _whole_row(
    S, Pos, Neg, QLabels, GLabels, Slope, row, own, size, N, inv_tau, rho_tau, delta, jump, top, scale,
    SUPAP: tl.constexpr, MASKS: tl.constexpr, OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr, WITH_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr, MEASURE: tl.constexpr, CUTS: tl.constexpr, REACHABLE: tl.constexpr,
):  # fmt: skip
    """Sum of the gains of one query whose row fits into one block, and its row of the slope."""
    j = tl.arange(0, BLOCK)
    base = row.to(tl.int64) * N
    s = tl.load(S + base + j, mask=j < N, other=0.0)
    pos, neg, _pairs = _members(Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS, OWN, INCLUDE_SELF)
    ordinal = tl.cumsum(pos.to(tl.int32), 0)
    ap = 0.0
    # sums of sums: one long sum over hundreds of positives would be off by several times what plain float32 is
    total = tl.zeros((BLOCK,), tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    for which in range(1, size + 1):
        chosen = pos & (ordinal == which)
        s_k = tl.sum(tl.where(chosen, s, 0.0), 0)
        others = pos & (chosen == 0)
        value, slope = step_and_slope(s - s_k, inv_tau, rho_tau, delta, jump, top, SUPAP)
        rank_neg = tl.sum(tl.where(neg, value, 0.0), 0)
        slope_neg = tl.sum(tl.where(neg, slope, 0.0), 0)
        slope_pos = 0.0
        if SUPAP:
            rank_pos = 1.0 + tl.sum((others & (s >= s_k)).to(tl.float32), 0)
        else:
            rank_pos = 1.0 + tl.sum(tl.where(others, value, 0.0), 0)
            slope_pos = tl.sum(tl.where(others, slope, 0.0), 0)
        gain, by_pos, weight = gain_and_slopes(rank_pos, rank_neg, size, scale, MEASURE, CUTS, REACHABLE)
        ap += gain
        if WITH_SLOPE:
            grad = tl.where(neg, -weight * slope, 0.0)
            at_k = -weight * slope_neg
            if not SUPAP:
                grad += tl.where(others, by_pos * slope, 0.0)
                at_k += by_pos * slope_pos
            part += tl.where(chosen, -at_k, grad)
            full = which % 16 == 0
            total = tl.where(full, total + part, total)
            part = tl.where(full, 0.0, part)
    if WITH_SLOPE:
        tl.store(Slope + base + j, total + part, mask=j < N)
    return ap


@triton.jit
def _rank_rows(
    S, Pos, Neg, QLabels, GLabels, Own, Slope, Stats, M, N, inv_tau, rho_tau, delta, jump, top, alpha, beta,
    RANKS: tl.constexpr, SUPAP: tl.constexpr, CALIBRATE: tl.constexpr, ALL: tl.constexpr, MASKS: tl.constexpr,
    OWN: tl.constexpr, INCLUDE_SELF: tl.constexpr, WITH_SLOPE: tl.constexpr, BLOCK: tl.constexpr,
    MEASURE: tl.constexpr, CUTS: tl.constexpr, REACHABLE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """AP_i of one query by counting, and ∂AP_i/∂s over its row: the equations of kernels/blocked.py."""
    row = tl.program_id(0)
    own = own_column(Own, row, OWN)
    base = row.to(tl.int64) * N
    if CALIBRATE:
        _calibration_of_row(S, Pos, Neg, QLabels, GLabels, Stats, row, own, M, N, alpha, beta, ALL, MASKS, OWN, BLOCK)
    if RANKS:
        size = 0
        for start in range(0, N, BLOCK):
            j = start + tl.arange(0, BLOCK)
            pos, _neg, _pairs = _members(Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS, OWN, INCLUDE_SELF)
            size += tl.sum(pos.to(tl.int32), 0)
            if WITH_SLOPE and not ONE:
                tl.store(Slope + base + j, tl.zeros((BLOCK,), tl.float32), mask=j < N)
        norm = norm_of(size, MEASURE, BLOCK)
        share = 1.0 / norm
        ap = 0.0
        if ONE:
            ap = _whole_row(
                S, Pos, Neg, QLabels, GLabels, Slope, row, own, size, N,
                inv_tau, rho_tau, delta, jump, top, share * inv_tau,
                SUPAP, MASKS, OWN, INCLUDE_SELF, WITH_SLOPE, BLOCK, MEASURE, CUTS, REACHABLE,
            )  # fmt: skip
        for k_start in range(0, 0 if ONE else N, BLOCK):
            k_all = k_start + tl.arange(0, BLOCK)
            s_all = tl.load(S + base + k_all, mask=k_all < N, other=0.0)
            k_pos, _neg, _pairs = _members(Pos, Neg, QLabels, GLabels, row, own, k_all, N, MASKS, OWN, INCLUDE_SELF)
            ordinal = tl.cumsum(k_pos.to(tl.int32), 0)
            for which in range(1, tl.sum(k_pos.to(tl.int32), 0) + 1):
                chosen = k_pos & (ordinal == which)
                k = tl.sum(tl.where(chosen, k_all, 0), 0)
                s_k = tl.sum(tl.where(chosen, s_all, 0.0), 0)
                rank_pos = 1.0
                rank_neg = 0.0
                slope_pos = 0.0
                slope_neg = 0.0
                for start in range(0, N, BLOCK):
                    j = start + tl.arange(0, BLOCK)
                    s = tl.load(S + base + j, mask=j < N, other=0.0)
                    pos, neg, _pairs = _members(Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS, OWN, INCLUDE_SELF)
                    pos = pos & (j != k)
                    value, slope = step_and_slope(s - s_k, inv_tau, rho_tau, delta, jump, top, SUPAP)
                    rank_neg += tl.sum(tl.where(neg, value, 0.0), 0)
                    slope_neg += tl.sum(tl.where(neg, slope, 0.0), 0)
                    if SUPAP:
                        rank_pos += tl.sum((pos & (s >= s_k)).to(tl.float32), 0)
                    else:
                        rank_pos += tl.sum(tl.where(pos, value, 0.0), 0)
                        slope_pos += tl.sum(tl.where(pos, slope, 0.0), 0)
                gain, by_pos, weight = gain_and_slopes(
                    rank_pos, rank_neg, size, share * inv_tau, MEASURE, CUTS, REACHABLE
                )
                ap += gain
                if WITH_SLOPE:
                    by_neg = -weight
                    for start in range(0, N, BLOCK):
                        j = start + tl.arange(0, BLOCK)
                        s = tl.load(S + base + j, mask=j < N, other=0.0)
                        pos, neg, _pairs = _members(
                            Pos, Neg, QLabels, GLabels, row, own, j, N, MASKS, OWN, INCLUDE_SELF
                        )
                        _value, slope = step_and_slope(s - s_k, inv_tau, rho_tau, delta, jump, top, SUPAP)
                        grad = tl.where(neg, by_neg * slope, 0.0)
                        at_k = by_neg * slope_neg
                        if not SUPAP:
                            grad += tl.where(pos, by_pos * slope, 0.0)
                            at_k += by_pos * slope_pos
                        grad = tl.where(j == k, -at_k, grad)
                        # Each thread adds to the elements it wrote itself, so no barrier is needed.
                        before = tl.load(Slope + base + j, mask=j < N, other=0.0)
                        tl.store(Slope + base + j, before + grad, mask=j < N)
        tl.store(Stats + M * AP_LOSS + row, tl.where(size > 0, 1.0 - ap / norm, 0.0))
        tl.store(Stats + M * COUNTED + row, tl.where(size > 0, 1.0, 0.0))


def ap_and_slope(
    scores: Tensor, positives: Tensor, negatives: Tensor, rule: RankRule, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """As `blocked.ap_and_slope`, on a GPU."""
    scores, positives, negatives = scores.contiguous(), positives.contiguous(), negatives.contiguous()
    stats = torch.empty(2, len(scores), device=scores.device, dtype=torch.float32)
    slope = torch.empty_like(scores) if with_slope else None
    launch_rows(
        scores, positives.view(torch.uint8), negatives.view(torch.uint8), None, None, None, slope, stats,
        LossRule(rule, None), own_mode=NOWHERE.value,
    )  # fmt: skip
    return stats[1] - stats[0], slope


def launch_rows(
    scores: Tensor,
    positives: Tensor | None,
    negatives: Tensor | None,
    query_labels: Tensor | None,
    gallery_labels: Tensor | None,
    own: Tensor | None,
    slope: Tensor | None,
    stats: Tensor,
    rule: LossRule,
    own_mode: int,
) -> None:
    M, N = scores.shape
    ranks, calibration = rule.ranks, rule.calibration
    warps = 4 if N <= 1024 else 8  # a thread holds at most 16 items of each row that it keeps
    block = max(32 * warps, min(WIDEST, triton.next_power_of_2(N)))  # every thread owns an element: see `before` above
    if M == 0:
        return
    launch(_rank_rows, (M,),
        scores, positives, negatives, query_labels, gallery_labels, own, slope, stats, M, N,
        *rule.rank_numbers,
        calibration.alpha if calibration else 0.0,
        calibration.beta if calibration else 0.0,
        RANKS=ranks is not None,
        SUPAP=rule.is_supap,
        CALIBRATE=calibration is not None,
        ALL=calibration is not None and calibration.average == "all",
        MASKS=positives is not None,
        OWN=own_mode,
        INCLUDE_SELF=rule.include_self,
        WITH_SLOPE=slope is not None,
        BLOCK=block,
        ONE=block >= N,
        **measure_constants(rule),
        num_warps=warps,
    )  # fmt: skip
