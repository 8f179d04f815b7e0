"""The decomposability gap of AP (Eq 6) and what bounds it: Eqs 8 and 9 as they hold, and tighter ones.

One query; its gallery is cut into K batches, and AP in the batches is compared with AP in the whole. Proofs and
counter-examples are in docs/decomposability.md; Propositions are numbered there. In short:

    eq8_bound              Eq 8, corrected. Needs AP_b = 1, and the worst order of the batches (any, if all are alike).
    eq9_bound              Eq 9. The same, even if all are alike; can be larger than Eq 8.
    worst_gap              the largest gap that K batches of these sizes can have with AP_b = 1; attained, or, for very
                           many unlike batches, a bound that may lie above (`worst_gap_is_attained`).
    calibrated_worst_gap   the same with given numbers of calibrated scores; <= worst_gap.
    gap_range              from the order inside each batch alone, for any AP_b: the gap lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roadmap.metrics.counted import average_precision
from roadmap.metrics.juxtaposition import best_split, least_sum, least_sum_is_exact, run_of_precisions
from roadmap.metrics.labels import Labels, class_numbers
from roadmap.metrics.ranking import retrieval_metrics
from roadmap.metrics.vectors import Vectors

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ThresholdCounts:
    """How many positives and negatives of each batch respect the thresholds: G+ (s >= alpha), E+ (s < alpha),
    G- (s <= beta), E- (s > beta)."""

    good_positives: tuple[int, ...]
    bad_positives: tuple[int, ...]
    good_negatives: tuple[int, ...]
    bad_negatives: tuple[int, ...]


@dataclass(frozen=True)
class DecomposabilityGap:
    """Eq 6 and its bounds for the scores of one query.

    Args:
        scores: (N,) scores of the gallery.
        relevant: (N,) bool.
        batches: (N,) integers: the batch of each item. A batch without positives has no AP and stays out of the mean.
        alpha, beta: the thresholds of Eq 7, beta < alpha.
    """

    scores: Tensor
    relevant: Tensor
    batches: Tensor
    alpha: float = 0.9
    beta: float = 0.6

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.scores, self.relevant, self.batches)]
        if self.scores.ndim != 1 or len(set(shapes)) != 1:
            raise ValueError(f"scores, relevant and batches must share one shape (N,), got {shapes}")
        if not bool(self.relevant.any()):
            raise ValueError("relevant marks no item, so that AP is undefined; the query needs a positive")
        if not self.beta < self.alpha:
            raise ValueError(f"beta must be below alpha, got alpha={self.alpha} and beta={self.beta}")

    @property
    def gap(self) -> float:
        """Eq 6: the mean AP of the batches less the AP of all."""
        return float(np.mean(self.batch_average_precisions)) - self.average_precision

    @cached_property
    def average_precision(self) -> float:
        return float(average_precision(self.scores[None], self.relevant[None]))

    @cached_property
    def batch_average_precisions(self) -> tuple[float, ...]:
        """AP_b of the batches that have positives."""
        parts = [(self.scores[part], self.relevant[part]) for part in self._parts]
        return tuple(float(average_precision(s[None], r[None])) for s, r in parts if bool(r.any()))

    @property
    def eq8(self) -> float:
        """Eq 8, corrected, for the batches in ascending order of their numbers."""
        return eq8_bound(*self._sizes)

    @property
    def eq9(self) -> float:
        """Eq 9 for the batches in ascending order of their numbers."""
        return eq9_bound(self.threshold_counts)

    @property
    def worst(self) -> float:
        """`worst_gap` of these sizes: holds when every AP_b is 1."""
        return worst_gap(*self._sizes)

    @property
    def worst_is_attained(self) -> bool:
        """Whether some scores in batches of these sizes have the gap `worst`; else it is a bound above it."""
        return worst_gap_is_attained(*self._sizes)

    @property
    def calibrated_worst(self) -> float:
        """`calibrated_worst_gap` of these scores: holds when every AP_b is 1."""
        return calibrated_worst_gap(self.threshold_counts)

    @property
    def calibrated_worst_is_attained(self) -> bool:
        """Whether some scores with these counts have the gap `calibrated_worst`; else it is a bound above it."""
        return calibrated_worst_gap_is_attained(self.threshold_counts)

    @property
    def range(self) -> tuple[float, float]:
        """`gap_range` of the orders inside the batches: holds always, its lower end for distinct scores."""
        orders = []
        for part in self._parts:
            # equal scores: the negative first, as in H(0) = 1
            s, r = self.scores[part].double().cpu().numpy(), self.relevant[part].cpu().numpy()
            orders.append([bool(hit) for hit in r[np.lexsort((r, -s))]])
        return gap_range(orders, self.batch_average_precisions)

    @cached_property
    def threshold_counts(self) -> ThresholdCounts:
        positive, good = self.relevant, torch.where(self.relevant, self.scores >= self.alpha, self.scores <= self.beta)
        tallies = [(positive & good), (positive & ~good), (~positive & good), (~positive & ~good)]
        return ThresholdCounts(*(tuple(int(tally[part].sum()) for part in self._parts) for tally in tallies))

    @cached_property
    def _parts(self) -> list[Tensor]:
        return [(self.batches == b).nonzero()[:, 0] for b in torch.unique(self.batches)]

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        c = self.threshold_counts
        positives = tuple(g + e for g, e in zip(c.good_positives, c.bad_positives, strict=True))
        return positives, tuple(g + e for g, e in zip(c.good_negatives, c.bad_negatives, strict=True))


def eq8_bound(positives: Sequence[int], negatives: Sequence[int]) -> float:
    """Eq 8 with its inner sum ended at |P_b| (the printed B can make it negative), batches in the given order.

    The gap when the batches, each perfectly ranked, are put one after the other.
    """
    total, p_before, n_before = 0.0, 0, 0
    for p, n in zip(positives, negatives, strict=True):
        total += run_of_precisions(p_before, n_before, p)
        p_before, n_before = p_before + p, n_before + n
    return 1 - total / p_before


def eq9_bound(counts: ThresholdCounts) -> float:
    """Eq 9 as printed, batches in the given order."""
    total, good_before, bad_before, p_before, n_before = 0.0, 0, 0, 0, 0
    for good_p, bad_p, good_n, bad_n in zip(*_columns(counts), strict=True):
        total += run_of_precisions(good_before, bad_before, good_p) + run_of_precisions(
            good_p + p_before, n_before, bad_p
        )
        good_before, bad_before = good_before + good_p, bad_before + bad_n
        p_before, n_before = p_before + good_p + bad_p, n_before + good_n + bad_n
    return 1 - total / p_before


def worst_gap(positives: Sequence[int], negatives: Sequence[int]) -> float:
    """The largest gap of K perfectly ranked batches of these sizes (Proposition 2): Eq 8 in the worst order.

    Exact where `worst_gap_is_attained`; else a bound that may lie above (Proposition 3).
    """
    total = sum(positives)
    if total == 0:
        raise ValueError("positives sum to zero, so that AP is undefined; the query needs a positive")
    return 1 - least_sum(positives, negatives, 0, 0) / total


def worst_gap_is_attained(positives: Sequence[int], negatives: Sequence[int]) -> bool:
    """Whether `worst_gap` of these sizes looks at every order of the batches, so that some scores have that gap."""
    return least_sum_is_exact(positives, negatives)


def calibrated_worst_gap(counts: ThresholdCounts) -> float:
    """The largest gap of perfectly ranked batches with these numbers of calibrated scores (Proposition 5).

    The ranking has three parts. Above alpha: good positives and, of the negatives, only bad ones of batches without a
    bad positive. Between: bad positives of batches with a bad negative, which is below them. Below beta: the other bad
    positives, after every negative of the batches before. In each part the batches are juxtaposed in the worst order.

    Exact where `calibrated_worst_gap_is_attained`; else a bound that may lie above, and is never above `worst_gap`.
    """
    good_p, bad_p, good_n, bad_n = _columns(counts)
    total = int(good_p.sum() + bad_p.sum())
    if total == 0:
        raise ValueError("there is no positive, so that AP is undefined; the query needs one")
    whole, between, below = _juxtaposed_parts(counts)
    p, n = sum(whole[0]), sum(whole[1])
    least = least_sum(*whole, 0, 0)
    # the good positives of the other batches release nothing above alpha, so they come last there
    least += run_of_precisions(p, n, int(good_p.sum()) - p)
    p = int(good_p.sum())
    least += least_sum(*between, p, n)
    p += sum(between[0])
    n = int((good_n + bad_n)[(bad_p == 0) | (bad_n > 0)].sum())
    least += least_sum(*below, p, n)
    gap = 1 - least / total
    if calibrated_worst_gap_is_attained(counts):
        return gap
    return min(gap, worst_gap((good_p + bad_p).tolist(), (good_n + bad_n).tolist()))


def calibrated_worst_gap_is_attained(counts: ThresholdCounts) -> bool:
    """Whether `calibrated_worst_gap` looks at every order of the batches, so that some scores have that gap."""
    return all(least_sum_is_exact(*part) for part in _juxtaposed_parts(counts))


def gap_range(orders: Sequence[Sequence[bool]], batch_average_precisions: Sequence[float]) -> tuple[float, float]:
    """Where the gap can lie, from the order of each batch alone (Proposition 4): any AP_b, any sizes.

    Args:
        orders: for each batch its ranking, best first: True for a positive.
        batch_average_precisions: AP_b of the batches that have positives.
    """
    most, least = np.zeros(1), np.zeros(1)  # negatives that can, and must, precede the next and the last positive
    for order in orders:
        hits = np.asarray(order, bool)
        before = np.cumsum(~hits)[hits].astype(np.float64)  # negatives above each positive of the batch
        most = best_split(most, np.append(before, (~hits).sum()), np.maximum, -np.inf)
        least = best_split(least, np.append(0.0, before), np.minimum, np.inf)
    j = np.arange(1, len(most))
    mean = float(np.mean(batch_average_precisions))
    return mean - float(np.mean(j / (j + least[1:]))), mean - float(np.mean(j / (j + most[:-1])))


def mean_decomposability_gap(
    vectors: Vectors, labels: Labels, batches: Tensor | ArrayLike, memory: int = 512 << 20
) -> dict[str, float]:
    """Eq 6 averaged over all queries of a set: each item queries the whole, and each batch, without itself.

    Returns:
        {"DG_AP", "mAP", "batch mAP", "queries", "queries_without_positives"}; a batch where a query has no positive
        stays out of that query's mean.
    """
    batches = torch.as_tensor(batches).cpu()
    options = {"ks": (), "per_query": True, "memory": memory}
    _, whole = retrieval_metrics(vectors, labels, **options)  # type: ignore[call-overload]
    v = torch.as_tensor(vectors)
    y, _ = class_numbers(labels, len(v), None, len(v), torch.device("cpu"))
    if batches.shape != (len(v),):
        raise ValueError(f"batches must have shape ({len(v)},), one for each vector, got {tuple(batches.shape)}")
    total, number = torch.zeros(len(v), dtype=torch.float64), torch.zeros(len(v), dtype=torch.float64)
    for b in torch.unique(batches):
        part = (batches == b).nonzero()[:, 0]
        own = torch.full((len(v),), -1).scatter_(0, part, torch.arange(len(part)))
        here = part.to(v.device)
        _, values = retrieval_metrics(v, y, v[here], y[part], query_index=own, **options)  # type: ignore[call-overload]
        total += values["mAP"].nan_to_num(0.0)
        number += ~values["mAP"].isnan()
    counted = number > 0
    batch_ap, ap = (total / number)[counted].mean().item(), whole["mAP"][counted].mean().item()
    rest = {"queries": len(v), "queries_without_positives": int((~counted).sum())}
    return {"DG_AP": batch_ap - ap, "mAP": ap, "batch mAP": batch_ap} | rest


def _columns(c: ThresholdCounts) -> tuple[Counts, ...]:
    columns = (c.good_positives, c.bad_positives, c.good_negatives, c.bad_negatives)
    return tuple(np.asarray(column, np.int64) for column in columns)


def _juxtaposed_parts(counts: ThresholdCounts) -> tuple[tuple[list[int], list[int]], ...]:
    """Proposition 5: positives and the negatives they release, batch by batch, above alpha, between, below beta."""
    good_p, bad_p, good_n, bad_n = _columns(counts)
    whole, between, below = bad_p == 0, (bad_p > 0) & (bad_n > 0), (bad_p > 0) & (bad_n == 0)
    return (
        (good_p[whole].tolist(), bad_n[whole].tolist()),
        (bad_p[between].tolist(), bad_n[between].tolist()),
        (bad_p[below].tolist(), good_n[below].tolist()),
    )
