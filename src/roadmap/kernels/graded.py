"""Measures of graded relevance from a score matrix by plain torch, a block of positive pairs at a time.

An item has a grade: above 0 it is a positive, 0 is a negative, below 0 (`LEFT_OUT`) it is not in the ranking. The pair
(i, k) of a query and one of its positives owns row i of the scores, shifted by s_k, as in `blocked`:

    rank(k)   = 1 + Σ_{g_j >= g_k} H(s_j - s_k) + Σ_{g_j < g_k} H⁻(s_j - s_k)
    H-rank(k) = g_k + Σ_{0 < g_j <= g_k} g_j H(s_j - s_k) + g_k Σ_{g_j > g_k} H^>(s_j - s_k)
    H-AP_i    = Σ_k H-rank(k) / rank(k) / Σ_k g_k
    NDCG_i    = Σ_k G_k / log2(1 + rank(k)) / Σ_k G_k / log2(1 + ideal rank(k)),   gain G_k = g_k or 2^g_k - 1

H is the step with H(0) = 1 and has no gradient. H⁻ of Eq. (4) is nowhere below it, H^> (`PullRule`) nowhere above it:
what comes out is a lower bound of the exact measure, which is H in all places (`ranks` None). With r, h the two ranks

    ∂H-AP_i/∂r = -h / r² / Σ g      ∂H-AP_i/∂h = 1 / r / Σ g      ∂NDCG_i/∂r = -G_k ln2 / ((1 + r) ln²(1 + r)) / ideal
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roadmap.kernels.blocked import _ranks as ranks_and_slopes
from roadmap.kernels.rules import RankRule

LEFT_OUT = -1.0  # the grade of an item that is not in a query's ranking
CPU_BLOCK, GPU_BLOCK = 1 << 18, 1 << 22  # elements in flight, in some ten arrays: caches of a CPU, width of a GPU
PAIRS_AT_ONCE = 1 << 22  # places of a score matrix in which pairs are looked for: bounds their list

Measure = Literal["h_ap", "ndcg"]


@dataclass(frozen=True)
class PullRule:
    """H^>: min(beta t + gamma, 1) for t > 0, leak · t below. A lower bound of the step, with a slope that pulls a more
    relevant item above a less relevant one."""

    beta: float
    gamma: float
    leak: float


@dataclass(frozen=True)
class GradedRule:
    """Which measure, and by which H: `ranks` counts what is less relevant (None: the step, exactly), `pull` what is
    more relevant in the H-rank (None: the step). `exponential`: the gain of NDCG is 2^grade - 1, not the grade."""

    measure: Measure
    ranks: RankRule | None = None
    pull: PullRule | None = None
    exponential: bool = False

    def gains(self, grades: Tensor) -> Tensor:
        """Of grades that are not negative. Not for a comparison: 2^x of equal x may differ in its last bit, between the
        lanes of a vector and the rest of a row."""
        return torch.exp2(grades) - 1 if self.exponential else grades


def values_and_slope(
    scores: Tensor, grades: Tensor, rule: GradedRule, with_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """The measure of every query, (M,), 0 where it has no positive; and its derivative by s_ij, (M, N), when asked
    for. Scores and grades are (M, N) of one float type."""
    values = scores.new_zeros(len(scores))
    slope = torch.zeros_like(scores) if with_slope else None
    share = 1 / _ideal(grades, rule)
    for query, k in _pair_blocks(grades > 0):
        block = _Block(scores[query], grades[query], k, rule, with_slope)
        _add(values, query, block.values)
        if slope is not None:
            _add(slope, query, block.slopes() * share[query, None])
    return values * share, slope


def _ideal(grades: Tensor, rule: GradedRule) -> Tensor:
    """What the sum over a query's positives is divided by, (M,); 1 where there is none."""
    gains = rule.gains(grades.clamp(min=0))
    if rule.measure == "ndcg":
        places = torch.arange(2, grades.shape[1] + 2, device=grades.device, dtype=grades.dtype)
        gains = gains.sort(dim=1, descending=True).values / places.log2()
    total = gains.sum(1)
    return torch.where(total > 0, total, 1.0)


