"""Two groups of runs against each other, by one metric: over their seeds, and over the queries of one seed.

Which group is the best is decided by the same numbers that are then tested. A test of k - 1 groups against the best of
k, corrected for k - 1 tests, therefore gives more false alarms than it says: the best is ahead because it was chosen
for being ahead. So all k (k - 1) / 2 pairs are tested and corrected for, among which those with the best are, whichever
that is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from roadmap.experiments.results import Measurement, Outcome
from roadmap.experiments.statistics import (
    FEWEST_CLASSES,
    Difference,
    clustered_bootstraps,
    holm,
    mcnemar,
    paired_t,
)

FEWEST_SEEDS = 2  # from which a test over seeds can be made
TWO_SEEDS = (
    "two seeds in common show only very large differences: what was not found worse over them need not be as good"
)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Versus:
    """A group against another: differences are the group's less the other's.

    Attributes:
        seeds: the paired t-test over the seeds that both have; None for fewer than two.
        classes: the bootstrap over classes, of the first seed that both have; None where the values of the queries were
            not kept, or are of too few classes.
        mcnemar: McNemar's test of the same queries, for R@k; it takes queries of a class to be independent.
        p_seeds, p_classes, p_mcnemar: of each, after Holm's correction over all pairs; NaN where there is no such test.
        p: what decides, after the same correction. Over seeds where these can tell, else over classes; for R@k the
            larger of classes and McNemar. NaN where none can tell.
    """

    seeds: Difference | None = None
    classes: Difference | None = None
    mcnemar: Difference | None = None
    p_seeds: float = math.nan
    p_classes: float = math.nan
    p_mcnemar: float = math.nan
    p: float = math.nan

    @property
    def shown(self) -> Difference | None:
        """The difference of which a table tells: over seeds, else over queries."""
        return self.seeds or self.classes or self.mcnemar


@dataclass(frozen=True)
class Pairs:
    """All pairs of groups, by one metric.

    Attributes:
        tests: (one, other) -> other less one.
        remarks: what could not be tested, and why.
    """

    tests: Mapping[Pair, Versus]
    remarks: tuple[str, ...] = field(default=())

    @property
    def tested(self) -> int:
        """Pairs that anything can tell apart, which the correction is for."""
        return sum(not math.isnan(found.p) for found in self.tests.values())


def pairs_of(
    groups: Mapping[str, Mapping[int, Outcome]], test: str, epoch: str, metric: str, best: str, draws: int
) -> Pairs:
    """Every pair once; those with `best` begin with it."""
    order = [best, *(group for group in groups if group != best)]
    pairs = list(combinations(order, 2))
    shared = {(one, other): sorted(groups[one].keys() & groups[other].keys()) for one, other in pairs}
    seeds = {pair: _over_seeds(groups, pair, found, test, epoch, metric) for pair, found in shared.items()}
    asked = {
        (one, other): (groups[one][found[0]].test(test, epoch), groups[other][found[0]].test(test, epoch))
        for (one, other), found in shared.items()
        if found
    }
    kept = {pair: both for pair, both in asked.items() if all(metric in side.per_query for side in both)}
    classes, remarks = _over_classes(kept, metric, draws)
    if len(kept) < len(asked):
        whose = f"{metric} was not kept query by query, for {'some' if kept else 'all'} pairs of groups"
        remarks.append(f"{whose}: these have no test over queries")
    if any(test is not None and test.n == FEWEST_SEEDS for test in seeds.values()):
        remarks.append(TWO_SEEDS)
    answers = {
        pair: mcnemar(one.per_query[metric], other.per_query[metric])
        for pair, (one, other) in kept.items()
        if metric.startswith("R@")
    }
    return Pairs(_corrected_tests(pairs, seeds, classes, answers), tuple(remarks))


def _over_seeds(
    groups: Mapping[str, Mapping[int, Outcome]], pair: Pair, shared: Sequence[int], test: str, epoch: str, metric: str
) -> Difference | None:
    if len(shared) < FEWEST_SEEDS:
        return None
    first, second = ([groups[group][seed].test(test, epoch).metrics[metric] for seed in shared] for group in pair)
    return paired_t(first, second)


def _over_classes(
    asked: Mapping[Pair, tuple[Measurement, Measurement]], metric: str, draws: int
) -> tuple[dict[Pair, Difference], list[str]]:
    """All pairs with the same draws; none where there are too few classes, or none are known."""
    if not asked:
        return {}, []
    first = next(iter(asked.values()))[0]
    if len(first.labels) != len(first.per_query[metric]):
        return {}, ["the classes of the queries were not kept: nothing is tested over them"]
    count = len(np.unique(first.labels[~np.isnan(first.per_query[metric])]))
    if count < FEWEST_CLASSES:
        return {}, [
            f"the queries are of {count} classes, too few for a bootstrap over classes, which needs {FEWEST_CLASSES}: "
            "one seed cannot tell groups apart"
        ]
    differences = [other.per_query[metric] - one.per_query[metric] for one, other in asked.values()]
    found = clustered_bootstraps(np.stack(differences), first.labels, draws)
    return dict(zip(asked, found, strict=True)), []


def _corrected_tests(
    pairs: Sequence[Pair],
    seeds: Mapping[Pair, Difference | None],
    classes: Mapping[Pair, Difference],
    answers: Mapping[Pair, Difference],
) -> dict[Pair, Versus]:
    raw = [[_p(tests.get(pair)) for pair in pairs] for tests in (seeds, classes, answers)]
    deciding = [_deciding_p(*three) for three in zip(*raw, strict=True)]
    corrected = [holm(values) for values in (*raw, deciding)]
    return {
        pair: Versus(seeds.get(pair), classes.get(pair), answers.get(pair), *(values[place] for values in corrected))
        for place, pair in enumerate(pairs)
    }


def _p(found: Difference | None) -> float:
    return math.nan if found is None else found.p


def _deciding_p(seeds: float, classes: float, answers: float) -> float:
    if not math.isnan(seeds):
        return seeds
    # McNemar's alone would take queries of a class to be independent; the bootstrap's alone, few disagreements for many
    return classes if math.isnan(classes) or math.isnan(answers) else max(classes, answers)
