"""Graded metrics of one ranking, as literally as their definitions. A level of 0 shares nothing with the query."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, groupby, permutations, product
from statistics import fmean

from .literal import values_in_order

Path = tuple[int, ...]


def shared_level(one: Path, other: Path) -> int:
    """The finest level, from 1, at which both know where they are and are at the same node; 0 for none."""
    same = [number for number, (a, b) in enumerate(zip(one, other, strict=True), start=1) if a == b and a >= 0]
    return max(same, default=0)


def relevance(levels: Sequence[int], depth: int, alpha: float) -> dict[int, float]:
    """HAPPIER: (l / L)^alpha / |Omega^(l)|, Omega^(l) the items of exactly level l."""
    return {level: (level / depth) ** alpha / count for level, count in Counter(levels).items()} | {0: 0.0}


def weighted(levels: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    """Sum over p <= l of w_p / (items of level p or finer)."""
    rel = {0: 0.0}
    for level in set(levels) - {0}:
        rel[level] = sum(weights[p - 1] / sum(other >= p for other in levels) for p in range(1, level + 1))
    return rel


def h_ap(scores: Sequence[float], levels: Sequence[int], rel: dict[int, float]) -> float:
    """Sum over positives k of H-rank+(k) / rank(k) over the sum of rel; H(0) = 1 as in Eq 1."""
    items = range(len(scores))
    positives = [k for k in items if levels[k] > 0]
    total = 0.0
    for k in positives:
        before = [j for j in items if j != k and scores[j] >= scores[k]]
        h_rank = rel[levels[k]] + sum(min(rel[levels[k]], rel[levels[j]]) for j in before if levels[j] > 0)
        total += h_rank / (1 + len(before))
    return total / sum(rel[levels[k]] for k in positives)


def ndcg(order: Sequence[int]) -> float:
    """Of the levels from the first place down."""

    def dcg(some: Sequence[int]) -> float:
        return sum((2**level - 1) / math.log2(1 + rank) for rank, level in enumerate(some, start=1))

    return dcg(order) / dcg(sorted(order, reverse=True))


def asi(order: Sequence[int]) -> float:
    """The mean over n = 1..R of |first n here and in the best ranking| / n; items of one level are alike."""
    best = sorted(order, reverse=True)
    positives = sum(level > 0 for level in order)
    return fmean((Counter(order[:n]) & Counter(best[:n])).total() / n for n in range(1, positives + 1))


def orders(scores: Sequence[float], levels: Sequence[int]) -> list[list[int]]:
    """The levels from the first place down, one list for each order of each tied group."""
    items = sorted(zip(scores, levels, strict=True), key=lambda item: -item[0])
    groups = [[level for _, level in group] for _, group in groupby(items, key=lambda item: item[0])]
    return [list(chain(*order)) for order in product(*(permutations(group) for group in groups))]


def literal_values(
    scores: Sequence[float],
    levels: Sequence[int],
    rel: dict[int, float],
    depth: int,
    ks: list[int],
    ties: str,
) -> dict[str, float]:
    """Every metric of one query that shares something with somebody; a level that nobody shares is missing."""
    every = orders(scores, levels)
    pick: Callable[[list[float]], float] = min if ties == "pessimistic" else fmean
    found = {"NDCG": pick([ndcg(order) for order in every]), "ASI": pick([asi(order) for order in every])}
    if ties == "pessimistic":
        found["H-AP"] = h_ap(scores, levels, rel)
    else:  # in an order there are no ties: its places are scores
        found["H-AP"] = fmean(h_ap([-float(place) for place in range(len(order))], order, rel) for order in every)
    for level in range(1, depth + 1):
        if any(other >= level for other in levels):
            each = [values_in_order([other >= level for other in order], ks) for order in every]
            for name in (*(f"R@{k}" for k in ks), "mAP@R"):
                found[f"level {level} {name}"] = pick([values[name] for values in each])
    return found
