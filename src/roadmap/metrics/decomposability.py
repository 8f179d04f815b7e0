"""The decomposability gap of AP (Eq 6) and what bounds it: Eqs 8 and 9 as they hold, and tighter ones.

One query; its gallery is cut into K batches, and AP in the batches is compared with AP in the whole. Proofs and
counter-examples are in docs/decomposability.md; Propositions are numbered there. In short:

    eq8_bound              Eq 8, corrected. Needs AP_b = 1, and the worst order of the batches (any, if all are alike).
    eq9_bound              Eq 9. The same, even if all are alike; can be larger than Eq 8.
    worst_gap              the largest gap that K batches of these sizes can have with AP_b = 1; attained.
    calibrated_worst_gap   the largest with AP_b = 1 and given numbers of calibrated scores; attained; <= worst_gap.
    gap_range              from the order inside each batch alone, for any AP_b: the gap lies in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roadmap.metrics.counted import average_precision
from roadmap.metrics.labels import Labels, class_numbers
from roadmap.metrics.ranking import retrieval_metrics
from roadmap.metrics.vectors import Vectors

Numbers = NDArray[np.float64]
# Sets of batches that the exact worst order may look at.
STATES = 200_000


@dataclass(frozen=True)
class Calibration:
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
        return eq9_bound(self.calibration)

    @property
    def worst(self) -> float:
        """`worst_gap` of these sizes: holds when every AP_b is 1."""
        return worst_gap(*self._sizes)

    @property
    def calibrated_worst(self) -> float:
        """`calibrated_worst_gap` of these scores: holds when every AP_b is 1."""
        return calibrated_worst_gap(self.calibration)

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
    def calibration(self) -> Calibration:
        positive, good = self.relevant, torch.where(self.relevant, self.scores >= self.alpha, self.scores <= self.beta)
        tallies = [(positive & good), (positive & ~good), (~positive & good), (~positive & ~good)]
        return Calibration(*(tuple(int(tally[part].sum()) for part in self._parts) for tally in tallies))

    @cached_property
    def _parts(self) -> list[Tensor]:
        return [(self.batches == b).nonzero()[:, 0] for b in torch.unique(self.batches)]

    @property
    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        c = self.calibration
        positives = tuple(g + e for g, e in zip(c.good_positives, c.bad_positives, strict=True))
        return positives, tuple(g + e for g, e in zip(c.good_negatives, c.bad_negatives, strict=True))


def eq8_bound(positives: Sequence[int], negatives: Sequence[int]) -> float:
    """Eq 8 with its inner sum ended at |P_b| (the printed B can make it negative), batches in the given order.

    The gap when the batches, each perfectly ranked, are put one after the other.
    """
    total, p_before, n_before = 0.0, 0, 0
    for p, n in zip(positives, negatives, strict=True):
        total += _precisions(p_before, n_before, p)
        p_before, n_before = p_before + p, n_before + n
    return 1 - total / p_before


def eq9_bound(calibration: Calibration) -> float:
    """Eq 9 as printed, batches in the given order."""
    total, good_before, bad_before, p_before, n_before = 0.0, 0, 0, 0, 0
    for good_p, bad_p, good_n, bad_n in zip(*_columns(calibration), strict=True):
        total += _precisions(good_before, bad_before, good_p) + _precisions(good_p + p_before, n_before, bad_p)
        good_before, bad_before = good_before + good_p, bad_before + bad_n
        p_before, n_before = p_before + good_p + bad_p, n_before + good_n + bad_n
    return 1 - total / p_before


def worst_gap(positives: Sequence[int], negatives: Sequence[int]) -> float:
    """The largest gap of K perfectly ranked batches of these sizes (Proposition 2): Eq 8 in the worst order.

    Exact while the sets of unlike batches are at most `STATES`; then a bound that may lie above (Proposition 3).
    """
    total = sum(positives)
    if total == 0:
        raise ValueError("positives sum to zero, so that AP is undefined; the query needs a positive")
    return 1 - _least_sum(positives, negatives, 0, 0) / total


def calibrated_worst_gap(calibration: Calibration) -> float:
    """The largest gap of perfectly ranked batches with these numbers of calibrated scores (Proposition 5).

    The ranking has three parts. Above alpha: good positives and, of the negatives, only bad ones of batches without a
    bad positive. Between: bad positives of batches with a bad negative, which is below them. Below beta: the other bad
    positives, after every negative of the batches before. In each part the batches are juxtaposed in the worst order.
    """
    good_p, bad_p, good_n, bad_n = (np.asarray(column, np.int64) for column in _columns(calibration))
    total = int(good_p.sum() + bad_p.sum())
    if total == 0:
        raise ValueError("there is no positive, so that AP is undefined; the query needs one")
    whole, between, below = bad_p == 0, (bad_p > 0) & (bad_n > 0), (bad_p > 0) & (bad_n == 0)
    p, n = int(good_p[whole].sum()), int(bad_n[whole].sum())
    least = _least_sum(good_p[whole], bad_n[whole], 0, 0)
    least += _precisions(p, n, int(good_p[~whole].sum()))  # these release nothing above alpha, so they come last there
    p = int(good_p.sum())
    least += _least_sum(bad_p[between], bad_n[between], p, n)
    p += int(bad_p[between].sum())
    n = int((good_n + bad_n)[~below].sum())
    least += _least_sum(bad_p[below], good_n[below], p, n)
    return 1 - least / total


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
        most = _convolved(most, np.append(before, (~hits).sum()), np.maximum, -np.inf)
        least = _convolved(least, np.append(0.0, before), np.minimum, np.inf)
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


def _columns(c: Calibration) -> tuple[tuple[int, ...], ...]:
    return c.good_positives, c.bad_positives, c.good_negatives, c.bad_negatives


def _precisions(p_before: int, n_before: int, positives: int) -> float:
    """Sum of precisions of a run of positives after p_before positives and n_before negatives."""
    rank_positive = p_before + np.arange(1, positives + 1)
    return float((rank_positive / (rank_positive + n_before)).sum())


def _least_sum(positives: Iterable[int], negatives: Iterable[int], p_first: int, n_first: int) -> float:
    """The least sum of precisions over all orders of juxtaposed batches, after p_first positives, n_first negatives."""
    kinds = Counter((int(p), int(n)) for p, n in zip(positives, negatives, strict=True))
    sizes, counts = list(kinds), list(kinds.values())
    if np.prod([count + 1.0 for count in counts]) > STATES:
        return _relaxed_sum(list(kinds.elements()), p_first, n_first)
    run = lru_cache(maxsize=None)(_precisions)
    # reached[taken]: the least sum after so many batches of each kind; batches of a kind need no order
    reached = {(0,) * len(sizes): 0.0}
    for _ in range(sum(counts)):
        onward: dict[tuple[int, ...], float] = {}
        for taken, total in reached.items():
            p = p_first + sum(t * size[0] for t, size in zip(taken, sizes, strict=True))
            n = n_first + sum(t * size[1] for t, size in zip(taken, sizes, strict=True))
            for kind, size in enumerate(sizes):
                if taken[kind] < counts[kind]:
                    after = (*taken[:kind], taken[kind] + 1, *taken[kind + 1 :])
                    onward[after] = min(onward.get(after, np.inf), total + run(p, n, size[0]))
        reached = onward
    return min(reached.values())


def _relaxed_sum(batches: Sequence[tuple[int, int]], p_first: int, n_first: int) -> float:
    """Below `_least_sum`: each positive gets the most negatives that any set of batches through by then releases."""
    most = np.zeros(1)
    for p, n in batches:
        most = _convolved(most, np.append(np.zeros(p), float(n)), np.maximum, -np.inf)
    j = np.arange(1, len(most))
    return float(((p_first + j) / (p_first + j + n_first + most[:-1])).sum())


def _convolved(left: Numbers, right: Numbers, choose: np.ufunc, nothing: float) -> Numbers:
    """out[k] = the chosen one of left[i] + right[k - i] over i: splits k positives among batches."""
    out = np.full(len(left) + len(right) - 1, nothing)
    for i, value in enumerate(right):
        choose(out[i : i + len(left)], left + value, out=out[i : i + len(left)])
    return out
