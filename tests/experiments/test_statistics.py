"""Statistics against worked examples, scipy, and loops that do what the words say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from roadmap.experiments.statistics import (
    FEWEST_CLASSES,
    clustered_bootstrap,
    clustered_bootstraps,
    estimate,
    holm,
    mcnemar,
    paired_t,
    t_quantile,
)

# Student (1908): hours of sleep gained by ten patients with two drugs.
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
numbers = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=2, max_size=12)
answers = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def test_students_own_example() -> None:
    """t = 4.0621 with 9 degrees of freedom, p = 0.002833, interval 0.7001 to 2.4599; the mean gain is 1.58."""
    found = paired_t(FIRST, SECOND)
    assert found.difference == pytest.approx(1.58)
    assert (round(found.low, 4), round(found.high, 4)) == (0.7001, 2.4599)
    assert round(found.p, 6) == 0.002833
    assert round(found.effect * math.sqrt(found.n), 4) == 4.0621
    assert found.effect == pytest.approx(1.58 / np.std(np.subtract(SECOND, FIRST), ddof=1))


@given(numbers)
def test_paired_t_is_scipys(values: list[float]) -> None:
    other = [value + ((i * 7) % 5 - 2) / 10 for i, value in enumerate(values)]
    if np.ptp(np.subtract(other, values)) < 1e-9:
        return
    ours, theirs = paired_t(values, other), scipy.stats.ttest_rel(other, values)
    assert ours.p == pytest.approx(theirs.pvalue)
    low, high = theirs.confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((low, high))
    back = paired_t(other, values)
    assert (back.difference, back.effect, back.p) == pytest.approx((-ours.difference, -ours.effect, ours.p))


def test_an_estimate_by_hand() -> None:
    found = estimate([42.59, 42.97, 42.74])
    assert found.mean == pytest.approx(42.7667, abs=1e-4)
    assert found.sd == pytest.approx(0.1914, abs=1e-4)
    # Student's t for two degrees of freedom is 4.3027 (any printed table)
    assert (found.low, found.high) == pytest.approx((42.7667 - 4.3027 * 0.1914 / 3**0.5, 43.2422), abs=2e-4)
    alone = estimate([0.5])
    assert (alone.mean, alone.n) == (0.5, 1)
    assert all(map(math.isnan, (alone.sd, alone.low, alone.high)))


@pytest.mark.parametrize("shift", [1.0, 0.1])  # 0.1 more is not the same number in all of them, but for rounding
def test_equal_differences_have_no_spread_to_judge_by(shift: float) -> None:
    """t would be infinite, and p zero, of two runs as of a hundred."""
    first = [0.5, 0.7, 0.9]
    assert paired_t(first, first).p == 1
    always = paired_t(first, [value + shift for value in first])
    assert always.difference == pytest.approx(shift)
    assert all(map(math.isnan, (always.p, always.effect, always.low, always.high)))


def test_equal_runs_say_nothing_of_how_much_runs_differ() -> None:
    found = estimate([0.3, 0.1 + 0.2])
    assert (found.sd, found.n) == (0, 2)
    assert all(map(math.isnan, (found.low, found.high)))


@given(answers)
def test_mcnemar_is_the_sum_of_the_binomial(pairs: list[tuple[int, int]]) -> None:
    """By chance alone each side wins half of the disagreements: the probability of a split at most as likely."""
    a, b = zip(*pairs, strict=True)
    lost, won = sum(x > y for x, y in pairs), sum(y > x for x, y in pairs)
    n = lost + won
    likely = [math.comb(n, k) / 2**n for k in range(n + 1)]
    expected = sum(p for p in likely if p <= likely[won] * (1 + 1e-9)) if n else 1.0
    found = mcnemar(a, b)
    assert found.p == pytest.approx(expected)
    assert found.difference == pytest.approx((won - lost) / len(pairs))
    assert found.n == n
    assert mcnemar(b, a).p == pytest.approx(found.p)


def test_mcnemar_by_hand() -> None:
    """Eleven questions that only the second answers, one that only the first does: p = 2 (1 + 12) / 2^12."""
    found = mcnemar([1] + [0] * 11 + [1] * 30 + [math.nan], [0] + [1] * 11 + [1] * 30 + [1])
    assert found.p == pytest.approx(2 * 13 / 4096)
    assert found.effect == pytest.approx(11 / 12 - 0.5)
    assert found.difference == pytest.approx(10 / 42)  # the query without an answer does not count


def test_the_bootstrap_draws_whole_classes() -> None:
    """The same draws, by a loop over the queries of the classes that were drawn; the percentiles of the interval are
    those between which t, not z, has 95 of 100, wider by the root of k / (k - 1)."""
    draw = np.random.default_rng(3)
    k = 22
    clusters = np.repeat(draw.permutation(100)[:k], draw.integers(2, 6, k))
    a, b = draw.random(len(clusters)), draw.random(len(clusters)) + 0.1
    a[3] = np.nan
    found = clustered_bootstrap(a, b, clusters, draws=200, seed=5)
    weights = np.random.default_rng(5).multinomial(k, [1 / k] * k, 200)
    means = []
    for times in weights:
        drawn = [
            b[i] - a[i]
            for label, count in zip(sorted(set(clusters)), times, strict=True)
            for _ in range(count)
            for i in range(len(clusters))
            if clusters[i] == label and i != 3
        ]
        means.append(sum(drawn) / len(drawn))
    assert t_quantile(21) == pytest.approx(2.0796, abs=1e-4)  # any printed table
    tail = scipy.stats.norm.cdf(-2.0796 * math.sqrt(22 / 21))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [tail, 1 - tail])), abs=1e-5)
    worse, better = sum(m <= 0 for m in means), sum(m >= 0 for m in means)
    z = scipy.stats.norm.ppf((min(worse, better) + 1) / 201)
    assert found.p == pytest.approx(2 * scipy.stats.t.cdf(z * math.sqrt(21 / 22), 21))
    assert found.difference == pytest.approx(np.nanmean(b - a))
    assert found.n == k


@pytest.mark.parametrize("shift", [-0.4, -0.05, 0.0, 0.05, 0.4])
def test_the_interval_holds_zero_where_p_is_large(shift: float) -> None:
    draw = np.random.default_rng(7)
    d = draw.normal(shift, 0.5, 25)[np.repeat(np.arange(25), 4)]
    found = clustered_bootstrap(np.zeros(100), d, np.repeat(np.arange(25), 4), draws=4000)
    assert (found.low <= 0 <= found.high) == (found.p >= 0.05)


def test_pairs_together_are_pairs_alone_however_few_draws_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(8)
    clusters, d = np.repeat(np.arange(30), 3), draw.normal(0, 1, (3, 90))
    d[:, 5] = np.nan
    together = clustered_bootstraps(d, clusters, 300)
    monkeypatch.setattr("roadmap.experiments.statistics.MEMORY", 100)
    for one, row in zip(together, d, strict=True):
        alone = clustered_bootstrap(np.zeros(90), row, clusters, 300)
        assert dataclasses.astuple(one)[:-1] == pytest.approx(dataclasses.astuple(alone)[:-1])
    d[0, 6] = np.nan
    with pytest.raises(ValueError, match="some queries count in one pair and not in another"):
        clustered_bootstraps(d, clusters, 300)


def test_no_draw_makes_a_p_of_zero() -> None:
    clusters = np.repeat(np.arange(FEWEST_CLASSES), 5)
    assert clustered_bootstrap(np.zeros(100), np.ones(100) + clusters, clusters, 100).p > 0


def test_with_one_query_a_class_it_is_the_plain_bootstrap() -> None:
    """Of many classes: then t is z, and the root of k / (k - 1) is 1."""
    d = np.random.default_rng(0).normal(0.1, 1, 2000)
    found = clustered_bootstrap(np.zeros(2000), d, np.arange(2000), draws=5000)
    theirs = scipy.stats.bootstrap((d,), np.mean, n_resamples=5000, method="percentile", rng=1).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.003)


def shared_by_class(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two models that are alike but for chance, where the queries of a class go up or down together."""
    clusters = np.repeat(np.arange(40), 10)
    d = draw.normal(0, 1, 40)[clusters] + draw.normal(0, 1, 400)
    return np.zeros(400), d, clusters


