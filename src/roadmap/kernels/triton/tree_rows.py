"""H-AP or NDCG of a query from the lists of its positives: one program a row. The equations of kernels/graded.py.

What is no positive is less relevant than each of them, and was counted before (stored.py): here positives meet each
other, by the grades of their levels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from roadmap.kernels.trees import TreeRule
from roadmap.kernels.triton.layout import AP_LOSS, BOUND, COUNTED
from roadmap.kernels.triton.math import step_and_slope

SHARED = tl.constexpr(0)
EACH = tl.constexpr(1)
NESTED = tl.constexpr(2)
_KINDS = {"shared": SHARED.value, "levels": EACH.value, "nested": NESTED.value}


def tree_constants(rule: TreeRule) -> dict[str, Any]:
    """The rule as the constants that a kernel is compiled with."""
    levels = len(rule.weights)
    return {
        "NDCG": rule.measure.measure == "ndcg",
        "KIND": _KINDS[rule.kind],
        "WEIGHTS": tuple(float(w) for w in rule.counted_weights),
        "LEVELS": max(2, triton.next_power_of_2(levels + 1)),
    }


@triton.jit
def _sizes_of_levels(Levels, offset, size, LEVELS: tl.constexpr, KS: tl.constexpr):
    """How many positives share exactly each level, (LEVELS,); none share level 0."""
    level = tl.arange(0, LEVELS)
    count = tl.zeros((LEVELS,), tl.float32)
    for first in range(0, size, KS):
        k = first + tl.arange(0, KS)
        shared = tl.load(Levels + offset + k, mask=k < size, other=0)
        here = (shared[:, None] == level[None, :]) & (level > 0)[None, :]
        count += tl.sum(here.to(tl.float32), 0)
    return count


@triton.jit
def _grades_of_levels(count, KIND: tl.constexpr, WEIGHTS: tl.constexpr, LEVELS: tl.constexpr):
    """The grade of each level, (LEVELS,). Divided with rounding, so that 2/6 and 1/3 are one grade."""
    level = tl.arange(0, LEVELS)
    grade = count * 0.0
    for n in tl.static_range(len(WEIGHTS)):
        weight = count * 0.0 + WEIGHTS[n]
        if KIND == EACH:
            grade = tl.where(level == n + 1, weight, grade)
        if KIND == SHARED:
            grade = tl.where(level == n + 1, tl.div_rn(weight, tl.maximum(count, 1.0)), grade)
        if KIND == NESTED:
            reached = count * 0.0 + tl.sum(tl.where(level >= n + 1, count, 0.0), 0)
            grade = tl.where(level >= n + 1, grade + tl.div_rn(weight, tl.maximum(reached, 1.0)), grade)
    return grade


@triton.jit
def _grades(Levels, at, mask, grade, LEVELS: tl.constexpr):
    """The grades of listed items, from those of the levels; 0 outside."""
    shared = tl.load(Levels + at, mask=mask, other=0)
    here = shared[:, None] == tl.arange(0, LEVELS)[None, :]
    return tl.sum(tl.where(here, grade[None, :], 0.0), 1)


@triton.jit
def _best(count, grade, size, NDCG: tl.constexpr, LEVELS: tl.constexpr, KS: tl.constexpr):
    """What the sum over a query's positives is divided by; 1 where there is none."""
    best = tl.sum(count * grade, 0)
    if NDCG:
        level = tl.arange(0, LEVELS)
        before = tl.sum(tl.where(level[:, None] > level[None, :], count[:, None], 0.0), 0)  # the finer levels first
        ideal = tl.zeros((KS,), tl.float32)
        for first in range(0, size, KS):
            place = (first + tl.arange(0, KS)).to(tl.float32)
            here = (place[:, None] >= before[None, :]) & (place[:, None] < (before + count)[None, :])
            ideal += tl.sum(tl.where(here, grade[None, :], 0.0), 1) / tl.log2(2.0 + place)
        best = tl.sum(ideal, 0)
    return tl.where(size > 0, best, 1.0)


@triton.jit
def _pull(t, beta, gamma, leak):
    """H^>(t) and its derivative."""
    above = t > 0
    line = beta * t + gamma
    value = tl.where(above, tl.minimum(line, 1.0), leak * t)
    return value, tl.where(above, tl.where(line < 1.0, beta, 0.0), leak)


