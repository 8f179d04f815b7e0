"""What the paper says beyond single numbers, tested over seeds: which loss is better, and what the batch changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roadmap.experiments.definitions import Experiment, Row
from roadmap.experiments.results import CHOSEN, LAST, Outcome
from roadmap.experiments.sheet import Sheet, row
from roadmap.experiments.statistics import Difference, Estimate, estimate, holm, paired_t
from roadmap.experiments.verdicts import INCREASE, groups_of, value_of

# The paper's claim is that the second is better than the first.
CLAIMS = (("smoothap", "supap"), ("supap", "roadmap"), ("smoothap", "roadmap"))
METRIC, LEVEL = "mAP@R", 0.05
EPOCHS = {CHOSEN: "best", LAST: "last"}
HOLDS, NOT_SHOWN, REVERSED = "holds", "not shown", "reversed"


@dataclass(frozen=True)
class Claim:
    """That one loss is better than another, in one setting.

    Attributes:
        first, second: rows that differ in their loss alone.
        published: the difference in points of mAP@R; NaN where the paper has none.
        test: the paired t-test over the seeds that both have, in points.
        p: after Holm's correction over all claims that were asked for together.
    """

    first: Row
    second: Row
    published: float
    test: Difference
    p: float

    @property
    def verdict(self) -> str:
        if self.p >= LEVEL:
            return NOT_SHOWN
        return HOLDS if self.test.difference > 0 else REVERSED


def claims(experiments: Iterable[Experiment], outcomes: Iterable[Outcome], epoch: str) -> list[Claim]:
    """Those of `CLAIMS` that at least two seeds can speak of, in every setting of some tables.

    Args:
        experiments: tables with rows of these losses.
        outcomes: of any runs.
        epoch: "chosen" or "last".
    """
    groups = groups_of(outcomes)
    found = []
    for one in experiments:
        for first, second in _pairs(one.rows):
            for extra in [extra for key, extra in groups if key == first.key and (second.key, extra) in groups]:
                a, b = (_by_seed(groups[r.key, extra], METRIC, r, epoch) for r in (first, second))
                if len(shared := sorted(a.keys() & b.keys())) > 1:
                    test = paired_t([a[seed] for seed in shared], [b[seed] for seed in shared])
                    found.append((first, second, _published(second) - _published(first), test))
    corrected = holm([test.p for *_, test in found])
    return [Claim(*one, p) for one, p in zip(found, corrected, strict=True)]


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    by_setting: dict[tuple[object, ...], dict[str, Row]] = {}
    for one in rows:
        by_setting.setdefault((one.dataset, one.backbone, one.batch_size), {})[one.name] = one
    return [(names[a], names[b]) for names in by_setting.values() for a, b in CLAIMS if a in names and b in names]


def _by_seed(runs: Iterable[Outcome], metric: str, one: Row, epoch: str) -> dict[int, float]:
    values = {run.seed: value_of(run, metric, one, epoch) for run in runs}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _published(one: Row) -> float:
    return next((float(number.value) for number in one.numbers if number.metric == METRIC), math.nan)


def claims_sheet(experiments: Sequence[Experiment], outcomes: Sequence[Outcome]) -> Sheet | None:
    """The best epoch and the last; None where no claim can be tested."""
    rows = []
    for epoch, called in EPOCHS.items():
        for one in claims(experiments, outcomes, epoch):
            second, test = one.second, one.test
            what = [second.dataset, second.stand_in or second.backbone, str(second.batch_size)]
            points = "-" if math.isnan(one.published) else f"{one.published:+.2f}"
            measured = [f"{test.difference:+.2f}", f"{test.low:+.2f} to {test.high:+.2f}", str(test.n), _told(one.p)]
            compared = f"{second.name} over {one.first.name}"
            rows.append(row([*what, compared, called, points, *measured, one.verdict]))
    columns = ("pictures", "network", "batch", "claim", "epoch", "published", "measured", "95 %", "seeds", "p", "")
    return Sheet("", columns, tuple(rows)) if rows else None


def _told(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def growth(one: Experiment, outcomes: Iterable[Outcome], epoch: str) -> Estimate | None:
    """By how many percent of mAP@R the gain of the second row of each pair changes when the batch is doubled.

    A line through the gains over log2 of the batch size, for each seed that was run at every size that any was; then
    their mean. None where fewer than two seeds have two sizes.
    """
    groups = groups_of(outcomes)
    gains: dict[int, dict[int, float]] = {}
    for first, second in zip(one.rows[::2], one.rows[1::2], strict=True):
        for extra in [extra for key, extra in groups if key == first.key and (second.key, extra) in groups]:
            a, b = (_by_seed(groups[r.key, extra], INCREASE, r, epoch) for r in (first, second))
            for seed in a.keys() & b.keys():
                gains.setdefault(seed, {})[second.batch_size or 0] = 100 * (b[seed] - a[seed]) / a[seed]
    sizes = sorted({size for of_seed in gains.values() for size in of_seed})
    whole = [of_seed for _, of_seed in sorted(gains.items()) if len(of_seed) == len(sizes)]
    if len(sizes) < 2 or len(whole) < 2:
        return None
    return estimate([float(np.polyfit(np.log2(sizes), [of_seed[n] for n in sizes], 1)[0]) for of_seed in whole])