def test_queries_of_a_class_are_not_independent() -> None:
    """Drawn by classes, a false alarm is as rare as it should be; drawn by queries, it comes every other time."""
    draw = np.random.default_rng(1)
    alarms = {"classes": 0, "queries": 0}
    for _ in range(200):
        a, b, clusters = shared_by_class(draw)
        alarms["classes"] += clustered_bootstrap(a, b, clusters, draws=400).p < 0.05
        alarms["queries"] += clustered_bootstrap(a, b, np.arange(400), draws=400).p < 0.05
    assert alarms["classes"] <= 25  # 10 are expected
    assert alarms["queries"] >= 60


def answers_by_class(draw: np.random.Generator, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two models that are alike but for chance; all queries of a class are right or wrong together."""
    clusters = np.repeat(np.arange(k), draw.integers(5, 15, k))
    a, b = ((draw.random(k) < 0.6)[clusters].astype(float) for _ in range(2))
    return a, b, clusters


@pytest.mark.parametrize("k", [FEWEST_CLASSES, 100])
def test_right_answers_of_a_class_are_not_independent(k: int) -> None:
    """Where queries of a class are perfectly correlated the bootstrap over classes keeps its level and its interval
    holds the truth; McNemar's test, to which every query is a new one, is wrong most of the time."""
    draw = np.random.default_rng(4)
    alarms, wrong, inside = 0, 0, 0
    for _ in range(400):
        a, b, clusters = answers_by_class(draw, k)
        found = clustered_bootstrap(a, b, clusters, draws=400)
        alarms += found.p < 0.05
        inside += found.low <= 0 <= found.high
        wrong += mcnemar(a, b).p < 0.05
    assert 8 <= alarms <= 32  # 20 are expected
    assert inside >= 368
    assert wrong >= 160


def skewed(draw: np.random.Generator, k: int) -> np.ndarray:
    return draw.exponential(1, k) - 1


def even(draw: np.random.Generator, k: int) -> np.ndarray:
    return draw.normal(0, 1, k)


@pytest.mark.parametrize(
    ("of_classes", "k", "most"), [(even, FEWEST_CLASSES, 0.07), (skewed, FEWEST_CLASSES, 0.12), (skewed, 100, 0.09)]
)
def test_the_level_with_few_classes(
    of_classes: Callable[[np.random.Generator, int], np.ndarray], k: int, most: float
) -> None:
    """Near 0.05 from FEWEST_CLASSES on where classes lean either way alike; more where few of them lean far."""
    draw, alarms = np.random.default_rng(5), 0
    for _ in range(500):
        clusters = np.repeat(np.arange(k), draw.integers(5, 30, k))
        d = of_classes(draw, k)[clusters] + draw.normal(0, 1, len(clusters))
        alarms += clustered_bootstrap(np.zeros(len(d)), d, clusters, draws=400).p < 0.05
    assert 0.03 <= alarms / 500 <= most


def test_statsmodels_says_the_same() -> None:
    """Where it is installed: Holm's correction, exact McNemar, the paired t-test and its interval."""
    tests = pytest.importorskip("statsmodels.stats.api")
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    draw = np.random.default_rng(6)
    for _ in range(100):
        p_values = draw.random(draw.integers(1, 12)) ** 3
        assert holm(p_values.tolist()) == pytest.approx(tests.multipletests(p_values, method="holm")[1])
        a, b = draw.integers(0, 2, (2, draw.integers(2, 80)))
        table = [[((a == i) & (b == j)).sum() for j in (1, 0)] for i in (1, 0)]
        assert mcnemar(a, b).p == pytest.approx(tables.mcnemar(table, exact=True).pvalue)
        x, y = draw.normal(0, 1, (2, draw.integers(2, 9)))
        theirs, ours = tests.DescrStatsW(y - x), paired_t(x, y)
        assert ours.p == pytest.approx(theirs.ttest_mean(0)[1])
        assert (ours.low, ours.high) == pytest.approx(theirs.tconfint_mean(0.05))


def p_of_t(draw: np.random.Generator) -> float:
    return paired_t(draw.normal(0, 1, 5), draw.normal(0, 1, 5)).p


def p_of_mcnemar(draw: np.random.Generator) -> float:
    return mcnemar(draw.integers(0, 2, 60), draw.integers(0, 2, 60)).p


@pytest.mark.parametrize(("p_value", "least"), [(p_of_t, 0.03), (p_of_mcnemar, 0.01)])
def test_chance_alone_is_rarely_significant(p_value: Callable[[np.random.Generator], float], least: float) -> None:
    """One in twenty at the level 0.05; an exact test of few disagreements is rarer."""
    draw = np.random.default_rng(2)
    small = np.mean([p_value(draw) < 0.05 for _ in range(600)])
    assert least <= small <= 0.075


def test_intervals_cover_the_truth() -> None:
    draw = np.random.default_rng(3)
    inside = [estimate(draw.normal(7, 2, 4)) for _ in range(600)]
    assert 0.92 <= np.mean([one.low <= 7 <= one.high for one in inside]) <= 0.98


def test_holm_by_hand() -> None:
    """The four p-values with which it is usually explained."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    # where there is no test there is nothing to correct for
    found = holm([0.01, math.nan, 0.04])
    assert (found[0], found[2]) == (pytest.approx(0.02), pytest.approx(0.04))
    assert math.isnan(found[1])
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.2"):
        holm([0.1, 1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_nothing_and_bonferroni(p_values: list[float]) -> None:
    found = holm(p_values)
    for p, adjusted in zip(p_values, found, strict=True):
        assert p <= adjusted <= min(1, len(p_values) * p) + 1e-12
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.asarray(found)[order]) >= 0)
    # step by step: the smallest decides first, and the first that fails stops all after it
    rejected: list[int] = []
    for place, i in enumerate(order):
        if p_values[i] * (len(p_values) - place) > 0.05:
            break
        rejected.append(int(i))
    assert sorted(rejected) == [i for i, adjusted in enumerate(found) if adjusted <= 0.05]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: estimate([]), "at least 1 finite numbers"),
        (lambda: estimate([1.0, math.nan]), r"got \[1.0, nan\]"),
        (lambda: paired_t([1, 2], [1, 2, 3]), "as many numbers on both sides, got 2 and 3"),
        (lambda: paired_t([1], [2]), "at least 2 finite numbers"),
        (lambda: mcnemar([0.5], [1]), r"right \(1\) or wrong \(0\)"),
        (lambda: mcnemar([1, 0], [1]), r"the same queries, got shapes \(2,\) and \(1,\)"),
        (lambda: clustered_bootstrap([math.nan], [1], [0]), "no query counts on both sides"),
        (lambda: clustered_bootstrap([1, 2], [1, 3], [5, 5]), "at least 20 of them, got 1"),
        (lambda: clustered_bootstrap([1] * 19, [2] * 19, range(19)), "at least 20 of them, got 19"),
        (lambda: clustered_bootstrap([1] * 20, [2] * 20, range(19)), r"one class, got 20 queries and \(19,\)"),
        (lambda: clustered_bootstrap([1] * 20, [2] * 20, range(20), draws=50), "draws=50 cannot tell"),
    ],
)
def test_what_cannot_be_tested(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