@triton.jit(do_not_specialize=["row_first", "pairs", "splits"])
def graded_rows(
    Size, Offset, Levels, Scores, RankNeg, SlopeNeg, Grades, Weight, PullWeight, PosSlope, Stats, M, row_first, pairs,
    splits, inv_tau, rho_tau, delta, jump, top, steepest, beta, gamma, leak,
    PULL: tl.constexpr, NDCG: tl.constexpr, KIND: tl.constexpr, WEIGHTS: tl.constexpr, LEVELS: tl.constexpr,
    KS: tl.constexpr,
):  # fmt: skip
    """The measure of one query; of each positive its grade, minus the derivative of the measure by its rank (Weight),
    that by its H-rank times its grade (PullWeight), and what both say of its own score (PosSlope)."""
    row = tl.program_id(0).to(tl.int64) + row_first
    size = tl.load(Size + row)
    offset = tl.load(Offset + row)
    count = _sizes_of_levels(Levels, offset, size, LEVELS, KS)
    grade = _grades_of_levels(count, KIND, WEIGHTS, LEVELS)
    best = _best(count, grade, size, NDCG, LEVELS, KS)
    value = 0.0
    weights = 0.0
    pulls = 0.0
    largest = 0.0
    for k_first in range(0, size, KS):
        k = k_first + tl.arange(0, KS)
        ok = k < size
        s_k = tl.load(Scores + offset + k, mask=ok, other=0.0)
        g_k = _grades(Levels, offset + k, ok, grade, LEVELS)
        rank = tl.full((KS,), 1.0, tl.float32)
        slope = tl.zeros((KS,), tl.float32)
        for split in range(0, splits):
            at = tl.cast(split, tl.int64) * pairs + offset + k
            rank += tl.load(RankNeg + at, mask=ok, other=0.0)
            slope += tl.load(SlopeNeg + at, mask=ok, other=0.0)
        h_rank = g_k
        pulled = tl.zeros((KS,), tl.float32)
        for j_first in range(0, size, KS):
            j = j_first + tl.arange(0, KS)
            s_j = tl.load(Scores + offset + j, mask=j < size, other=0.0)
            g_j = _grades(Levels, offset + j, j < size, grade, LEVELS)
            others = (j < size)[None, :] & (j[None, :] != k[:, None])
            less = others & (g_j[None, :] < g_k[:, None])
            before = others & (s_j[None, :] >= s_k[:, None])
            t = s_j[None, :] - s_k[:, None]
            step, rise = step_and_slope(t, inv_tau, rho_tau, delta, jump, top, True)
            rank += tl.sum(tl.where(less, step, before.to(tl.float32)), 1)
            slope += tl.sum(tl.where(less, rise, 0.0), 1) * inv_tau
            if not NDCG:
                shared = tl.where(before, tl.minimum(g_j[None, :], g_k[:, None]), 0.0)
                if PULL:
                    more = others & (g_j[None, :] > g_k[:, None])
                    height, pull_rise = _pull(t, beta, gamma, leak)
                    shared = tl.where(more, g_k[:, None] * height, shared)
                    pulled += tl.sum(tl.where(more, pull_rise, 0.0), 1)
                h_rank += tl.sum(shared, 1)
        if NDCG:
            log = tl.log2(1.0 + rank)
            gain = g_k / log
            weight = g_k / (0.6931471805599453 * (1.0 + rank) * log * log * best)
        else:
            gain = h_rank / rank
            weight = h_rank / (rank * rank * best)
        own = weight * slope
        if PULL:
            pull_weight = g_k / (rank * best)
            own -= pull_weight * pulled
            pulls += tl.sum(tl.where(ok, pull_weight, 0.0), 0)
            tl.store(PullWeight + offset + k, pull_weight, mask=ok)
        value += tl.sum(tl.where(ok, gain, 0.0), 0)
        weights += tl.sum(tl.where(ok, tl.abs(weight), 0.0), 0)
        largest = tl.maximum(largest, tl.max(tl.where(ok, tl.abs(own), 0.0), 0))
        tl.store(Grades + offset + k, g_k, mask=ok)
        tl.store(Weight + offset + k, weight, mask=ok)
        tl.store(PosSlope + offset + k, own, mask=ok)
    tl.store(Stats + M * AP_LOSS + row, tl.where(size > 0, 1.0 - value / best, 0.0))
    tl.store(Stats + M * COUNTED + row, (size > 0).to(tl.float32))
    tl.store(Stats + M * BOUND + row, weights * steepest + largest + pulls * tl.maximum(beta, leak))


@triton.jit(do_not_specialize=["row_first"])
def among_grades(
    Size, Offset, Scores, Grades, Weight, PullWeight, PosSlope, row_first,
    inv_tau, rho_tau, delta, jump, top, beta, gamma, leak, PULL: tl.constexpr, KS: tl.constexpr,
):  # fmt: skip
    """Adds to the derivative by s_j of each positive what the ranks of the others say of it: it counts in the rank of
    those that are more relevant, and, with PULL, in the H-rank of those that are less."""
    row = tl.program_id(0).to(tl.int64) + row_first
    size = tl.load(Size + row)
    offset = tl.load(Offset + row)
    for j_first in range(0, size, KS):
        j = j_first + tl.arange(0, KS)
        s_j = tl.load(Scores + offset + j, mask=j < size, other=0.0)
        g_j = tl.load(Grades + offset + j, mask=j < size, other=0.0)
        slope = tl.load(PosSlope + offset + j, mask=j < size, other=0.0)
        for k_first in range(0, size, KS):
            k = k_first + tl.arange(0, KS)
            s_k = tl.load(Scores + offset + k, mask=k < size, other=0.0)
            g_k = tl.load(Grades + offset + k, mask=k < size, other=0.0)
            weight = tl.load(Weight + offset + k, mask=k < size, other=0.0)
            t = s_j[:, None] - s_k[None, :]
            _step, rise = step_and_slope(t, inv_tau, rho_tau, delta, jump, top, True)
            slope -= tl.sum(tl.where(g_j[:, None] < g_k[None, :], weight[None, :] * rise, 0.0), 1) * inv_tau
            if PULL:
                pull_weight = tl.load(PullWeight + offset + k, mask=k < size, other=0.0)
                _height, pull_rise = _pull(t, beta, gamma, leak)
                slope += tl.sum(tl.where(g_j[:, None] > g_k[None, :], pull_weight[None, :] * pull_rise, 0.0), 1)
        tl.store(PosSlope + offset + j, slope, mask=j < size)
