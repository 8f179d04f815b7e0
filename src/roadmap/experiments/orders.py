"""What the paper says beyond single numbers, tested over seeds: which loss is better, and what the batch changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roadmap.experiments.definitions import Experiment, Row
from roadmap.experiments.grouping import origin
from roadmap.experiments.results import CHOSEN, LAST, Outcome
from roadmap.experiments.sheet import Cell, Sheet, row
from roadmap.experiments.statistics import Difference, Estimate, estimate, holm, paired_t
from roadmap.experiments.verdicts import INCREASE, groups_of, relative, value_of

# The paper's claim is that the second is better than the first.
CLAIMS = (("smoothap", "supap"), ("supap", "roadmap"), ("smoothap", "roadmap"))
# That of Tables 1 and 5 beside: ROADMAP is better than the other losses that approximate AP.
RIVALS = tuple((name, "roadmap") for name in ("fastap", "softbinap", "blackboxap"))
# What the paper leaves open, or prints otherwise than it was released: each against ROADMAP.
CHOICES = tuple(
    ("roadmap", name)
    for name in (
        "calibration alone",
        "ROADMAP, Eq. (7) as printed",
        "ROADMAP, the query not its own positive",
        "ROADMAP with a memory",
    )
)
METRIC, LEVEL = "mAP@R", 0.05
EPOCHS = {CHOSEN: "best", LAST: "last"}
HOLDS, NOT_SHOWN, REVERSED = "holds", "not shown", "reversed"
Names = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Claim:
    """That one loss is better than another, in one setting.

    Attributes:
        first, second: rows that differ in their loss alone.
        extra: what was set for the runs beside their rows.
        published: the difference in points of mAP@R; NaN where the paper has none.
        test: the paired t-test over the seeds that both have, in points.
        p: after Holm's correction over all claims that were asked for together; NaN where the seeds have no spread.
    """

    first: Row
    second: Row
    extra: tuple[str, ...]
    published: float
    test: Difference
    p: float

    @property
    def verdict(self) -> str:
        if not self.p < LEVEL:  # NaN shows nothing
            return NOT_SHOWN
        return HOLDS if self.test.difference > 0 else REVERSED


def claims(
    experiments: Iterable[Experiment], outcomes: Iterable[Outcome], epoch: str, pairs: Names = CLAIMS
) -> list[Claim]:
    """Those of `CLAIMS` that at least two seeds can speak of, in every setting of some tables; by batch size where
    tables have the same pictures and network. They are the paper's, not chosen by what was measured.

    Args:
        experiments: tables with rows of these losses.
        outcomes: of any runs.
        epoch: "chosen" or "last".
        pairs: other names of rows, of which the second is said to be better.
    """
    groups = groups_of(outcomes)
    found = []
    for first, second in _pairs([of_table for one in experiments for of_table in one.rows], pairs):
        for extra in [extra for key, extra in groups if key == first.key and (second.key, extra) in groups]:
            a, b = (_by_seed(groups[r.key, extra], METRIC, r, epoch) for r in (first, second))
            if len(shared := sorted(a.keys() & b.keys())) > 1:
                test = paired_t([a[seed] for seed in shared], [b[seed] for seed in shared])
                found.append((first, second, extra, _published_value(second) - _published_value(first), test))
    corrected = holm([test.p for *_, test in found])
    return [Claim(*one, p) for one, p in zip(found, corrected, strict=True)]


def _pairs(rows: Sequence[Row], pairs: Names) -> list[tuple[Row, Row]]:
    by_place: dict[tuple[str, str, str], dict[int, dict[str, Row]]] = {}
    for one in rows:
        of_place = by_place.setdefault((one.dataset, one.backbone, one.stand_in), {})
        of_place.setdefault(one.batch_size or 0, {}).setdefault(one.name, one)
    settings = [names for sizes in by_place.values() for _, names in sorted(sizes.items())]
    return [(names[a], names[b]) for names in settings for a, b in pairs if a in names and b in names]


def _by_seed(runs: Iterable[Outcome], metric: str, one: Row, epoch: str) -> dict[int, float]:
    values = {run.seed: value_of(run, metric, one, epoch) for run in runs}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _published_value(one: Row) -> float:
    return next((float(number.value) for number in one.numbers if number.metric == METRIC), math.nan)


def claims_sheet(experiments: Sequence[Experiment], outcomes: Sequence[Outcome]) -> Sheet | None:
    """The best epoch and the last; None where no claim can be tested."""
    found = {called: claims(experiments, outcomes, epoch) for epoch, called in EPOCHS.items()}
    every = [one for of_epoch in found.values() for one in of_epoch]
    if not every:
        return None
    rows = [_claim_row(one, called, of_epoch) for called, of_epoch in found.items() for one in of_epoch]
    columns = ("pictures", "network", "batch", "claim", "epoch", "published", "measured", "95 %", "seeds", "p", "")
    return Sheet("", columns, tuple(rows), tuple(_notes(every, outcomes)))


def claims_in_short(found: Sequence[Claim], pairs: Names = CLAIMS) -> Sheet:
    """A row for each setting, a column for each of `pairs`; what is shown, either way, is in bold."""
    settings: dict[tuple[str, str, str], dict[tuple[str, str], Claim]] = {}
    for one in found:
        place = (*_place(one, found), str(one.second.batch_size))
        settings.setdefault(place, {})[one.first.name, one.second.name] = one
    columns = ("pictures", "network", "batch", "seeds", *(f"{second} over {first}" for first, second in pairs))
    rows = []
    for place, of_place in settings.items():
        seeds = sorted({one.test.n for one in of_place.values()})
        cells = [_in_short(of_place[names]) if names in of_place else Cell("-") for names in pairs]
        rows.append(row([*place, " or ".join(map(str, seeds)), *cells]))
    return Sheet("", columns, tuple(rows))


def _in_short(one: Claim) -> Cell:
    interval = "" if math.isnan(one.test.low) else f" ({one.test.low:+.2f} to {one.test.high:+.2f}), p {_told(one.p)}"
    return Cell(f"{one.test.difference:+.2f}{interval}: {one.verdict}", bold=one.verdict != NOT_SHOWN)


def choices_sheet(experiments: Sequence[Experiment], outcomes: Sequence[Outcome]) -> Sheet | None:
    """`CHOICES` beside ROADMAP, at the last epoch; None where nothing can be tested."""
    found = claims(experiments, outcomes, LAST, CHOICES)
    words = {HOLDS: "better", REVERSED: "worse", NOT_SHOWN: NOT_SHOWN}
    rows = []
    for one in found:
        pictures, network, _, _, _, _, *measured, _ = _claim_row(one, "", found)
        rows.append(row([one.second.name, pictures, network, *measured, words[one.verdict]]))
    columns = ("in place of ROADMAP", "pictures", "network", "mAP@R", "95 %", "seeds", "p", "")
    return Sheet("", columns, tuple(rows)) if found else None


def _place(one: Claim, among: Sequence[Claim]) -> tuple[str, str]:
    """Pictures and network of a claim, with what stands in for them."""
    stand_ins = [part for part in one.second.stand_in.split(", ") if part]
    pictures = next((part for part in stand_ins if part.endswith(f" of {one.second.dataset}")), one.second.dataset)
    network = ", ".join(part for part in stand_ins if part != pictures) or one.second.backbone
    differ = len({other.extra for other in among if other.second.stand_in == one.second.stand_in}) > 1
    return pictures, network + (f", with {' '.join(one.extra)}" if differ and one.extra else "")


def _claim_row(one: Claim, called: str, among: Sequence[Claim]) -> tuple[Cell, ...]:
    second, test = one.second, one.test
    points = "-" if math.isnan(one.published) else f"{one.published:+.2f}"
    interval = "-" if math.isnan(test.low) else f"{test.low:+.2f} to {test.high:+.2f}"
    compared = f"{second.name} over {one.first.name}"
    measured = [f"{test.difference:+.2f}", interval, str(test.n), _told(one.p)]
    place = [*_place(one, among), str(second.batch_size)]
    return row([*place, compared, called, points, *measured, one.verdict])


def _notes(every: Sequence[Claim], outcomes: Sequence[Outcome]) -> list[str]:
    """What a reader should know of the runs: where they were made, and which gave no number."""
    wanted = {(side.key, one.extra): side for one in every for side in (one.first, one.second)}
    runs = [(run, wanted[key]) for key, found in groups_of(outcomes).items() if key in wanted for run in found]
    lost = [run.name for run, one in runs if not math.isfinite(value_of(run, METRIC, one, CHOSEN))]
    notes = [f"the runs are {origin([run for run, _ in runs])}"]
    return notes + ([f"left out, for they gave no number: {', '.join(lost)}"] if lost else [])


def _told(p: float) -> str:
    return "-" if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.2g}"


@dataclass(frozen=True)
class Growth:
    """How what the second row of each pair adds to mAP@R, in percent of it, changes with the batch.

    Attributes:
        slope: of the gain, when the batch is doubled: a line through the gains over log2 of the batch size, for each
            seed that was run at every size that any was; then their mean.
        gains: batch size -> the gain itself, over the same seeds.
    """

    slope: Estimate
    gains: dict[int, Estimate]


def growth(one: Experiment, outcomes: Iterable[Outcome], epoch: str) -> dict[tuple[str, ...], Growth]:
    """For each set of settings that runs were given beside their rows; nothing where fewer than two seeds have two
    sizes."""
    groups = groups_of(outcomes)
    gains: dict[tuple[str, ...], dict[int, dict[int, float]]] = {}
    for first, second in zip(one.rows[::2], one.rows[1::2], strict=True):
        for extra in [extra for key, extra in groups if key == first.key and (second.key, extra) in groups]:
            a, b = (_by_seed(groups[r.key, extra], INCREASE, r, epoch) for r in (first, second))
            for seed in a.keys() & b.keys():
                of_seed = gains.setdefault(extra, {}).setdefault(seed, {})
                of_seed[second.batch_size or 0] = relative(b[seed], a[seed], INCREASE)
    found = {extra: _growth(list(dict(sorted(seeds.items())).values())) for extra, seeds in gains.items()}
    return {extra: told for extra, told in found.items() if told is not None}


def _growth(gains: Sequence[dict[int, float]]) -> Growth | None:
    sizes = sorted({size for of_seed in gains for size in of_seed})
    whole = [of_seed for of_seed in gains if len(of_seed) == len(sizes) > 1]
    if len(whole) < 2:
        return None
    slopes = [float(np.polyfit(np.log2(sizes), [of_seed[n] for n in sizes], 1)[0]) for of_seed in whole]
    return Growth(estimate(slopes), {size: estimate([of_seed[size] for of_seed in whole]) for size in sizes})
