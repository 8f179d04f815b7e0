"""Metrics of one query each where items are relevant by degrees: H-AP, NDCG, ASI, and R@k and mAP@R of every level.

The items that share a level with a query are its positives, here from the highest score down and, of equal scores, from
the coarsest level they share to the finest: the worst of all orders, by every metric but H-AP. That one is defined by
who scores at least as high, as AP is in Eq 1, and knows no order of equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from roadmap.metrics.counted import (
    PositiveCounts,
    Ties,
    average_precision_at_r,
    expected_ratio,
    hit,
    tied_groups,
    worst_rank,
)
from roadmap.metrics.vectors import fixed_order_sum

# Numbers held at once while the mean over the orders of tied items is taken.
ORDERS_AT_ONCE = 1 << 20


class GradedCounts(NamedTuple):
    """n queries and their positives, P at most."""

    positives: PositiveCounts
    levels: Tensor  # (n, P) int64: the finest level shared, from 1 to L; 0 in a filled-up place
    known: Tensor  # (n, L) bool: the levels at which the query knows where it stands

    @property
    def depth(self) -> int:
        return self.known.shape[1]

    def sizes(self) -> Tensor:
        """(n, depth) how many items share each level and no finer one: |Omega^(l)|."""
        return torch.stack([(self.levels == level).sum(1) for level in range(1, self.depth + 1)], dim=1)

    def among_first(self, level: int) -> Tensor:
        """(n, P + 1): how many of the first 0, 1, ..., P positives share exactly this level."""
        return torch.nn.functional.pad((self.levels == level).cumsum(1), (1, 0))


def decaying_relevance(sizes: Tensor, alpha: float) -> Tensor:
    """(n, depth + 1) rel of levels 0 to depth: (l / L)^alpha / |Omega^(l)|; 0 where no item has that level."""
    depth = sizes.shape[1]
    share = (torch.arange(1, depth + 1, device=sizes.device, dtype=torch.float64) / depth) ** alpha
    return torch.nn.functional.pad(torch.where(sizes > 0, share / sizes.clamp(min=1), 0.0), (1, 0))


def weighted_relevance(sizes: Tensor, weights: Sequence[float]) -> Tensor:
    """(n, depth + 1) rel of levels 0 to depth: the sum over p <= l of w_p / (items that share level p).

    With these H-AP is the mean of the APs of the levels, weighted by w.
    """
    reached = _at_least(sizes)
    each = sizes.new_tensor(weights, dtype=torch.float64) / reached.clamp(min=1)
    return torch.nn.functional.pad(torch.where(reached > 0, each, 0.0).cumsum(1), (1, 0))


def hierarchical_average_precision(c: GradedCounts, relevance: Tensor, ties: Ties) -> Tensor:
    """H-AP (Ramzi et al., ECCV 2022): sum over k of H-rank+(k) / rank(k), over the sum of rel(k).

    H-rank+(k) = rel(k) + sum over the positives j before k of min(rel(k), rel(j)).
    """
    counts, own = c.positives, relevance.gather(1, c.levels)
    at_least = torch.zeros_like(own)
    above = torch.zeros_like(own)
    for level in range(1, c.depth + 1):
        both, first = torch.minimum(own, relevance[:, level, None]), c.among_first(level)
        at_least += both * first.gather(1, counts.positives_at_least.long())
        if ties == "mean":
            above += both * first.gather(1, counts.positives_above.long())
    if ties == "pessimistic":
        each = at_least / (counts.positives_at_least + counts.negatives_at_least)
    else:
        above_positive, above_negative, group = tied_groups(counts)
        others = (at_least - above - own) / (group - 1).clamp(min=1)
        each = expected_ratio(above + own, others, above_positive + above_negative, group, group)
    return _row_sums(each, counts.valid) / _row_sums(own, counts.valid)


def discounted_gain(c: GradedCounts, discounts: Tensor, ties: Ties) -> Tensor:
    """NDCG with gains 2^level - 1 and discounts 1 / log2(1 + rank), over the whole ranking.

    Args:
        discounts: (N + 1,) discounts of the first 0, 1, ... places, added up.
    """
    counts = c.positives
    gains = 2.0 ** c.levels.double() - 1
    if ties == "pessimistic":
        found = gains / torch.log2(1 + worst_rank(counts))
    else:
        above, group = _places(counts)
        found = gains * (discounts[above + group] - discounts[above]) / group
    reached = torch.nn.functional.pad(_at_least(c.sizes()), (0, 1))
    steps = discounts[reached[:, :-1]] - discounts[reached[:, 1:]]
    best = (2.0 ** torch.arange(1, c.depth + 1, device=steps.device, dtype=torch.float64) - 1) * steps
    return _row_sums(found, counts.valid) / best.sum(1)


def average_set_intersection(c: GradedCounts, harmonics: Tensor, ties: Ties) -> Tensor:
    """ASI: the mean over n = 1..R of the share of the first n that the best ranking has among its first n, too.

    R is the number of positives; items that share the same level are alike. The j-th item of level l stands at place
    e = S + j of the best ranking, S being the number of items with finer levels, so it counts from n = max(its place,
    e) on: R times ASI is the sum over the items of 1/max + ... + 1/R.

    Args:
        harmonics: (N + 1,) the harmonic numbers H(0), H(1), ...
    """
    counts = c.positives
    total = counts.valid.sum(1)
    finer = torch.nn.functional.pad(_at_least(c.sizes()), (1, 1))[:, 1:]  # of level l - 1: those that share level l
    number = torch.zeros_like(c.levels)  # of an item among those of its level
    for level in range(1, c.depth + 1):
        number = torch.where(c.levels == level, c.among_first(level)[:, 1:], number)
    best = finer.gather(1, c.levels) + number
    found = _reach(worst_rank(counts).long(), best, total[:, None], harmonics)
    if ties == "mean":
        found = _expected_reach(c, found, best, number, total, harmonics)
    return _row_sums(found, counts.valid) / total


def _reach(place: Tensor, best: Tensor, total: Tensor, harmonics: Tensor) -> Tensor:
    """1/m + ... + 1/R, m = max(place, best); 0 where m is beyond R."""
    first = torch.maximum(place, best).minimum(total + 1).clamp(min=1)
    return harmonics[total] - harmonics[first - 1]


def _expected_reach(
    c: GradedCounts, found: Tensor, best: Tensor, number: Tensor, total: Tensor, harmonics: Tensor
) -> Tensor:
    """`found`, with the mean over all orders in the place of the items that tie.

    The j-th of m items of a level in a group of g stands at the group's place r with probability
    C(r-1, j-1) C(g-r, m-j) / C(g, m).
    """
    above, group = _places(c.positives)
    before, tied = torch.zeros_like(number), torch.zeros_like(number)
    for level in range(1, c.depth + 1):
        first = c.among_first(level)
        higher = first.gather(1, c.positives.positives_above.long())
        mine = c.levels == level
        before = torch.where(mine, higher, before)
        tied = torch.where(mine, first.gather(1, c.positives.positives_at_least.long()) - higher, tied)
    row, column = (c.positives.valid & (group > 1)).nonzero(as_tuple=True)
    if not len(row):
        return found
    found = found.clone()
    widest = int(group[row, column].max())
    for i, k in zip(*(torch.split(some, max(1, ORDERS_AT_ONCE // widest)) for some in (row, column)), strict=True):
        size = group[i, k, None]
        place = torch.arange(1, int(size.max()) + 1, device=row.device)[None]
        chance = _chances(place, (number - before)[i, k, None], tied[i, k, None], size)
        reach = _reach(above[i, k, None] + place, best[i, k, None], total[i, None], harmonics)
        found[i, k] = fixed_order_sum(chance * reach)
    return found


def _chances(r: Tensor, j: Tensor, m: Tensor, g: Tensor) -> Tensor:
    """C(r-1, j-1) C(g-r, m-j) / C(g, m), 0 where the j-th of m cannot stand at r of g."""
    possible = (r >= j) & (r <= g - m + j)

    def log_choose(n: Tensor, k: Tensor) -> Tensor:
        n, k = n.clamp(min=0).double(), k.clamp(min=0).double()
        return (n + 1).lgamma() - (k + 1).lgamma() - (n - k).clamp(min=0).add(1).lgamma()

    logs = log_choose(r - 1, j - 1) + log_choose(g - r, m - j) - log_choose(g, m)
    return torch.where(possible, logs.exp(), 0.0)


def level_counts(c: GradedCounts, level: int) -> PositiveCounts:
    """Counts for those that share `level`, by which everyone else is a negative."""
    counts = c.positives
    keep = (c.levels >= level) & counts.valid & c.known[:, level - 1, None]
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


def level_values(c: GradedCounts, level: int, ks: Sequence[int], ties: Ties) -> dict[str, Tensor]:
    """R@k and mAP@R of a level, (n,) float64; NaN for a query with which nobody shares it."""
    counts = level_counts(c, level)
    values = {f"R@{k}": hit(counts, k, ties) for k in ks} | {"mAP@R": average_precision_at_r(counts, ties)}
    return {name: torch.where(counts.valid.any(1), value, torch.nan) for name, value in values.items()}


def _at_least(sizes: Tensor) -> Tensor:
    """(n, depth) how many items share each level, from how many share it and no finer one."""
    return sizes.flip(1).cumsum(1).flip(1)


def _places(counts: PositiveCounts) -> tuple[Tensor, Tensor]:
    """Of each positive: items above its tied group, and the group's size; int64."""
    above_positive, above_negative, group = tied_groups(counts)
    return (above_positive + above_negative).long(), group.long()


def _row_sums(values: Tensor, valid: Tensor) -> Tensor:
    """In a fixed order, by descending score, so that no input order shows."""
    return fixed_order_sum(torch.where(valid, values, 0.0))
