"""Published and measured side by side: OK, differs, or not run and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roadmap.experiments.definitions import Experiment, Row
from roadmap.experiments.published import Number
from roadmap.experiments.results import CHOSEN, LAST, Outcome
from roadmap.experiments.sheet import Cell, Sheet, row
from roadmap.experiments.statistics import Estimate, estimate, t_quantile

OK, DIFFERS, NOT_RUN, MEASURED, ELSEWHERE = "OK", "differs", "not run", "measured", "other hardware"
ALLOWANCE = 1.0  # points, where one run stands against one run and neither says how much runs differ
YARDSTICK = "yardstick"  # what an independent trainer measured, among the numbers that are published
SHOWN = ("R@1", "mAP@R")  # of a row without a published number
GAP, INCREASE, MINUTES = "decrease of DG_AP in %", "increase of mAP@R in %", "minutes per epoch"
Groups = Mapping[tuple[str, tuple[str, ...]], Sequence[Outcome]]


@dataclass(frozen=True)
class Line:
    """One number of a table.

    Attributes:
        row: of the table.
        metric: of the number.
        number: as published; None where the paper has none.
        chosen: measured, the best epoch on the test set, in the unit of the number.
        last: measured, the last epoch.
        verdict: OK, differs, not run, measured (there is nothing to compare with).
        why: the reason, or what was run in place of something else.
    """

    row: Row
    metric: str
    number: Number | None
    chosen: Estimate | None
    last: Estimate | None
    verdict: str
    why: str


def side_by_side(experiment: Experiment, outcomes: Iterable[Outcome], reasons: Mapping[str, str]) -> list[Line]:
    """A line for each number of a table or figure, or several, where it was run with several settings.

    Args:
        experiment: with its rows.
        outcomes: of any runs; those of the rows are found by their keys.
        reasons: row -> why it was not run.
    """
    groups = groups_of(outcomes)
    lines = []
    for place, one in enumerate(experiment.rows):
        if experiment.derived and not one.numbers:  # the first of a pair
            continue
        before = experiment.rows[place - 1] if experiment.derived else None
        lines += _lines_of(one, before, groups, reasons)
    return lines


def groups_of(outcomes: Iterable[Outcome]) -> dict[tuple[str, tuple[str, ...]], list[Outcome]]:
    """The seeds of a row together: by its key and the settings that were given beside it.

    Raises:
        ValueError: one seed twice, or epochs that were not chosen alike, in a group.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[Outcome]] = {}
    for outcome in outcomes:
        group = groups.setdefault((outcome.about.get("key", ""), tuple(outcome.about.get("with", ()))), [])
        for other in group:
            if outcome.about.get("key") and outcome.seed == other.seed:
                raise ValueError(
                    f"{other.name} and {outcome.name} are the same run twice: row {outcome.about['key']}, seed "
                    f"{outcome.seed}; leave one out of the files of results"
                )
            if outcome.about.get("key") and outcome.by != other.by:
                raise ValueError(
                    f"{other.name} and {outcome.name} are of one row, and their epochs were chosen by {other.by} and "
                    f"by {outcome.by}: one choice flatters more than the other; keep their results apart"
                )
        group.append(outcome)
    return groups


def _lines_of(one: Row, before: Row | None, groups: Groups, reasons: Mapping[str, str]) -> list[Line]:
    found = [(extra, runs) for (key, extra), runs in groups.items() if key == one.key]
    if before is not None:
        found = [(extra, runs) for extra, runs in found if (before.key, extra) in groups]
    metrics: list[tuple[str, Number | None]] = [(number.metric, number) for number in one.numbers]
    metrics = metrics or [(metric, None) for metric in SHOWN]
    if not found:
        why = one.why_not or reasons.get(one.key, "not tried yet")
        return [Line(one, metric, number, None, None, NOT_RUN, why) for metric, number in metrics]
    return [
        _line(one, metric, number, runs, None if before is None else groups[before.key, extra], extra)
        for extra, runs in found
        for metric, number in metrics
    ]


def _line(
    one: Row, metric: str, number: Number | None, runs: Sequence[Outcome], before: Sequence[Outcome] | None,
    extra: Sequence[str],
) -> Line:  # fmt: skip
    (chosen, lost), (last, _) = (_measured(metric, one, runs, before, epoch) for epoch in (CHOSEN, LAST))
    texts = [one.stand_in, f"with {' '.join(extra)}" if extra else ""]
    texts += [f"without {', '.join(lost)}, which gave no number"] if lost and chosen is not None else []
    why = "; ".join(text for text in texts if text)
    if chosen is None and last is None:
        return Line(one, metric, number, None, None, NOT_RUN, "its runs did not measure this")
    if number is None or one.stand_in:
        return Line(one, metric, number, chosen, last, MEASURED, why)
    if metric == MINUTES:
        return Line(one, metric, number, chosen, last, ELSEWHERE, why)
    return Line(one, metric, number, chosen, last, verdict(number, chosen or last), why)  # type: ignore[arg-type]


def verdict(number: Number, measured: Estimate) -> str:
    """Whether a published number and a measured one differ by more than chance."""
    return OK if abs(measured.mean - float(number.value)) <= tolerance(number, measured) else DIFFERS


