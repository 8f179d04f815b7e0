"""Statistics against worked examples, scipy, and loops that do what the words say."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from roadmap.experiments.statistics import clustered_bootstrap, estimate, holm, mcnemar, paired_t

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


def test_equal_differences_have_no_spread_to_judge_by() -> None:
    assert paired_t([1, 2, 3], [1, 2, 3]).p == 1
    always = paired_t([1, 2, 3], [2, 3, 4])
    assert (always.difference, always.p, always.effect) == (1, 0, math.inf)


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
    """The same draws, by a loop over the queries of the classes that were drawn."""
    draw = np.random.default_rng(3)
    clusters = np.repeat([4, 7, 9, 20], [2, 5, 3, 6])
    a, b = draw.random(16), draw.random(16)
    a[3] = np.nan
    found = clustered_bootstrap(a, b, clusters, draws=200, seed=5)
    weights = np.random.default_rng(5).multinomial(4, [0.25] * 4, 200)
    means = []
    for times in weights:
        drawn = [
            b[i] - a[i]
            for label, count in zip([4, 7, 9, 20], times, strict=True)
            for _ in range(count)
            for i in range(16)
            if clusters[i] == label and i != 3
        ]
        means.append(sum(drawn) / len(drawn))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    worse, better = sum(m <= 0 for m in means), sum(m >= 0 for m in means)
    assert found.p == pytest.approx(min(1, 2 * (min(worse, better) + 1) / 201))
    assert found.difference == pytest.approx(np.nanmean(b - a))
    assert found.n == 4


def test_with_one_query_a_class_it_is_the_plain_bootstrap() -> None:
    d = np.random.default_rng(0).normal(0.1, 1, 80)
    found = clustered_bootstrap(np.zeros(80), d, np.arange(80), draws=20_000)
    theirs = scipy.stats.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


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
        (lambda: clustered_bootstrap([1, 2], [1, 3], [5, 5]), "at least 2 of them, got 1"),
    ],
)
def test_what_cannot_be_tested(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
