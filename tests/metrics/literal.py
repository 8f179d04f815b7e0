"""Retrieval metrics of one ranking, as literally as their definitions: sort, walk down, enumerate orders of ties."""

from __future__ import annotations

from itertools import chain, groupby, permutations, product
from statistics import fmean


def values_in_order(relevant: list[bool], ks: list[int]) -> dict[str, float]:
    """Metrics of a ranking given from the first place down, without ties."""
    r = sum(relevant)
    precision = [sum(relevant[: j + 1]) / (j + 1) for j in range(len(relevant))]
    ap = sum(p for p, hit in zip(precision, relevant, strict=True) if hit) / r
    return {f"R@{k}": float(any(relevant[:k])) for k in ks} | {
        "P@1": float(relevant[0]),
        "R-precision": sum(relevant[:r]) / r,
        "mAP@R": sum(precision[j] for j in range(r) if relevant[j]) / r,
        "mAP": ap,
        "AP loss": 1 - ap,
    }


def all_orders(scores: list[float], relevant: list[bool]) -> list[list[bool]]:
    """Every ranking by descending score, one for each order of each tied group."""
    items = sorted(zip(scores, relevant, strict=True), key=lambda item: -item[0])
    groups = [[hit for _, hit in group] for _, group in groupby(items, key=lambda item: item[0])]
    return [list(chain(*order)) for order in product(*(permutations(g) for g in groups))]


def literal_mean(scores: list[float], relevant: list[bool], ks: list[int]) -> dict[str, float]:
    """The expectation over all orders of tied items."""
    each = [values_in_order(order, ks) for order in all_orders(scores, relevant)]
    return {name: fmean(values[name] for values in each) for name in each[0]}


def literal_pessimistic(scores: list[float], relevant: list[bool], ks: list[int]) -> dict[str, float]:
    """The worst over all orders of tied items; AP by Eq 1 with H(0) = 1."""
    each = [values_in_order(order, ks) for order in all_orders(scores, relevant)]
    worst = {name: min(values[name] for values in each) for name in each[0]}
    ap = eq1_average_precision(scores, relevant)
    return worst | {"mAP": ap, "AP loss": 1 - ap}


def eq1_average_precision(scores: list[float], relevant: list[bool]) -> float:
    """Eq 1: rank(k) = 1 + sum over j != k of H(s_j - s_k), H(0) = 1; rank+ the same over positives."""
    positives = [k for k, hit in enumerate(relevant) if hit]
    precisions = []
    for k in positives:
        rank = 1 + sum(scores[j] >= scores[k] for j in range(len(scores)) if j != k)
        rank_positive = 1 + sum(scores[j] >= scores[k] for j in positives if j != k)
        precisions.append(rank_positive / rank)
    return sum(precisions) / len(positives)
