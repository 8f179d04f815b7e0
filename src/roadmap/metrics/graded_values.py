"""Metrics of one query each where items are relevant by degrees: H-AP, NDCG, ASI, and R@k and mAP@R of a level.

The items that have a degree of relevance are the positives of a query, here from the highest score down and, of equal
scores, from the least relevant to the most: the worst of all orders, by every metric but H-AP. That one is defined by
who scores at least as high, as AP is in Eq 1, and knows no order of equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from roadmap.metrics.counted import (
    PositiveCounts,
    Ties,
    average_precision_at_r,
    expected_ratio,
    hit,
    query_value_names,
    query_values,
    tied_groups,
    worst_rank,
)
from roadmap.metrics.grades import Gain, gains
from roadmap.metrics.vectors import fixed_order_sum

# Numbers held at once while the mean over the orders of tied items is taken.
ORDERS_AT_ONCE = 1 << 20


class GradedCounts(NamedTuple):
    """n queries and their positives, P at most. Both degrees are float64, and 0 in a filled-up place."""

    positives: PositiveCounts
    closeness: Tensor  # (n, P) by NDCG and ASI: the finest level shared, labels in common, or the grade
    relevance: Tensor  # (n, P) by H-AP: its rel


def hierarchical_average_precision(c: GradedCounts, ties: Ties) -> Tensor:
    """H-AP (Ramzi et al., ECCV 2022): sum over k of H-rank+(k) / rank(k), over the sum of rel(k).

    H-rank+(k) = rel(k) + sum over the positives j before k of min(rel(k), rel(j)).
    """
    counts, own = c.positives, c.relevance
    at_least = sums_of_lesser(own, counts.positives_at_least, counts.valid)
    if ties == "pessimistic":
        each = at_least / (counts.positives_at_least + counts.negatives_at_least)
    else:
        above = sums_of_lesser(own, counts.positives_above, counts.valid)
        above_positive, above_negative, group = tied_groups(counts)
        others = (at_least - above - own) / (group - 1).clamp(min=1)
        each = expected_ratio(above + own, others, above_positive + above_negative, group, group)
    return _row_sums(each, counts.valid) / _row_sums(own, counts.valid)


def sums_of_lesser(values: Tensor, first: Tensor, valid: Tensor) -> Tensor:
    """(n, P): for each place k the sum of min(values_k, values_j) over the valid places j < first_k of its row.

    A row's values are numbered in ascending order and told apart bit by bit, the highest first: with those that differ
    from k in no higher bit, and have 0 where k has 1, the value j is the lesser; the other way round it is k's own. All
    of one kind are then moved to the left, in their order, so that those alike remain a range: one that ends where the
    first of them did. So it takes log2(distinct values) steps, and not a step for each pair.
    """
    number = _numbers(values.masked_fill(~valid, torch.inf))  # how many places are filled up does not show
    found = torch.zeros_like(values)
    start, end = torch.zeros_like(first), first  # where those of the first places lie that are like k so far
    moved, value = number, values
    for bit in reversed(range(int(number.max()).bit_length())):
        low, mine = moved >> bit & 1 == 0, number >> bit & 1 == 0
        lows = torch.nn.functional.pad(low.cumsum(1), (1, 0))
        sums = torch.nn.functional.pad(torch.where(low, value, 0.0).cumsum(1), (1, 0))
        start_low, end_low = lows.gather(1, start), lows.gather(1, end)
        highs = (end - start) - (end_low - start_low)
        found += torch.where(mine, values * highs, sums.gather(1, end) - sums.gather(1, start))
        total = lows[:, -1:]
        place = torch.arange(low.shape[1], device=low.device) - lows[:, :-1]
        place = torch.where(low, lows[:, :-1], total + place)
        start, end = (
            torch.where(mine, lower, total + some - lower) for some, lower in ((start, start_low), (end, end_low))
        )
        moved = torch.empty_like(moved).scatter_(1, place, moved)
        value = torch.empty_like(value).scatter_(1, place, value)
    return found + values * (end - start)


def _numbers(values: Tensor) -> Tensor:
    """(n, P) from 0 on in the order of the values of a row; of equal values the same."""
    rising = values.sort(dim=1).values
    steps = torch.nn.functional.pad((rising[:, 1:] != rising[:, :-1]).cumsum(1), (1, 0))
    return steps.gather(1, torch.searchsorted(rising, values))


def discounted_gain(c: GradedCounts, discounts: Tensor, gain: Gain, ties: Ties) -> Tensor:
    """NDCG with discounts 1 / log2(1 + rank), over the whole ranking.

    Args:
        discounts: (N + 1,) discounts of the first 0, 1, ... places, added up.
    """
    counts, gained = c.positives, gains(c.closeness, gain)
    if ties == "pessimistic":
        found = gained / torch.log2(1 + worst_rank(counts))
    else:
        above, group = _places(counts)
        found = gained * (discounts[above + group] - discounts[above]) / group
    best = gained.sort(dim=1, descending=True).values
    places = torch.arange(2, best.shape[1] + 2, device=best.device, dtype=best.dtype)
    return _row_sums(found, counts.valid) / fixed_order_sum(best / places.log2())


def average_set_intersection(c: GradedCounts, harmonics: Tensor, ties: Ties) -> Tensor:
    """ASI: the mean over n = 1..R of the share of the first n that the best ranking has among its first n, too.

    R is the number of positives; items of one closeness are alike. The j-th item of a closeness stands at place
    e = S + j of the best ranking, S being the number of closer items, so it counts from n = max(its place, e) on: R
    times ASI is the sum over the items of 1/max + ... + 1/R.

    Args:
        harmonics: (N + 1,) the harmonic numbers H(0), H(1), ...
    """
    counts = c.positives
    total = counts.valid.sum(1)
    order = c.closeness.sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    best = torch.empty_like(order).scatter_(1, order, places)
    found = _reach(worst_rank(counts).long(), best, total[:, None], harmonics)
    if ties == "mean":
        found = _expected_reach(c, found, best, total, harmonics)
    return _row_sums(found, counts.valid) / total


def _reach(place: Tensor, best: Tensor, total: Tensor, harmonics: Tensor) -> Tensor:
    """1/m + ... + 1/R, m = max(place, best); 0 where m is beyond R."""
    first = torch.maximum(place, best).minimum(total + 1).clamp(min=1)
    return harmonics[total] - harmonics[first - 1]


def _expected_reach(c: GradedCounts, found: Tensor, best: Tensor, total: Tensor, harmonics: Tensor) -> Tensor:
    """`found`, with the mean over all orders in the place of the items that tie.

    The j-th of m items of a closeness in a group of g stands at the group's place r with probability
    C(r-1, j-1) C(g-r, m-j) / C(g, m).
    """
    above, group = _places(c.positives)
    number, alike = _runs(c)
    row, column = (c.positives.valid & (group > 1)).nonzero(as_tuple=True)
    if not len(row):
        return found
    found = found.clone()
    widest = int(group[row, column].max())
    for i, k in zip(*(torch.split(some, max(1, ORDERS_AT_ONCE // widest)) for some in (row, column)), strict=True):
        size = group[i, k, None]
        place = torch.arange(1, int(size.max()) + 1, device=row.device)[None]
        chance = _chances(place, number[i, k, None], alike[i, k, None], size)
        reach = _reach(above[i, k, None] + place, best[i, k, None], total[i, None], harmonics)
        found[i, k] = fixed_order_sum(chance * reach)
    return found


def _runs(c: GradedCounts) -> tuple[Tensor, Tensor]:
    """Of each positive among those of its score and closeness, who stand side by side: the how-manieth, of how many."""
    score, closeness = c.positives.positives_above, c.closeness
    new = (score[:, 1:] != score[:, :-1]) | (closeness[:, 1:] != closeness[:, :-1])
    run = torch.nn.functional.pad(new.cumsum(1), (1, 0))
    sizes = torch.zeros_like(run).scatter_add_(1, run, torch.ones_like(run))
    before = sizes.cumsum(1) - sizes
    place = torch.arange(1, run.shape[1] + 1, device=run.device)
    return place - before.gather(1, run), sizes.gather(1, run)


def _chances(r: Tensor, j: Tensor, m: Tensor, g: Tensor) -> Tensor:
    """C(r-1, j-1) C(g-r, m-j) / C(g, m), 0 where the j-th of m cannot stand at r of g."""
    possible = (r >= j) & (r <= g - m + j)

    def log_choose(n: Tensor, k: Tensor) -> Tensor:
        n, k = n.clamp(min=0).double(), k.clamp(min=0).double()
        return (n + 1).lgamma() - (k + 1).lgamma() - (n - k).clamp(min=0).add(1).lgamma()

    logs = log_choose(r - 1, j - 1) + log_choose(g - r, m - j) - log_choose(g, m)
    return torch.where(possible, logs.exp(), 0.0)


def level_counts(counts: PositiveCounts, keep: Tensor) -> PositiveCounts:
    """Counts for the positives to `keep`, (n, P), by which everyone else is a negative."""
    keep = keep & counts.valid
    first = torch.nn.functional.pad(keep.cumsum(1), (1, 0))
    at_least = first.gather(1, counts.positives_at_least.long())
    above = first.gather(1, counts.positives_above.long())
    parts = [keep, at_least, above, counts.negatives_at_least + counts.positives_at_least - at_least]
    if counts.negatives_above is not None:
        parts.append(counts.negatives_above + counts.positives_above - above)
    # those that are kept come first, in their order
    order = (~keep).to(torch.int8).sort(dim=1, stable=True).indices[:, : max(1, int(keep.sum(1).max()))]
    valid, *rest = (part.gather(1, order) for part in parts)
    return PositiveCounts(valid, rest[0], rest[1], rest[2], rest[3] if len(rest) > 3 else None)


def level_values(counts: PositiveCounts, ks: Sequence[int], ties: Ties) -> dict[str, Tensor]:
    """R@k and mAP@R, (n,) float64; NaN for a query without positives."""
    values = {f"R@{k}": hit(counts, k, ties) for k in ks} | {"mAP@R": average_precision_at_r(counts, ties)}
    return {name: torch.where(counts.valid.any(1), value, torch.nan) for name, value in values.items()}


@dataclass(frozen=True)
class Levels:
    """What is found at each level of a tree; `known` says at which levels a query knows where it stands, (M, L)."""

    ks: tuple[int, ...]
    ties: Ties
    levels: tuple[str, ...]
    known: Tensor

    def names(self) -> list[str]:
        return [f"{level} {name}" for level in self.levels for name in (*(f"R@{k}" for k in self.ks), "mAP@R")]

    def values(self, counts: PositiveCounts, closeness: Tensor, queries: Tensor) -> dict[str, Tensor]:
        found = {}
        for number, level in enumerate(self.levels, start=1):
            keep = (closeness >= number) & self.known[queries, number - 1, None]
            for name, value in level_values(level_counts(counts, keep), self.ks, self.ties).items():
                found[f"{level} {name}"] = value
        return found


@dataclass(frozen=True)
class PlainRelevance:
    """What is found of the items that are relevant at all."""

    ks: tuple[int, ...]
    ties: Ties

    def names(self) -> list[str]:
        return query_value_names(self.ks)

    def values(self, counts: PositiveCounts, closeness: Tensor, queries: Tensor) -> dict[str, Tensor]:
        return query_values(counts, self.ks, self.ties)


def _places(counts: PositiveCounts) -> tuple[Tensor, Tensor]:
    """Of each positive: items above its tied group, and the group's size; int64."""
    above_positive, above_negative, group = tied_groups(counts)
    return (above_positive + above_negative).long(), group.long()


def _row_sums(values: Tensor, valid: Tensor) -> Tensor:
    """In a fixed order, by descending score, so that no input order shows."""
    return fixed_order_sum(torch.where(valid, values, 0.0))
