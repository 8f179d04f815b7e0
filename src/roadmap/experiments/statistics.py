"""What a referee would ask of numbers over seeds and over queries.

Over seeds: mean, standard deviation, Student's interval, paired t-test. Over the queries of one seed: a bootstrap that
draws whole classes, since queries of a class are not independent, and where an answer is right or wrong (R@1) also the
exact McNemar test, which takes them to be. Over many comparisons: Holm's correction.

What the numbers at hand cannot tell is NaN: an interval around one number, a p-value of differences without spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
DRAWS = 10_000
FEWEST_CLASSES = 20  # that a bootstrap over classes can be trusted with: below, its level was measured to be off
FEWEST_DRAWS = 100
EXACT = 1e-12  # numbers that differ by less, relatively, differ by rounding alone
MEMORY = 1 << 22  # weights of classes that are held at a time
PAIRED = "paired t over seeds"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over n runs, its standard deviation (NaN for one run), and Student's interval around it (NaN for one run,
    and for runs that are all alike: they say nothing of how much runs differ)."""

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
        p: two-sided: how often so large a difference comes by chance alone; NaN where the numbers cannot tell.
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
    """Mean, standard deviation and Student's t-interval. Of one value, or of equal ones, there is no interval: it is
    NaN."""
    x = _numbers(values, 1)
    mean, n = float(x.mean()), len(x)
    if n == 1:
        return Estimate(mean, math.nan, 1, math.nan, math.nan)
    if _alike(x, float(np.abs(x).max())):
        return Estimate(mean, 0.0, n, math.nan, math.nan)
    sd = float(x.std(ddof=1))
    half = t_quantile(n - 1, confidence) * sd / math.sqrt(n)
    return Estimate(mean, sd, n, mean - half, mean + half)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The t beyond which, on both sides together, lies 1 - confidence of Student's distribution."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))


def paired_t(first: ArrayLike, second: ArrayLike, confidence: float = CONFIDENCE) -> Difference:
    """The paired t-test of numbers that belong together, such as the runs of two losses with the same seeds.

    Where all differences are equal there is no spread to judge by, t would be infinite however few there are: p, effect
    and interval are NaN. Where they are all zero p is 1.
    """
    from scipy.stats import t

    a, b = _numbers(first, 2), _numbers(second, 2)
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many numbers on both sides, got {len(a)} and {len(b)}")
    d = b - a
    largest = float(np.abs([a, b]).max())
    if _alike(d, largest):
        same = abs(float(d.mean())) <= EXACT * largest
        p, effect = (1.0, 0.0) if same else (math.nan, math.nan)
        return Difference(float(d.mean()), math.nan, math.nan, p, effect, len(d), PAIRED)
    found = estimate(d, confidence)
    effect = found.mean / found.sd
    p = float(2 * t.sf(abs(effect) * math.sqrt(len(d)), len(d) - 1))
    return Difference(found.mean, found.low, found.high, p, effect, len(d), PAIRED)


def mcnemar(first: ArrayLike, second: ArrayLike) -> Difference:
    """McNemar's exact test of right and wrong answers (1 and 0) to the same questions; NaN is no question.

    It takes questions to be independent, which queries of a class are not: where they go together, it gives false
    alarms, and `clustered_bootstrap` does not. Only the questions count on which the two disagree: by chance alone
    each side wins half of them.
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
        confidence: of the interval.

    Raises:
        ValueError: fewer than FEWEST_CLASSES classes, with which it gives false alarms.
    """
    _both(first, second)
    d = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    return clustered_bootstraps(d[None], clusters, draws, seed, confidence)[0]


def clustered_bootstraps(
    differences: ArrayLike, clusters: ArrayLike, draws: int = DRAWS, seed: int = 0, confidence: float = CONFIDENCE
) -> list[Difference]:
    """The same for several pairs over the same queries, with the same draws.

    The interval is that of the percentiles, expanded (Hesterberg, What Teachers Should Know About the Bootstrap, The
    American Statistician 69, 2015): those of k classes are narrower than they should be by sqrt((k - 1) / k), and by as
    much as Student's distribution is wider than the normal one. p goes with it: what lies on the other side of zero.

    Args:
        differences: (P, M) second less first; NaN, in all pairs, for a query that does not count.
        clusters, draws, seed, confidence: as above.
    """
    from scipy.stats import norm, t

    d, labels = np.asarray(differences, np.float64), np.asarray(clusters)
    if d.ndim != 2 or labels.shape != d.shape[1:]:
        raise ValueError(f"each of the queries must have one class, got {d.shape[-1]} queries and {labels.shape}")
    if draws < FEWEST_DRAWS:
        raise ValueError(f"draws={draws} cannot tell a p-value near 0.05; give at least {FEWEST_DRAWS}")
    counted = ~np.isnan(d).any(0)
    if (np.isnan(d).any(0) != np.isnan(d).all(0)).any():
        raise ValueError("some queries count in one pair and not in another: these are other queries")
    _, members = np.unique(labels[counted], return_inverse=True)
    counts = np.bincount(members).astype(np.float64)
    if (k := len(counts)) < FEWEST_CLASSES:
        raise ValueError(f"a bootstrap over classes needs at least {FEWEST_CLASSES} of them, got {k}")
    sums = np.stack([np.bincount(members, row) for row in d[:, counted]]).astype(np.float64)
    means = _drawn_means(sums, counts, draws, seed)
    tail = float(norm.cdf(t.ppf(0.5 - confidence / 2, k - 1) * math.sqrt(k / (k - 1))))
    found = []
    for whole, drawn, of_classes in zip(d[:, counted].mean(1), means.T, sums / counts, strict=True):
        fewer = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
        share = min(0.5, (fewer + 1) / (draws + 1))  # never 0: that many draws cannot tell
        p = float(2 * t.cdf(norm.ppf(share) * math.sqrt((k - 1) / k), k - 1))
        low, high = np.quantile(drawn, [tail, 1 - tail])
        spread = float(of_classes.std(ddof=1))
        effect = float(of_classes.mean()) / spread if spread else 0.0 if not of_classes.any() else math.nan
        found.append(Difference(float(whole), float(low), float(high), p, effect, k, "bootstrap over classes"))
    return found


def _drawn_means(sums: Floats, counts: Floats, draws: int, seed: int) -> Floats:
    """(draws, P) means over the queries of the classes that were drawn, some draws at a time."""
    k, random = len(counts), np.random.default_rng(seed)
    each = max(1, MEMORY // k)
    found = []
    for start in range(0, draws, each):
        weights = random.multinomial(k, np.full(k, 1 / k), min(each, draws - start)).astype(np.float64)
        found.append((weights @ sums.T) / (weights @ counts)[:, None])
    return np.concatenate(found)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: p-values that keep the chance of any false alarm among them at the level of one.

    Where there is no p-value (NaN) no test was made: it stays NaN, and the others are fewer.
    """
    adjusted, largest = [math.nan] * len(p_values), 0.0
    made = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    if strange := [p_values[i] for i in made if not 0 <= p_values[i] <= 1]:
        raise ValueError(f"a p-value is between 0 and 1, got {strange[0]}")
    for place, i in enumerate(sorted(made, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(made) - place) * float(p_values[i])))
        adjusted[i] = largest
    return adjusted


def _alike(x: Floats, largest: float) -> bool:
    """Whether numbers differ by no more than the rounding of numbers as large as `largest`."""
    return float(np.ptp(x)) <= EXACT * largest


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
