"""`compare`: runs side by side, grouped by what differs, with tests that say which differences are more than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadmap.experiments.results import CHOSEN, Outcome, outcomes_of
from roadmap.experiments.sheet import Cell, Sheet, row
from roadmap.experiments.statistics import (
    DRAWS,
    Difference,
    Estimate,
    clustered_bootstrap,
    estimate,
    holm,
    mcnemar,
    paired_t,
)

LEVEL = 0.05
SHOWN = ("R@1", "mAP@R")
FEWEST_SEEDS = 2  # from which a test over seeds can be made
# What may differ without making another group: where it ran, and how fast.
NEUTRAL = ("seed", "recipe", "hardware", "checkpoint_minutes", "data.workers", "data.pack", "data.on_error")
CHOICES = {
    "last": "the last epoch",
    "held_out": "the best epoch on held-out classes",
    "test": "the best epoch on the test set",
}


@dataclass(frozen=True)
class Versus:
    """A group against the best one, by one metric: differences are the group's less the best one's.

    Attributes:
        seeds: the paired t-test over the seeds that both have; None for fewer than two.
        queries: McNemar (R@1) or the bootstrap over classes, of the first seed that both have; None where the values of
            the queries were not kept.
        p_seeds, p_queries: of each, after Holm's correction over all groups; NaN where there is no such test.
    """

    seeds: Difference | None
    queries: Difference | None
    p_seeds: float
    p_queries: float

    @property
    def p(self) -> float:
        """What decides: over seeds where there are several, else over queries; NaN where neither is."""
        return self.p_queries if self.seeds is None else self.p_seeds


@dataclass(frozen=True)
class Standing:
    """One group of runs, which differ in nothing but their seed, by one metric on one test set.

    Attributes:
        group: what it is, such as "loss=roadmap".
        seeds: seed -> value, in 0..1.
        estimate: over the seeds.
        versus: the best group; None for the best itself.
        best: it is not worse than the best, as far as the test can tell.
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
        notes: what a reader should know.
    """

    test: str
    selection: str
    standings: dict[str, tuple[Standing, ...]]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return self.sheet.text()

    def p_values(self, metric: str) -> dict[str, float]:
        """Group -> p after Holm's correction, against the best group, which has none itself."""
        return {one.group: one.versus.p for one in self.standings[metric] if one.versus is not None}

    @property
    def sheet(self) -> Sheet:
        """For a person, in percent; the group that is not worse than the best is in bold."""
        metrics = list(self.standings)
        columns = ["group", "runs"]
        for metric in metrics:
            columns += [metric, "95 %", "to the best", "effect", "p, seeds", "p, queries"]
        rows = []
        for place, first in enumerate(self.standings[metrics[0]]):
            cells: list[str | Cell] = [first.group, str(first.estimate.n)]
            for metric in metrics:
                cells += _cells(self.standings[metric][place])
            rows.append(row(cells))
        return Sheet(f"{self.test}, {self.selection}", tuple(columns), tuple(rows), self.notes)


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
    outcomes = [run for given in runs for run in ([given] if isinstance(given, Outcome) else outcomes_of([given]))]
    if not outcomes:
        raise ValueError("there is nothing to compare: give run folders")
    name = _common_test(outcomes, test)
    _check(outcomes, name, epoch)
    groups = _groups(outcomes)
    found = {
        metric: _standings(groups, name, epoch, metric, draws) for metric in _known(outcomes, name, epoch, metrics)
    }
    by = outcomes[0].by if epoch == CHOSEN else "last"
    return Standings(name, CHOICES[by], found, tuple(_notes(groups, by)))


def _common_test(outcomes: Sequence[Outcome], test: str | None) -> str:
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.tests))
    shared = [name for name in names if all(name in outcome.tests for outcome in outcomes)]
    if test is not None:
        shared = [name for name in shared if name == test]
    if len(shared) == 1:
        return shared[0]
    if not shared:
        told = "; ".join(f"{outcome.name}: {', '.join(outcome.tests)}" for outcome in outcomes[:4])
        raise ValueError(f"the runs were not tested on the same pictures ({told}); compare those that were")
    raise ValueError(f"the runs have several test sets; choose test= one of {', '.join(shared)}")


def _check(outcomes: Sequence[Outcome], test: str, epoch: str) -> None:
    """Refuses what is not comparable, and says which run differs in what."""
    first = outcomes[0]
    for other in outcomes[1:]:
        one, two = first.test(test, epoch), other.test(test, epoch)
        if one.pictures and two.pictures and one.pictures != two.pictures:
            raise ValueError(
                f"{first.name} and {other.name} were tested on other pictures, or by another protocol (queries, "
                f"gallery, classes, how ties count), though both call it {test}: their numbers are of different things"
            )
        if epoch == CHOSEN and first.by != other.by:
            raise ValueError(
                f"{first.name} has {CHOICES[first.by]}, {other.name} {CHOICES[other.by]}: one choice flatters more "
                "than the other. Compare runs with the same select, or their last epochs: epoch=last"
            )
        if first.training != other.training:
            raise ValueError(
                f"{first.name} and {other.name} were trained on other pictures ({first.settings['data.name']} and "
                f"{other.settings['data.name']}, as they were divided): no loss can be judged by that"
            )