def tolerance(number: Number, measured: Estimate) -> float:
    """How far apart two numbers lie in 95 of 100 cases when nothing but chance differs: Student's interval, with the
    spread of the published runs, of the measured ones, or of both, and half of the last digit that was printed; one
    point where no spread is known. Runs that are all alike tell no spread."""
    spreads = [(number.runs - 1, float(number.spread))] if number.spread and number.runs > 1 else []
    spreads += [(measured.n - 1, measured.sd)] if measured.n > 1 else []
    spreads = [(freedom, sd) for freedom, sd in spreads if sd > 0]
    if not spreads:
        return ALLOWANCE
    freedom = sum(n for n, _ in spreads)
    sd = math.sqrt(sum(n * s**2 for n, s in spreads) / freedom)
    half = 0.5 * 10.0 ** -len(number.value.partition(".")[2])
    return half + t_quantile(freedom) * sd * math.sqrt(1 / number.runs + 1 / measured.n)


def _measured(
    metric: str, one: Row, runs: Sequence[Outcome], before: Sequence[Outcome] | None, epoch: str
) -> tuple[Estimate | None, list[str]]:
    """Over the seeds, of pairs over those that both have; and the runs that have no number, though others do."""
    values = {run.seed: value_of(run, metric, one, epoch) for run in runs}
    if before is not None:
        first = {run.seed: value_of(run, metric, one, epoch) for run in before}
        values = {seed: relative(values[seed], first[seed], metric) for seed in values.keys() & first.keys()}
    names = {run.seed: run.name for run in runs}
    lost = [names[seed] for seed in sorted(values) if not np.isfinite(values[seed])]
    known = [value for _, value in sorted(values.items()) if np.isfinite(value)]
    return (estimate(known) if known else None), lost


def relative(value: float, first: float, metric: str) -> float:
    """In percent of the first: by how much a gap is smaller, anything else larger. Of what is not positive there is no
    percentage (a gap may be negative): NaN."""
    if not first > 0:
        return math.nan
    return (-1 if metric == GAP else 1) * 100 * (value - first) / first


def value_of(run: Outcome, metric: str, one: Row, epoch: str) -> float:
    """In the unit of the published number; NaN where the run has none."""
    if metric == MINUTES:
        return float(run.about["training seconds"]) / float(run.about["epochs"]) / 60
    if metric == GAP:
        return float(run.about.get("DG_AP", {}).get(epoch, math.nan))
    test = one.dataset if one.dataset in run.tests else next(iter(run.tests))
    if epoch not in run.tests[test] or (test != one.dataset and len(run.tests) > 1):
        return math.nan
    name = "mAP@R" if metric == INCREASE else metric
    return 100 * float(run.tests[test][epoch].metrics.get(name, math.nan))


def sheet_of(experiment: Experiment, lines: Sequence[Line]) -> Sheet:
    """A table for a person; what every measured row has in common stands below it."""
    said = {line.why for line in lines if line.chosen or line.last}
    common = next(iter(said)) if len(said) == 1 else ""
    tables = {line.number.table for line in lines if line.number}
    beside = YARDSTICK if tables == {YARDSTICK} else "published"  # which nobody published
    columns = ["row", "pictures", "network", "batch", "metric", beside, "best epoch", "last epoch", "", "why"]
    rows: list[list[str | Cell]] = []
    for line in lines:
        one = line.row
        what = [one.name, one.dataset, one.backbone, str(one.batch_size or "-"), line.metric]
        values = [line.number.text if line.number else "-", _told(line.chosen), _told(line.last)]
        sentence = "" if line.why == common else line.why
        rows.append([*what, *values, Cell(line.verdict, bold=line.verdict == DIFFERS), sentence])
    if not any(cells[-1] for cells in rows):
        columns, rows = columns[:-1], [cells[:-1] for cells in rows]
    notes = (f"measured: {common}",) if common else ()
    return Sheet(experiment.heading, tuple(columns), tuple(map(row, rows)), notes)


def not_run_sheet(lines: Sequence[Line]) -> Sheet:
    """A line for each row of a table that was not run, with all its numbers."""
    together: dict[object, list[Line]] = {}
    for line in lines:
        together.setdefault(line.row, []).append(line)
    rows = []
    for found in together.values():
        one = found[0].row
        values = ", ".join(f"{line.metric} {line.number.text}" for line in found if line.number) or "-"
        rows.append(row([one.name, one.dataset, one.backbone, str(one.batch_size or "-"), values, found[0].why]))
    return Sheet("", ("not run", "pictures", "network", "batch", "published", "why"), tuple(rows))


def _told(measured: Estimate | None) -> str:
    """Mean, standard deviation, and the interval of the mean over so many runs."""
    if measured is None:
        return "-"
    if measured.n == 1:
        return f"{measured.mean:.2f}"
    interval = "all alike" if math.isnan(measured.low) else f"{measured.low:.2f} to {measured.high:.2f}"
    return f"{measured.mean:.2f} ± {measured.sd:.2f} ({interval}, {measured.n} runs)"
