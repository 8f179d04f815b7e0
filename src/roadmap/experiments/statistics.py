"""What a referee would ask of numbers over seeds and over queries.

Over seeds: mean, standard deviation, Student's interval, paired t-test. Over the queries of one seed: the exact McNemar
test where an answer is right or wrong (R@1), and a bootstrap that draws whole classes (mAP@R), since queries of a class
are not independent. Over many comparisons: Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
DRAWS = 10_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over n runs, its standard deviation (NaN for one run), and Student's interval around it."""

    mean: float
    sd: float
    n: int
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """What a test says of two paired sets of numbers: the second less the first.

    Attributes:
        difference: of their means.
        low, high: interval around it; NaN where there is none.
        p: two-sided: how often so large a difference comes by chance alone.
        effect: its size without a unit: Cohen's d_z, the mean over the standard deviation of the paired differences
            (of the classes' means, for the bootstrap); for McNemar Cohen's g, the share of the disagreements that the
            second one wins, less one half.
        n: pairs; classes for the bootstrap; disagreements for McNemar.
        test: which, in words.
    """

    difference: float
    low: float
    high: float
    p: float
    effect: float
    n: int
    test: str


def estimate(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Mean, standard deviation and Student's t-interval. Of one value there is no interval: it is NaN."""
    x = _numbers(values, 1)
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Estimate(mean, math.nan, 1, math.nan, math.nan)
    sd = float(x.std(ddof=1))
    half = t_quantile(n - 1, confidence) * sd / math.sqrt(n)
    return Estimate(mean, sd, n, mean - half, mean + half)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The t beyond which, on both sides together, lies 1 - confidence of Student's distribution."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))


def paired_t(first: ArrayLike, second: ArrayLike, confidence: float = CONFIDENCE) -> Difference:
    """The paired t-test of numbers that belong together, such as the runs of two losses with the same seeds.

    Where all differences are equal there is no spread to judge by: p is 0, or 1 where they are zero.
    """
    from scipy.stats import t

    a, b = _numbers(first, 2), _numbers(second, 2)
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many numbers on both sides, got {len(a)} and {len(b)}")
    d = b - a
    found = estimate(d, confidence)
    if found.sd == 0:
        p, effect = float(found.mean == 0), math.copysign(math.inf, found.mean) if found.mean else 0.0
        return Difference(found.mean, found.low, found.high, p, effect, len(d), "paired t over seeds")
    effect = found.mean / found.sd
    p = float(2 * t.sf(abs(effect) * math.sqrt(len(d)), len(d) - 1))
    return Difference(found.mean, found.low, found.high, p, effect, len(d), "paired t over seeds")


def mcnemar(first: ArrayLike, second: ArrayLike) -> Difference:
    """McNemar's exact test of right and wrong answers (1 and 0) to the same questions; NaN is no question.

    Only the questions count on which the two disagree: by chance alone each side wins half of them.
    """
    from scipy.stats import binomtest

    a, b = _both(first, second)
    if not np.isin(np.concatenate([a, b]), (0, 1)).all():
        raise ValueError("McNemar's test is for answers that are right (1) or wrong (0)")
    lost, won = int((a > b).sum()), int((b > a).sum())
    n = lost + won
    p = float(binomtest(won, n).pvalue) if n else 1.0
    effect = won / n - 0.5 if n else 0.0
    return Difference(float(b.mean() - a.mean()), math.nan, math.nan, p, effect, n, "exact McNemar over queries")


def clustered_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    clusters: ArrayLike,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Difference:
    """The difference of two means over the same queries, when whole classes are drawn again, with replacement.

    Args:
        first, second: (M,) a number for each query; NaN for a query that does not count.
        clusters: (M,) the class of each query.
        draws: of as many classes as there are.
        seed: of the draws.
        confidence: of the interval, which is that of the percentiles.
    """
    kept = ~(np.isnan(np.asarray(first, float)) | np.isnan(np.asarray(second, float)))
    a, b = _both(first, second)
    _, members = np.unique(np.asarray(clusters)[kept], return_inverse=True)
    d = b - a
    sums, counts = np.bincount(members, d), np.bincount(members).astype(np.float64)
    k = len(sums)
    if k < 2:
        raise ValueError(f"a bootstrap over classes needs at least 2 of them, got {k}")
    weights = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), draws).astype(np.float64)
    means = (weights @ sums) / (weights @ counts)
    below, above = int((means <= 0).sum()), int((means >= 0).sum())
    p = min(1.0, 2 * (min(below, above) + 1) / (draws + 1))  # never 0: that many draws cannot tell
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    of_classes = sums / counts
    spread = float(of_classes.std(ddof=1))
    effect = float(of_classes.mean()) / spread if spread else 0.0
    return Difference(float(d.mean()), float(low), float(high), p, effect, k, "bootstrap over classes")


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values that keep the chance of any false alarm among them at the level of one."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * float(p_values[i])))
        adjusted[int(i)] = largest
    return adjusted


def _numbers(values: ArrayLike, least: int) -> Floats:
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or len(x) < least or not np.isfinite(x).all():
        raise ValueError(f"give at least {least} finite numbers, got {x.tolist() if x.size < 20 else x.shape}")
    return x


def _both(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    """The queries that count on both sides."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"both must have a number for each of the same queries, got shapes {a.shape} and {b.shape}")
    kept = ~(np.isnan(a) | np.isnan(b))
    if not kept.any():
        raise ValueError("no query counts on both sides")
    return a[kept], b[kept]
