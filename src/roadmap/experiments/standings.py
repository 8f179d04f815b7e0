"""`compare`: runs side by side, grouped by what differs, with tests that say which differences are more than chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from roadmap.experiments.sheet import Cell, Sheet
from roadmap.experiments.statistics import DRAWS, Estimate, estimate
from roadmap.experiments.versus import FEWEST_SEEDS, Pairs, Versus, pairs_of

LEVEL = 0.05
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
        """For a person, in percent; the groups that are not worse than the best are in bold. Columns that say nothing
        of any group are left out."""
        first = next(iter(self.standings.values()))
        columns = [
            ("group", [Cell(one.group) for one in first]),
            ("runs", [Cell(str(one.estimate.n)) for one in first]),
        ]
        over = [("", len(columns))]
        for metric, standings in self.standings.items():
            told = _columns(metric, standings)
            columns += told
            over += [(metric, len(told))]
        names, cells = zip(*columns, strict=True)
        rows = tuple(zip(*cells, strict=True))
        return Sheet(f"{self.test}, {self.selection}", names, rows, (*self.notes, *self.remarks), tuple(over))


def compare(
    runs: Sequence[str | Path | Outcome], test: str | None = None, epoch: str = CHOSEN,
    metrics: Sequence[str] | None = None, draws: int = DRAWS,
) -> Standings:  # fmt: skip
    """Runs side by side: grouped by the settings in which they differ, seeds being repetitions.

    Args:
        runs: run folders, folders of runs, files of results, or outcomes.
        test: the test set; None for the only one.
        epoch: "chosen" by each run, or its "last".
        metrics: to compare, of which more is better; None for R@1 and mAP@R, where all runs have them.
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
    remarks = _left_out([given for given in runs if not isinstance(given, Outcome)])
    remarks += [*copies(groups, name, epoch), *differences_of_origin(groups)]
    found, pairs = {}, {}
    for metric in known:
        found[metric], pairs[metric] = _standings(groups, name, epoch, metric, draws)
    by = outcomes[0].by if epoch == CHOSEN else "last"
    notes = _notes(found, max(one.tested for one in pairs.values()))
    remarks += [*_remarks(groups, by, draws), *dict.fromkeys(text for one in pairs.values() for text in one.remarks)]
    return Standings(name, CHOICES[by], found, notes, tuple(remarks))


def _runs_of(given: str | Path | Outcome) -> list[Outcome]:
    if isinstance(given, Outcome):
        return [given]
    found = outcomes_of([given])
    return without_copies(found) if Path(given).suffix == ".jsonl" else found


def _left_out(folders: Sequence[str | Path]) -> list[str]:
    """What lies in folders of runs and is not compared, a sentence each."""
    unfinished = unfinished_runs(folders)
    deeper = sorted({str(found.parent.parent) for folder in folders for found in Path(folder).glob("*/*/summary.json")})
    found = [f"not finished, and left out: {', '.join(unfinished)}"] if unfinished else []
    return found + ([f"folders of runs in folders, and left out: {', '.join(deeper)}"] if deeper else [])


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


def _columns(metric: str, standings: Sequence[Standing]) -> list[tuple[str, list[Cell]]]:
    """What is told of each group by a metric, column by column."""
    best = next(one for one in standings if one.versus is None)
    names = (metric, "95 %", "to the best", "effect", "p, seeds", "p, classes", "p, McNemar")
    lines = [_cells(one, best) for one in standings]
    columns = [(name, [line[place] for line in lines]) for place, name in enumerate(names)]
    return [(name, cells) for name, cells in columns if any(cell.text not in ("-", "best") for cell in cells)]


def _cells(one: Standing, best: Standing) -> list[Cell]:
    told, versus = one.estimate, one.versus
    mean = f"{100 * told.mean:.2f}" + (f" ± {100 * told.sd:.2f}" if told.n > 1 else "")
    # Student's distribution knows no bounds, a metric does: what lies beyond them is no value that it can have
    interval = "-" if math.isnan(told.low) else f"{100 * max(told.low, 0):.2f} to {100 * min(told.high, 1):.2f}"
    if versus is None:
        return [Cell(mean, True), *map(Cell, [interval, "best", "-", "-", "-", "-"])]
    difference = _difference(one.seeds, best.seeds) + (", not tested" if math.isnan(versus.p) else "")
    effect = "-" if versus.shown is None else _number(versus.shown.effect)
    ps = map(_p, (versus.p_seeds, versus.p_classes, versus.p_mcnemar))
    return [Cell(mean, one.best), *map(Cell, [interval, difference, effect, *ps])]


def _difference(one: Mapping[int, float], best: Mapping[int, float]) -> str:
    shared = one.keys() & best.keys()
    return f"{100 * sum(one[seed] - best[seed] for seed in shared) / len(shared):+.2f}" if shared else "-"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def _notes(found: Mapping[str, Sequence[Standing]], tested: int) -> tuple[str, ...]:
    """What the columns are, of those that there are.

    Args:
        found: metric -> groups.
        tested: pairs of groups that anything can tell apart.
    """
    versus = [one.versus for standings in found.values() for one in standings if one.versus is not None]
    if not versus:
        return ("one group: there is nothing to compare it with",)
    notes = [
        "in bold: the best group, and all groups that were tested and not found worse at the level 0.05, over the "
        "seeds in common where there are several, else over the queries of one (R@k: by both tests)",
        "to the best: the difference, over the seeds in common",
    ]
    if any(not math.isnan(one.p_seeds) for one in versus):
        notes.append("p, seeds: paired t-test")
    if any(one.shown for one in versus):
        notes.append("effect: Cohen's d_z, over the seeds, else over the classes; of McNemar's test alone Cohen's g")
    over_queries = []
    if any(one.classes for one in versus):
        over_queries.append("p, classes: bootstrap over classes")
    if any(one.mcnemar for one in versus):
        over_queries.append("p, McNemar: exact test, as if queries of a class were independent, which they are not")
    if over_queries:
        notes.append(
            f"{'; '.join(over_queries)}; over the queries of the first seed in common: this tells two trained models "
            "apart, not two ways to train"
        )
    notes.append(
        f"p-values are after Holm's correction over all pairs of groups ({tested}), not only those with the best, "
        "because the same numbers choose the best; for each metric and each column by itself"
        if tested
        else "no pair of groups could be tested: the remarks below say why"
    )
    return tuple(notes)


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
