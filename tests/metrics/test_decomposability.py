"""Eqs 6, 8 and 9: what holds, on scores that satisfy each assumption; what does not, by counter-example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import roadmap.metrics.juxtaposition as juxtaposition
from roadmap.metrics.decomposability import (
    DecomposabilityGap,
    ThresholdCounts,
    calibrated_worst_gap,
    calibrated_worst_gap_is_attained,
    eq8_bound,
    eq9_bound,
    gap_range,
    mean_decomposability_gap,
    worst_gap,
    worst_gap_is_attained,
)

ROUNDING = 1e-12
ALPHA, BETA = 0.9, 0.6
Batch = tuple[list[float], list[float]]  # scores of its positives and of its negatives


def gap_of(batches: list[Batch]) -> DecomposabilityGap:
    scores = [s for positives, negatives in batches for s in (*positives, *negatives)]
    relevant = [hit for positives, negatives in batches for hit in [True] * len(positives) + [False] * len(negatives)]
    numbers = [b for b, (positives, negatives) in enumerate(batches) for _ in (*positives, *negatives)]
    return DecomposabilityGap(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(relevant), torch.tensor(numbers), ALPHA, BETA
    )


# Scores on a grid around the thresholds, so that ties and both sides of alpha and beta are common.
score = st.integers(0, 20).map(lambda i: i / 20)


@st.composite
def perfect_batch(draw: st.DrawFn, positives: int | None = None, negatives: int | None = None) -> Batch:
    """A batch with AP_b = 1: every positive above every negative."""
    p = positives if positives is not None else draw(st.integers(1, 3))
    n = negatives if negatives is not None else draw(st.integers(0, 3))
    cut = draw(st.integers(0, 19))
    above = st.integers(cut + 1, 20).map(lambda i: i / 20)
    below = st.integers(0, cut).map(lambda i: i / 20)
    return draw(st.lists(above, min_size=p, max_size=p)), draw(st.lists(below, min_size=n, max_size=n))


perfect_batches = st.lists(perfect_batch(), min_size=1, max_size=4)
alike_batches = st.tuples(st.integers(1, 3), st.integers(0, 3)).flatmap(
    lambda size: st.lists(perfect_batch(*size), min_size=1, max_size=4)
)
any_batches = st.lists(
    st.tuples(st.lists(score, max_size=3), st.lists(score, max_size=3)).filter(any), min_size=1, max_size=4
).filter(lambda batches: any(positives for positives, _ in batches))


def sizes(batches: list[Batch]) -> tuple[list[int], list[int]]:
    return [len(p) for p, _ in batches], [len(n) for _, n in batches]


def orders_of(c: ThresholdCounts) -> Iterator[ThresholdCounts]:
    for order in permutations(range(len(c.good_positives))):
        yield ThresholdCounts(*(tuple(column[b] for b in order) for column in vars(c).values()))


# ---- Eq 6


def test_eq_6_by_hand() -> None:
    # batch 0: + 0.9, - 0.8; batch 1: + 0.5, - 0.1. Together + - + -: AP = (1 + 2/3) / 2
    gap = gap_of([([0.9], [0.8]), ([0.5], [0.1])])
    assert gap.batch_average_precisions == (1.0, 1.0)
    assert gap.gap == pytest.approx(1 / 6)


def test_the_gap_is_negative_when_batches_are_imperfect() -> None:
    # batch 0: - + (AP 1/2); batch 1: three positives above. Together + + + - +: AP = (3 + 4/5) / 4 > 3/4
    gap = gap_of([([0.1], [0.2]), ([0.7, 0.8, 0.9], [])])
    assert gap.gap == pytest.approx((0.5 + 1) / 2 - (3 + 4 / 5) / 4)
    assert gap.gap < 0


@given(perfect_batches)
def test_the_gap_is_not_negative_when_every_batch_is_perfect(batches: list[Batch]) -> None:
    assert gap_of(batches).gap >= 0


# ---- Eq 8


def test_eq_8_ends_its_sum_at_the_positives() -> None:
    assert eq8_bound([2], [3]) == 0.0  # the printed sum to B = 5 gives 1 - 5 / 2 = -1.5
    assert eq8_bound([1, 1], [1, 1]) == pytest.approx(1 - (1 + 2 / 3) / 2)


@given(alike_batches)
def test_eq_8_holds_in_any_order_for_batches_alike(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    assert 0 <= gap.gap <= gap.eq8 + ROUNDING


def test_eq_8_fails_in_a_given_order_for_unlike_batches() -> None:
    # sizes (2 positives, 0 negatives) then (1, 3): Eq 8 in that order says 0; the other order is possible
    gap = gap_of([([0.2, 0.1], []), ([0.9], [0.8, 0.7, 0.6])])
    assert gap.batch_average_precisions == (1.0, 1.0)
    assert gap.eq8 == 0.0
    assert gap.gap == pytest.approx(1 - (1 + 2 / 5 + 3 / 6) / 3)
    assert gap.gap == pytest.approx(gap.worst)


@given(perfect_batches)
def test_worst_gap_is_eq_8_in_the_worst_order_and_holds(batches: list[Batch]) -> None:
    p, n = sizes(batches)
    worst = max(eq8_bound([p[b] for b in order], [n[b] for b in order]) for order in permutations(range(len(p))))
    assert worst_gap(p, n) == pytest.approx(worst, abs=ROUNDING)
    assert gap_of(batches).gap <= worst_gap(p, n) + ROUNDING


def shuffled(orders: list[list[bool]]) -> Iterator[list[bool]]:
    """Every ranking of the whole that keeps the order inside each batch."""
    if not any(orders):
        yield []
    for b, order in enumerate(orders):
        if order:
            for rest in shuffled([*orders[:b], order[1:], *orders[b + 1 :]]):
                yield [order[0], *rest]


def ap(order: list[bool]) -> float:
    places = [place for place, hit in enumerate(order, 1) if hit]
    return sum(found / place for found, place in enumerate(places, 1)) / len(places)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3))
def test_worst_gap_is_the_largest_over_all_rankings_of_the_whole(counts: list[tuple[int, int]]) -> None:
    assume(sum(p for p, _ in counts) > 0)
    literal = max(1 - ap(order) for order in shuffled([[True] * p + [False] * n for p, n in counts]))
    assert worst_gap(*zip(*counts, strict=True)) == pytest.approx(literal, abs=ROUNDING)


@contextmanager
def states(most: int) -> Iterator[None]:
    """With fewer sets of batches to look at."""
    before, juxtaposition.STATES = juxtaposition.STATES, most
    try:
        yield
    finally:
        juxtaposition.STATES = before


def test_neither_ratio_nor_size_decides_which_batch_comes_first() -> None:
    # more negatives per positive first would be (10, 100), the lower gap; smaller first would be (1, 0), the lower gap
    assert eq8_bound([10, 1], [100, 9]) < eq8_bound([1, 10], [9, 100]) == worst_gap([10, 1], [100, 9])
    assert eq8_bound([1, 2], [0, 3]) < eq8_bound([2, 1], [3, 0]) == worst_gap([1, 2], [0, 3])
    assert eq8_bound([10, 1], [100, 9]) == pytest.approx(0.082, abs=1e-3)
    assert worst_gap([10, 1], [100, 9]) == pytest.approx(0.547, abs=1e-3)
    assert (eq8_bound([1, 2], [0, 3]), worst_gap([1, 2], [0, 3])) == pytest.approx((0, 1 / 6))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_the_relaxed_bound_is_never_below_the_worst_gap(counts: list[tuple[int, int]]) -> None:
    assume(sum(p for p, _ in counts) > 0)
    p, n = zip(*counts, strict=True)
    exact = worst_gap(p, n)
    assert worst_gap_is_attained(p, n)
    with states(0):
        relaxed = worst_gap(p, n)
        assert not worst_gap_is_attained(p, n)
    assert exact - ROUNDING <= relaxed < 1
    if len(set(counts)) == 1:  # alike: the sets nest, and the bound is the worst gap
        assert relaxed == pytest.approx(exact, abs=ROUNDING)


def test_a_thousand_batches_are_bounded() -> None:
    assert worst_gap([4] * 1000, [124] * 1000) == pytest.approx(eq8_bound([4] * 1000, [124] * 1000))
    rng = np.random.default_rng(0)
    p, n = rng.integers(1, 9, 40), rng.integers(0, 99, 40)
    assert eq8_bound(p, n) <= worst_gap(p.tolist(), n.tolist()) < 1


# ---- Eq 9


@given(perfect_batches)
def test_eq_9_holds_in_the_worst_order(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    assert 0 <= gap.gap <= max(map(eq9_bound, orders_of(gap.threshold_counts))) + ROUNDING


def test_eq_9_fails_in_a_given_order_even_for_batches_alike() -> None:
    # sizes alike, every negative below beta: Eq 9 in this order says 0, but the first positive comes last
    gap = gap_of([([0.2], [0.1]), ([0.95], [0.5])])
    assert gap.batch_average_precisions == (1.0, 1.0)
    assert gap.eq9 == 0.0
    assert gap.gap == pytest.approx(1 / 6)
    assert gap.gap <= gap.calibrated_worst + ROUNDING


def test_eq_9_can_be_looser_than_eq_8() -> None:
    # batch 0: a positive below alpha, a negative above beta; batch 1: a positive above alpha
    gap = gap_of([([0.8], [0.7]), ([0.95], [])])
    assert gap.eq8 == pytest.approx(1 - (1 + 2 / 3) / 2)
    assert gap.eq9 == pytest.approx(1 - (1 + 1 / 2) / 2)
    assert gap.eq9 > gap.eq8
    # and no scores with these counts have a gap at all: the negative is below its positive, that below alpha
    assert gap.calibrated_worst == 0.0


@given(perfect_batches)
def test_calibrated_worst_gap_holds_and_is_never_above_eq_8_or_eq_9_as_they_hold(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    bound = gap.calibrated_worst
    assert gap.gap <= bound + ROUNDING
    assert bound <= gap.worst + ROUNDING
    assert bound <= max(map(eq9_bound, orders_of(gap.threshold_counts))) + ROUNDING


def literal_calibrated_worst(c: ThresholdCounts) -> float:
    """The largest gap over every choice of regions (above alpha, between, below beta) and every ranking in them."""
    items = [
        (b, positive, regions)
        for b, counts in enumerate(
            zip(c.good_positives, c.bad_positives, c.good_negatives, c.bad_negatives, strict=True)
        )
        for number, positive, regions in zip(counts, (1, 1, 0, 0), ((0,), (1, 2), (2,), (0, 1)), strict=True)
        for _ in range(number)
    ]
    largest = 0.0
    for regions in product(*(item[2] for item in items)):
        for order in permutations(range(len(items))):
            descending = all(regions[a] <= regions[b] for a, b in pairwise(order))
            place = {i: at for at, i in enumerate(order)}
            perfect = all(
                place[i] < place[j]
                for i, (b, hit, _) in enumerate(items)
                for j, (d, other, _) in enumerate(items)
                if b == d and hit and not other
            )
            if descending and perfect:
                largest = max(largest, 1 - ap([bool(items[i][1]) for i in order]))
    return largest


@pytest.mark.parametrize(
    "counts",
    [
        ((1, 1), (0, 0), (1, 0), (0, 1)),
        ((0, 1), (1, 0), (1, 0), (0, 1)),
        ((1, 1), (1, 1), (1, 1), (0, 0)),
        ((1, 0), (0, 2), (0, 0), (1, 1)),
        ((1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1)),
        ((2, 1), (0, 1), (0, 0), (1, 1)),
        ((0, 0), (1, 1), (1, 1), (1, 0)),
        ((0, 1, 0), (1, 0, 1), (1, 0, 1), (1, 1, 0)),
    ],
)
def test_calibrated_worst_gap_is_attained(counts: tuple[tuple[int, ...], ...]) -> None:
    c = ThresholdCounts(*counts)
    assert calibrated_worst_gap(c) == pytest.approx(literal_calibrated_worst(c), abs=ROUNDING)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_calibrated_batches_have_no_gap(counts: list[tuple[int, int]]) -> None:
    p, n = zip(*counts, strict=True)
    assume(sum(p) > 0)
    assert calibrated_worst_gap(ThresholdCounts(p, (0,) * len(p), n, (0,) * len(p))) == pytest.approx(0.0, abs=ROUNDING)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=5))
def test_the_relaxed_calibrated_bound_is_between_the_exact_one_and_the_worst_gap(
    batches: list[tuple[int, int, int, int]],
) -> None:
    counts = ThresholdCounts(*zip(*batches, strict=True))
    p, n = [b[0] + b[1] for b in batches], [b[2] + b[3] for b in batches]
    assume(sum(p) > 0)
    assert calibrated_worst_gap_is_attained(counts)
    exact = calibrated_worst_gap(counts)
    with states(0):
        assert not calibrated_worst_gap_is_attained(counts)
        assert exact - ROUNDING <= calibrated_worst_gap(counts) <= worst_gap(p, n) + ROUNDING


def test_a_relaxed_calibrated_bound_is_not_above_a_worst_gap_that_is_known() -> None:
    """Two sizes make 6 sets of batches, three kinds of calibration 8: with 6 allowed only the first is exact."""
    counts = ThresholdCounts((1, 1, 3), (0, 0, 0), (0, 1, 0), (1, 0, 7))
    with states(6):
        assert worst_gap_is_attained([1, 1, 3], [1, 1, 7])
        assert not calibrated_worst_gap_is_attained(counts)
        bound, worst = calibrated_worst_gap(counts), worst_gap([1, 1, 3], [1, 1, 7])
    assert bound == worst  # the relaxed one alone is 0.367
    assert calibrated_worst_gap(counts) <= bound + ROUNDING


def test_the_gap_says_whether_its_bounds_are_attained() -> None:
    gap = gap_of([([0.95], [0.7]), ([0.8, 0.7], [0.5])])
    assert (gap.worst_is_attained, gap.calibrated_worst_is_attained) == (True, True)
    with states(1):
        assert (gap.worst_is_attained, gap.calibrated_worst_is_attained) == (False, False)


# ---- any AP_b


@given(any_batches)
def test_the_upper_end_of_the_range_holds_for_any_scores(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    assert gap.gap <= gap.range[1] + ROUNDING


@given(any_batches, st.randoms(use_true_random=False))
def test_both_ends_of_the_range_hold_for_distinct_scores(batches: list[Batch], random: object) -> None:
    places = iter(np.random.default_rng(random.randint(0, 2**31)).permutation(64) / 64)  # type: ignore[attr-defined]
    distinct = [([next(places) for _ in p], [next(places) for _ in n]) for p, n in batches]
    gap = gap_of(distinct)
    low, high = gap.range
    assert low - ROUNDING <= gap.gap <= high + ROUNDING


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_range_contains_every_ranking_of_the_whole(orders: list[list[bool]]) -> None:
    assume(any(map(any, orders)))
    each = [ap(order) for order in orders if any(order)]
    gaps = [float(np.mean(each)) - ap(whole) for whole in shuffled(orders)]
    low, high = gap_range(orders, each)
    assert low - ROUNDING <= min(gaps)
    assert max(gaps) <= high + ROUNDING


@given(st.lists(st.booleans(), min_size=1, max_size=6).filter(any))
def test_the_range_of_a_single_batch_is_a_point(order: list[bool]) -> None:
    assert gap_range([order], [ap(order)]) == pytest.approx((0.0, 0.0), abs=ROUNDING)


@given(alike_batches)
def test_the_range_of_perfect_batches_alike_ends_at_eq_8(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    assert gap.range[1] == pytest.approx(gap.eq8, abs=ROUNDING)


@given(perfect_batches)
def test_the_range_of_perfect_batches_starts_at_zero_and_covers_the_worst_gap(batches: list[Batch]) -> None:
    gap = gap_of(batches)
    low, high = gap.range
    assert low == pytest.approx(0.0, abs=ROUNDING)
    assert high >= gap.worst - ROUNDING


# ---- sets of vectors, and errors


def test_mean_gap_of_a_set_is_the_mean_over_its_queries() -> None:
    vectors, labels = torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 4
    labels[7] = 99  # alone in its class: no positives
    batches = torch.arange(30) // 10
    unit = torch.nn.functional.normalize(vectors)
    gaps = []
    for i in [i for i in range(30) if i != 7]:
        others = torch.arange(30) != i
        gaps.append(DecomposabilityGap((unit @ unit[i])[others], labels[others] == labels[i], batches[others]))
    found = mean_decomposability_gap(vectors, labels, batches)
    assert found["DG_AP"] == pytest.approx(np.mean([gap.gap for gap in gaps]))
    assert found["mAP"] == pytest.approx(np.mean([gap.average_precision for gap in gaps]))
    assert (found["queries"], found["queries_without_positives"]) == (30, 1)


def test_errors_name_what_came() -> None:
    s, r, b = torch.rand(3), torch.tensor([True, False, True]), torch.zeros(3)
    with pytest.raises(ValueError, match=r"must share one shape \(N,\), got \[\(3,\), \(2,\), \(3,\)\]"):
        DecomposabilityGap(s, r[:2], b)
    with pytest.raises(ValueError, match="relevant marks no item"):
        DecomposabilityGap(s, torch.zeros(3, dtype=torch.bool), b)
    with pytest.raises(ValueError, match="beta must be below alpha, got alpha=0.5 and beta=0.6"):
        DecomposabilityGap(s, r, b, alpha=0.5)
    with pytest.raises(ValueError, match="positives sum to zero"):
        worst_gap([0], [3])
    with pytest.raises(ValueError, match=r"batches must have shape \(3,\)"):
        mean_decomposability_gap(torch.eye(3), [0, 0, 1], [0, 1])