def _known(outcomes: Sequence[Outcome], test: str, epoch: str, metrics: Sequence[str]) -> list[str]:
    there = outcomes[0].test(test, epoch).metrics
    found = [name for name in metrics if all(name in run.test(test, epoch).metrics for run in outcomes)]
    if not found:
        raise ValueError(f"the runs have none of {', '.join(metrics)}; they have {', '.join(there)}")
    return found


def _groups(outcomes: Sequence[Outcome]) -> dict[str, dict[int, Outcome]]:
    """What differs, in words -> seed -> run."""
    every = [_told(outcome.settings) for outcome in outcomes]
    names = list(dict.fromkeys(name for settings in every for name in settings))
    groups: dict[str, dict[int, Outcome]] = {}
    for outcome, settings in zip(outcomes, every, strict=True):
        # options of a loss are told where runs of that loss differ in them
        alike = [other for other in every if other["loss.name"] == settings["loss.name"]]
        differing = [
            name
            for name in names
            if any(o.get(name) != settings.get(name) for o in (alike if _of_loss(name) else every))
        ]
        told = [f"{'loss' if name == 'loss.name' else name}={settings.get(name)}" for name in differing]
        group = groups.setdefault(" ".join(told) or "all runs", {})
        if outcome.seed in group:
            raise ValueError(
                f"{group[outcome.seed].name} and {outcome.name} are the same run twice: same settings, seed "
                f"{outcome.seed}; leave one out"
            )
        group[outcome.seed] = outcome
    return groups


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith(NEUTRAL)}


def _of_loss(name: str) -> bool:
    return name.startswith("loss.") and name != "loss.name"


def _standings(
    groups: Mapping[str, Mapping[int, Outcome]], test: str, epoch: str, metric: str, draws: int
) -> tuple[Standing, ...]:
    values = {
        group: {seed: float(run.test(test, epoch).metrics[metric]) for seed, run in sorted(runs.items())}
        for group, runs in groups.items()
    }
    means = {group: estimate(list(seeds.values())) for group, seeds in values.items()}
    best = max(means, key=lambda group: means[group].mean)
    others = [group for group in groups if group != best]
    tests = {group: _tests(groups[best], groups[group], test, epoch, metric, draws) for group in others}
    corrected = [_corrected({group: found[place] for group, found in tests.items()}) for place in range(2)]
    found = []
    for group in groups:
        versus = None if group == best else Versus(*tests[group], *(p.get(group, math.nan) for p in corrected))
        found.append(Standing(group, values[group], means[group], versus, versus is None or not versus.p < LEVEL))
    return tuple(found)


def _corrected(tests: Mapping[str, Difference | None]) -> dict[str, float]:
    """Group -> p after Holm's correction, of those that could be tested."""
    made = {group: test.p for group, test in tests.items() if test is not None}
    return dict(zip(made, holm(list(made.values())), strict=True))


def _tests(
    best: Mapping[int, Outcome], other: Mapping[int, Outcome], test: str, epoch: str, metric: str, draws: int
) -> tuple[Difference | None, Difference | None]:
    shared = sorted(best.keys() & other.keys())
    if not shared:
        return None, None
    first, second = ([runs[seed].test(test, epoch).metrics[metric] for seed in shared] for runs in (best, other))
    seeds = paired_t(first, second) if len(shared) >= FEWEST_SEEDS else None
    one, two = (runs[shared[0]].test(test, epoch) for runs in (best, other))
    if metric not in one.per_query or metric not in two.per_query:
        return seeds, None
    a, b = one.per_query[metric], two.per_query[metric]
    if metric.startswith("R@"):
        return seeds, mcnemar(a, b)
    return seeds, clustered_bootstrap(a, b, one.labels, draws)


def _cells(one: Standing) -> list[str | Cell]:
    told = one.estimate
    mean = f"{100 * told.mean:.2f}" + (f" ± {100 * told.sd:.2f}" if told.n > 1 else "")
    interval = f"{100 * told.low:.2f} to {100 * told.high:.2f}" if told.n > 1 else "-"
    if one.versus is None:
        return [Cell(mean, True), interval, "best", "-", "-", "-"]
    test = one.versus.seeds or one.versus.queries
    difference, effect = ("-", "-") if test is None else (f"{100 * test.difference:+.2f}", f"{test.effect:.2f}")
    return [Cell(mean, one.best), interval, difference, effect, *map(_p, (one.versus.p_seeds, one.versus.p_queries))]


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def _notes(groups: Mapping[str, Mapping[int, Outcome]], by: str) -> list[str]:
    notes = [
        "in bold: the best, and all that are not worse than it at the level 0.05, over seeds where there are several",
        "p, seeds: paired t-test; effect: Cohen's d_z",
        "p, queries: of the first seed in common, exact McNemar (R@1) or bootstrap over classes (others); it tells two "
        "trained models apart, not two ways to train",
        "p-values are after Holm's correction over the groups",
    ]
    if max(len(runs) for runs in groups.values()) < FEWEST_SEEDS:
        notes.append("one run each: nothing is known of how much the seed matters; effects are those of the queries")
    if not set.intersection(*(set(runs) for runs in groups.values())):
        notes.append("some groups have no seed in common with others: they are not tested against each other")
    if by == "test":
        notes.append("the epoch was chosen on the test set, as in the paper: all numbers flatter")
    return notes