def _pair_blocks(positives: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and positives, (pairs,) each, so many at a time that a row for each of them stays small."""
    M, N = positives.shape
    height = max(1, (CPU_BLOCK if positives.device.type == "cpu" else GPU_BLOCK) // max(N, 1))
    rows = max(1, PAIRS_AT_ONCE // max(N, 1))
    for top in range(0, M, rows):
        query, k = positives[top : top + rows].nonzero(as_tuple=True)
        for first in range(0, len(k), height):
            yield query[first : first + height] + top, k[first : first + height]


def _add(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds to rows that may come several times; on a GPU in an order of its own that does not change."""
    if total.device.type == "cpu":
        total.index_add_(0, rows, values)
    else:
        total.index_put_((rows,), values, accumulate=True)


class _Block:
    """Some pairs, each with the row of its query: scores and grades are (pairs, N), k is (pairs,)."""

    def __init__(self, scores: Tensor, grades: Tensor, k: Tensor, rule: GradedRule, with_slope: bool) -> None:
        self.pair, self.k, self.rule = torch.arange(len(k), device=k.device), k, rule
        self.grade = grades[self.pair, k]
        self.gain = rule.gains(self.grade)
        self.t = scores - scores[self.pair, k][:, None]
        grades[self.pair, k] = LEFT_OUT  # j != k
        self.grades = grades
        self.rank, self.rank_slope = self._rank(with_slope)
        self.h_rank: Tensor | None = None
        self.h_rank_slope: Tensor | None = None
        if rule.measure == "h_ap":
            self.h_rank, self.h_rank_slope = self._h_rank()

    def _rank(self, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """rank(k), and ∂rank(k)/∂s_j."""
        listed = self.grades >= 0
        if self.rule.ranks is None:
            return 1 + ((self.t >= 0) & listed).sum(1).to(self.t.dtype), None
        worse = listed & (self.grades < self.grade[:, None])
        as_good, worse_rank, _, slope = ranks_and_slopes(self.t, listed & ~worse, worse, self.rule.ranks, with_slope)
        return as_good + worse_rank, slope

    def _h_rank(self) -> tuple[Tensor, Tensor | None]:
        """H-rank(k), and ∂H-rank(k)/∂s_j where it has a slope."""
        grade, pull = self.grade[:, None], self.rule.pull
        shared = torch.minimum(self.grades.clamp(min=0), grade) * (self.t >= 0)
        if pull is None:
            return self.grade + shared.sum(1), None
        better, above = self.grades > grade, self.t > 0
        line = pull.beta * self.t + pull.gamma
        h = torch.where(above, line.clamp(max=1), pull.leak * self.t)
        h_rank = self.grade + torch.where(better, grade * h, shared).sum(1)
        rising = torch.where(above, pull.beta * (line < 1), pull.leak)
        return h_rank, torch.where(better, grade * rising, 0.0)

    @property
    def values(self) -> Tensor:
        """What each pair adds to the sum of its query."""
        return self.gain / torch.log2(1 + self.rank) if self.h_rank is None else self.h_rank / self.rank

    def slopes(self) -> Tensor:
        """The derivative of `values` by the scores of the row, (pairs, N)."""
        if self.h_rank is None:
            by_rank = -self.gain * math.log(2) / ((1 + self.rank) * torch.log1p(self.rank).square())
        else:
            by_rank = -self.h_rank / self.rank.square()
        found = torch.zeros_like(self.t) if self.rank_slope is None else self.rank_slope * by_rank[:, None]
        if self.h_rank_slope is not None:
            found = found + self.h_rank_slope / self.rank[:, None]
        found[self.pair, self.k] = -found.sum(1)  # the place of k itself is empty so far
        return found
