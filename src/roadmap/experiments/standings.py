"""`compare`: runs side by side, grouped by what differs, with tests that say which differences are more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roadmap.experiments.grouping import (
    CHOICES,
    Groups,
    check_comparable,
    common_metrics,
    common_test,
    copies,
    differences_of_origin,
    runs_by_difference,
    without_copies,
)
from roadmap.experiments.results import CHOSEN, Outcome, outcomes_of, unfinished_runs
from roadmap.experiments.sheet import Cell, Sheet, row
from roadmap.experiments.statistics import DRAWS, Estimate, estimate
from roadmap.experiments.versus import FEWEST_SEEDS, Pairs, Versus, pairs_of

LEVEL = 0.05
SHOWN = ("R@1", "mAP@R")
FLATTERY = "the epoch was chosen on the test set, as in the paper: all numbers flatter"


@dataclass(frozen=True)
class Standing:
    """One group of runs, which differ in nothing but their seed, by one metric on one test set.

    Attributes:
        group: what it is, such as "loss=roadmap".
        seeds: seed -> value, in 0..1.
        estimate: over the seeds.
        versus: the best group; None for the best itself.
        best: it is the best, or was tested and not found worse. One that nothing could test is not.
    """

    group: str
    seeds: dict[int, float]
    estimate: Estimate
    versus: Versus | None
    best: bool


@dataclass(frozen=True, eq=False)
class Standings:
    """Groups of runs side by side. Printed, it is a table; `sheet` exports it; the p-values are in `standings`.

    Attributes:
        test: the test set.
        selection: how the epoch was chosen.
        standings: metric -> groups, in the order given.
        notes: what the columns are.
        remarks: what a reader should know of these runs.
    """

    test: str
    selection: str
    standings: dict[str, tuple[Standing, ...]]
    notes: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sheet.text()

    def p_values(self, metric: str) -> dict[str, float]:
        """Group -> p after Holm's correction, against the best group, which has none itself."""
        return {one.group: one.versus.p for one in self.standings[metric] if one.versus is not None}

    @property
    def sheet(self) -> Sheet:
        """For a person, in percent; the groups that are not worse than the best are in bold."""
        metrics = list(self.standings)
        columns = ["group", "runs"]
        for metric in metrics:
            columns += [metric, "95 %", "to the best", "effect", "p, seeds", "p, classes"]
            columns += ["p, McNemar"] if metric.startswith("R@") else []
        rows = []
        for place, first in enumerate(self.standings[metrics[0]]):
            cells: list[str | Cell] = [first.group, str(first.estimate.n)]
            for metric in metrics:
                cells += _cells(self.standings[metric][place], metric.startswith("R@"))
            rows.append(row(cells))
        return Sheet(f"{self.test}, {self.selection}", tuple(columns), tuple(rows), (*self.notes, *self.remarks))


def compare(
    runs: Sequence[str | Path | Outcome], test: str | None = None, epoch: str = CHOSEN,
    metrics: Sequence[str] = SHOWN, draws: int = DRAWS,
) -> Standings:  # fmt: skip
    """Runs side by side: grouped by the settings in which they differ, seeds being repetitions.

    Args:
        runs: run folders, folders of runs, files of results, or outcomes.
        test: the test set; None for the only one.
        epoch: "chosen" by each run, or its "last".
        metrics: to compare, of which more is better.
        draws: of the bootstrap.

    Raises:
        ValueError: runs that cannot be compared: other pictures, another protocol, another way to choose the epoch.
    """
    outcomes = [run for given in runs for run in _runs_of(given)]
    if not outcomes:
        raise ValueError("there is nothing to compare: give run folders")
    name = common_test(outcomes, test)
    check_comparable(outcomes, name, epoch)
    known = common_metrics(outcomes, name, epoch, metrics)
    groups = runs_by_difference(outcomes)
    left = unfinished_runs([given for given in runs if not isinstance(given, Outcome)])
    remarks = [f"not finished, and left out: {', '.join(left)}"] if left else []
    remarks += [*copies(groups, name, epoch), *differences_of_origin(groups)]
    found, pairs = {}, {}
    for metric in known:
        found[metric], pairs[metric] = _standings(groups, name, epoch, metric, draws)
    by = outcomes[0].by if epoch == CHOSEN else "last"
    notes = _notes(next(iter(pairs.values())))
    remarks += [*_remarks(groups, by, draws), *dict.fromkeys(text for one in pairs.values() for text in one.remarks)]
    return Standings(name, CHOICES[by], found, notes, tuple(remarks))


