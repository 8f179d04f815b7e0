"""Graded relevance and its losses transcribed: Python floats and loops, with gradients derived by hand.

A grade above 0 is a positive, 0 a negative, -1 an item that is in no ranking; as in `literal`, s[i][j] are scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .literal import Matrix, ValueAndGradient, sigmoid, zeros

LEFT_OUT = -1.0
Path = list[int]


# --- how relevant


def shared_levels(a: Path, b: Path) -> int:
    """How deep the deepest level is that two paths have in common; -1 is not known."""
    found = 0
    for level, (x, y) in enumerate(zip(a, b, strict=True), 1):
        if x == y and x != -1:
            found = level
    return found


def tree_grades(
    queries: list[Path], gallery: list[Path], own: list[int], include_self: bool, kind: str, alpha: float = 1.0
) -> Matrix:
    """rel of HAPPIER: l^alpha over the number of the query's positives at level l; or l^alpha; or, nested, the sum over
    p <= l of (p^alpha - (p-1)^alpha) over the number of positives at level p or deeper."""
    found = []
    for query, place in zip(queries, own, strict=True):
        levels = [shared_levels(query, item) for item in gallery]
        positives = [j for j, level in enumerate(levels) if level > 0 and (include_self or j != place)]
        row = []
        for j, level in enumerate(levels):
            if j not in positives:
                row.append(LEFT_OUT if j == place else 0.0)
            elif kind == "levels":
                row.append(level**alpha)
            elif kind == "shared":
                row.append(level**alpha / len([m for m in positives if levels[m] == level]))
            else:
                total = 0.0
                for p in range(1, level + 1):
                    coarser = (p - 1) ** alpha if p > 1 else 0.0
                    total += (p**alpha - coarser) / len([m for m in positives if levels[m] >= p])
                row.append(total)
        found.append(row)
    return found


def set_grades(
    queries: list[set[int]], gallery: list[set[int]], own: list[int], include_self: bool, kind: str
) -> Matrix:
    found = []
    for query, place in zip(queries, own, strict=True):
        row = []
        for j, item in enumerate(gallery):
            grade = float(len(query & item))
            if kind == "iou" and grade:
                grade /= len(query | item)
            row.append(LEFT_OUT if j == place and not (include_self and grade) else grade)
        found.append(row)
    return found


def gains(grades: Matrix) -> Matrix:
    return [[2**g - 1 if g > 0 else g for g in row] for row in grades]


# --- the losses


@dataclass(frozen=True)
class Steps:
    """H⁻ of Eq. (4), and H^> of H-rank where `pull` (beta, gamma, leak) is given; `exact`: H in all places."""

    tau: float = 0.01
    rho: float = 100.0
    delta: float | None = None
    pull: tuple[float, float, float] | None = None
    exact: bool = False

    def worse(self, t: float) -> tuple[float, float]:
        """What a less relevant item counts in the rank, and the slope."""
        where = self.tau * math.log(0.99 / 0.01) if self.delta is None else self.delta
        if self.exact:
            return (1.0 if t >= 0 else 0.0), 0.0
        if t > where:
            return self.rho * (t - where) + sigmoid(where / self.tau) + 0.5, self.rho
        value = sigmoid(t / self.tau)
        return value + (0.5 if t >= 0 else 0.0), value * sigmoid(-t / self.tau) / self.tau

    def better(self, t: float) -> tuple[float, float]:
        """What a more relevant item counts in the H-rank, and the slope."""
        if self.pull is None:
            return (1.0 if t >= 0 else 0.0), 0.0
        beta, gamma, leak = self.pull
        if t <= 0:
            return leak * t, leak
        return (beta * t + gamma, beta) if beta * t + gamma < 1 else (1.0, 0.0)


PAPER = Steps()


def _rank(s: list[float], g: list[float], k: int, steps: Steps) -> tuple[float, list[float]]:
    """rank(k) and its slopes by s_j; that by s_k is minus their sum."""
    rank, slopes = 1.0, [0.0] * len(s)
    for j in range(len(s)):
        if j == k or g[j] < 0:
            continue
        if g[j] < g[k]:
            value, slopes[j] = steps.worse(s[j] - s[k])
            rank += value
        elif s[j] >= s[k]:
            rank += 1
    return rank, slopes


def _h_rank(s: list[float], g: list[float], k: int, steps: Steps) -> tuple[float, list[float]]:
    """H-rank(k) = rel(k) + sum over positives j of min(rel(k), rel(j)) H(s_j - s_k), and its slopes."""
    rank, slopes = g[k], [0.0] * len(s)
    for j in range(len(s)):
        if j == k or g[j] <= 0:
            continue
        if g[j] > g[k]:
            value, slope = steps.better(s[j] - s[k])
            rank += g[k] * value
            slopes[j] = g[k] * slope
        elif s[j] >= s[k]:
            rank += min(g[j], g[k])
    return rank, slopes


def _mean(s: Matrix, g: Matrix, steps: Steps, measure: str) -> ValueAndGradient:
    """1 - the mean of a measure over the queries that have a positive, and its gradient."""
    gradient, total = zeros(s), 0.0
    counting = [i for i, row in enumerate(g) if any(grade > 0 for grade in row)]
    for i in counting:
        positives = [k for k, grade in enumerate(g[i]) if grade > 0]
        if measure == "h_ap":
            ideal = sum(g[i][k] for k in positives)
        else:
            best = sorted((g[i][k] for k in positives), reverse=True)
            ideal = sum(gain / math.log2(1 + place) for place, gain in enumerate(best, 1))
        weight = 1 / (ideal * len(counting))
        total += 1 / len(counting)
        for k in positives:
            rank, d_rank = _rank(s[i], g[i], k, steps)
            h_rank, d_h_rank = _h_rank(s[i], g[i], k, steps)
            if measure == "h_ap":
                total -= weight * h_rank / rank
                by_rank, by_h_rank = h_rank / rank**2, -1 / rank
            else:
                total -= weight * g[i][k] / math.log2(1 + rank)
                by_rank, by_h_rank = g[i][k] / math.log2(1 + rank) ** 2 / (math.log(2) * (1 + rank)), 0.0
            for j in range(len(s[i])):
                slope = weight * (by_rank * d_rank[j] + by_h_rank * d_h_rank[j])
                gradient[i][j] += slope
                gradient[i][k] -= slope
    return total, gradient


def h_ap_loss(s: Matrix, g: Matrix, steps: Steps = PAPER) -> ValueAndGradient:
    """1 - mean H-AP: sum over positives of H-rank / rank, over the sum of their grades."""
    return _mean(s, g, steps, "h_ap")


def ndcg_loss(s: Matrix, g: Matrix, steps: Steps = PAPER) -> ValueAndGradient:
    """1 - mean NDCG of gains g: sum of gain / log2(1 + rank), over the same in the best order."""
    return _mean(s, g, steps, "ndcg")


def cluster_loss(s: Matrix, classes: list[int], temperature: float) -> ValueAndGradient:
    """Mean of -log softmax(s / temperature) at the class, over the items whose class is known; s are cosines."""
    gradient, total = zeros(s), 0.0
    counting = [i for i, label in enumerate(classes) if label != -1]
    for i in counting:
        weights = [math.exp(x / temperature) for x in s[i]]
        total -= math.log(weights[classes[i]] / sum(weights)) / len(counting)
        for c, weight in enumerate(weights):
            hit = 1.0 if c == classes[i] else 0.0
            gradient[i][c] += (weight / sum(weights) - hit) / temperature / len(counting)
    return total, gradient
