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


def relevance(levels: Sequence[int], depth: int, alpha: float) -> list[float]:
    """HAPPIER: (l / L)^alpha / |Omega^(l)|, Omega^(l) the items of exactly level l."""
    count = Counter(levels)
    return [(level / depth) ** alpha / count[level] if level else 0.0 for level in levels]


def weighted(levels: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Sum over p <= l of w_p / (items of level p or finer)."""
    reached = {p: sum(level >= p for level in levels) for p in range(1, len(weights) + 1)}
    return [sum(weights[p - 1] / reached[p] for p in range(1, level + 1)) for level in levels]


def h_ap(scores: Sequence[float], rel: Sequence[float]) -> float:
    """Sum over positives k of H-rank+(k) / rank(k) over the sum of rel; H(0) = 1 as in Eq 1."""
    items = range(len(scores))
    total = 0.0
    for k in items:
        if rel[k] > 0:
            before = [j for j in items if j != k and scores[j] >= scores[k]]
            total += (rel[k] + sum(min(rel[k], rel[j]) for j in before)) / (1 + len(before))
    return total / sum(rel)


def ndcg(order: Sequence[float], gain: str = "exponential") -> float:
    """Of how close the items are, from the first place down."""

    def dcg(some: Sequence[float]) -> float:
        gains = [math.expm1(grade * math.log(2)) if gain == "exponential" else grade for grade in some]
        return sum(gained / math.log2(1 + rank) for rank, gained in enumerate(gains, start=1))

    return dcg(order) / dcg(sorted(order, reverse=True))


def asi(order: Sequence[float]) -> float:
    """The mean over n = 1..R of |first n here and in the best ranking| / n; items of one closeness are alike."""
    best = sorted(order, reverse=True)
    positives = sum(grade > 0 for grade in order)
    return fmean((Counter(order[:n]) & Counter(best[:n])).total() / n for n in range(1, positives + 1))


def orders(scores: Sequence[float]) -> list[list[int]]:
    """The items from the first place down, one list for each order of each tied group."""
    items = sorted(range(len(scores)), key=lambda item: -scores[item])
    groups = [list(group) for _, group in groupby(items, key=lambda item: scores[item])]
    return [list(chain(*order)) for order in product(*(permutations(group) for group in groups))]


def values_by_degree(
    scores: Sequence[float], closeness: Sequence[float], rel: Sequence[float], ties: str, gain: str = "exponential"
) -> dict[str, float]:
    """H-AP, ASI and NDCG of one query to whom somebody is relevant."""
    every = orders(scores)
    close = [[closeness[item] for item in order] for order in every]
    pick = pick_of(ties)
    found = {"NDCG": pick([ndcg(order, gain) for order in close]), "ASI": pick([asi(order) for order in close])}
    if ties == "pessimistic":
        return found | {"H-AP": h_ap(scores, rel)}
    # in an order there are no ties: its places are scores
    places = [-float(place) for place in range(len(scores))]
    return found | {"H-AP": fmean(h_ap(places, [rel[item] for item in order]) for order in every)}


def literal_values(
    scores: Sequence[float], levels: Sequence[int], rel: Sequence[float], depth: int, ks: list[int], ties: str
) -> dict[str, float]:
    """Every metric of one query that shares something with somebody; a level that nobody shares is missing."""
    found = values_by_degree(scores, levels, rel, ties)
    every = [[levels[item] for item in order] for order in orders(scores)]
    for level in range(1, depth + 1):
        if any(other >= level for other in levels):
            each = [values_in_order([other >= level for other in order], ks) for order in every]
            for name in (*(f"R@{k}" for k in ks), "mAP@R"):
                found[f"level {level} {name}"] = pick_of(ties)([values[name] for values in each])
    return found


def pick_of(ties: str) -> Callable[[list[float]], float]:
    """What the values of all orders come to."""
    return min if ties == "pessimistic" else fmean