def _runs_of(given: str | Path | Outcome) -> list[Outcome]:
    if isinstance(given, Outcome):
        return [given]
    found = outcomes_of([given])
    return without_copies(found) if Path(given).suffix == ".jsonl" else found


def _standings(groups: Groups, test: str, epoch: str, metric: str, draws: int) -> tuple[tuple[Standing, ...], Pairs]:
    values = {
        group: {seed: float(run.test(test, epoch).metrics[metric]) for seed, run in runs.items()}
        for group, runs in groups.items()
    }
    means = {group: estimate(list(seeds.values())) for group, seeds in values.items()}
    best = max(means, key=lambda group: means[group].mean)
    pairs = pairs_of(groups, test, epoch, metric, best, draws)
    found = []
    for group in groups:
        versus = None if group == best else pairs.tests[best, group]
        found.append(Standing(group, values[group], means[group], versus, versus is None or versus.p >= LEVEL))
    return tuple(found), pairs


def _cells(one: Standing, answers: bool) -> list[str | Cell]:
    told = one.estimate
    mean = f"{100 * told.mean:.2f}" + (f" ± {100 * told.sd:.2f}" if told.n > 1 else "")
    interval = "-" if math.isnan(told.low) else f"{100 * told.low:.2f} to {100 * told.high:.2f}"
    tests = 3 if answers else 2
    if one.versus is None:
        return [Cell(mean, True), interval, "best", *["-"] * (tests + 1)]
    test, ps = one.versus.shown, (one.versus.p_seeds, one.versus.p_classes, one.versus.p_mcnemar)
    difference, effect = ("-", "-") if test is None else (f"{100 * test.difference:+.2f}", _number(test.effect))
    difference += ", not tested" if math.isnan(one.versus.p) else ""
    return [Cell(mean, one.best), interval, difference, effect, *map(_p, ps[:tests])]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def _notes(pairs: Pairs) -> tuple[str, ...]:
    count = pairs.tested
    if not pairs.tests:
        return ("one group: there is nothing to compare it with",)
    return (
        "in bold: the best group, and all groups that were tested and not found worse at the level 0.05, over the "
        "seeds in common where there are several, else over the queries of one (R@k: by both tests)",
        "to the best: the difference, over the seeds in common, or in the first of them where p is over queries",
        "p, seeds: paired t-test; effect: Cohen's d_z",
        "p, classes: bootstrap over classes; p, McNemar: exact test, as if queries of a class were independent, which "
        "they are not; both over the queries of the first seed in common. They tell two trained models apart, not two "
        "ways to train",
        f"p-values are after Holm's correction over all pairs of groups ({count}), not only those with the best, "
        "because the same numbers choose the best; for each metric and each column by itself",
    )


def _remarks(groups: Groups, by: str, draws: int) -> list[str]:
    found = []
    count = len(groups) * (len(groups) - 1) // 2
    if max(len(runs) for runs in groups.values()) < FEWEST_SEEDS:
        effects = "; effects are those of the queries" if count else ""
        found.append(f"one run each: nothing is known of how much the seed matters{effects}")
    elif len({tuple(runs) for runs in groups.values()}) > 1:
        each = "; ".join(f"{group}: {', '.join(map(str, runs))}" for group, runs in groups.items())
        found.append(f"groups have other seeds, so that their means are not of the same ones ({each})")
    if not set.intersection(*(set(runs) for runs in groups.values())):
        found.append("some groups have no seed in common with others: they are not tested against each other")
    if 2 * count / (draws + 1) >= LEVEL:
        found.append(f"{draws} draws are too few to show anything over classes among {count} pairs; give more draws")
    if by == "test":
        found.append(FLATTERY)
    return found
