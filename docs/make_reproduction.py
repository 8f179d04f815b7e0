"""Writes docs/reproduction.md from published.csv and experiments/results: python docs/make_reproduction.py"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from roadmap.experiments.definitions import Experiment, experiment, experiment_names
from roadmap.experiments.orders import EPOCHS, claims_sheet, growth
from roadmap.experiments.reproduction import reasons
from roadmap.experiments.results import CHOSEN, LAST, Outcome, all_outcomes
from roadmap.experiments.sheet import Sheet, row
from roadmap.experiments.standings import FLATTERY, compare
from roadmap.experiments.verdicts import NOT_RUN, Line, sheet_of, side_by_side

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "reproduction.md", HERE.parent / "experiments" / "results"
# What may stand in for the paper's pictures and networks, where it was run.
HEAD = "resnet50_head"
IN_PLACE = (("cub", None), ("cub", "vits"), ("cub", HEAD), ("glyphs", None))
NO_PAPER = ("smallest",)
# Tables that have SmoothAP, SupAP and ROADMAP in the same setting: Table 3 at batch 64, Tables 6 and 7 at the others.
ORDERED = (
    ("table3", None, None),
    ("table6", None, None),
    ("table7", None, None),
    ("ablation_vits", None, None),
    ("table3", "cub", HEAD),
    ("table6", "cub", HEAD),
)

BEGINNING = """\
<!-- Written by docs/make_reproduction.py from files that commands made; change those, and run it again. -->
# Reproduction

Every number of the paper's Tables 1 to 10 and Figs. 4, 5 and 13 beside what was measured here, or why it was not.
To measure a table yourself:

```sh
roadmap reproduce                                             # what there is
roadmap reproduce smallest --seeds 1                          # a few steps of three losses, to see it work
roadmap reproduce table3 --dataset glyphs --seeds 2           # with pictures that need no download
roadmap reproduce table5 --dataset cub --backbone resnet50 --root cub=CUB_200_2011 --dry-run   # what it would cost
roadmap compare experiments/results/cub_vits.jsonl            # the statistics again, from the values of every query
```

## How to read it
- **Best epoch** is the best on the test set, looked for every 5 epochs, as the released code does: that is what was
  published. It flatters. **Last epoch** is of the same run, chosen by nobody.
- Measured numbers are means over seeds, ± standard deviation, with Student's 95 % interval of the mean.
- **OK**: published and measured differ by no more than chance does in 95 of 100 cases, by the spread of the published
  runs, of the measured ones, or both (Student's interval of a difference), and the last printed digit. Where no spread
  is known, as of one run against one run, a difference of one point is allowed. **differs**: by more; of numbers that
  are right, one in twenty does.
- What stands in for other pictures or another network is told, and not judged. **resnet50_head** is a ResNet-50 of
  ImageNet that stays as it is and a projection that alone learns (`recipe=cub_resnet50_head`): features are computed
  once, there are no random crops, and numbers lie far below those of a fine-tuned network. It takes seconds on a CPU,
  so there can be many seeds: it shows what losses make of a projection, which need not be what they make of a network.
- Where rows differ in their loss alone, a second table sets them against the best of them. p over seeds is that of the
  paired t-test. Over the queries of one seed there are two: a bootstrap over classes, and for R@1 McNemar's exact test,
  which takes the queries of a class to be independent and is too sure of itself. All are after Holm's correction over
  all pairs of rows, since the best is chosen by the same numbers ([experiments.md](experiments.md#compare-runs)). In
  bold: the best, and what was tested and not found worse, over seeds where there are several in common, else over
  queries, for R@1 by both tests. Two trained models may differ while two losses do not: where there is one seed, p over
  queries says nothing of the losses.
- Errata of the paper's own numbers: [maths.md](maths.md#its-numbers).
"""

ORDER = """\
## Does the order of the losses hold?

The paper: SupAP is better than SmoothAP, and ROADMAP than SupAP. Differences of mAP@R in points, over the seeds that
both losses have, with Student's interval; p of the paired t-test after Holm's correction over all claims of the same
epoch, which are the paper's and were not chosen by what was measured. **holds**, **reversed**: p below 0.05; else it is
**not shown**, which is not the same as refuted.
"""


def page() -> str:
    """The whole of it."""
    outcomes, why = all_outcomes(RESULTS), reasons(RESULTS)
    parts = [BEGINNING, *_account(outcomes), *_order(outcomes)]
    for name in experiment_names():
        if name not in NO_PAPER:
            parts += _section(experiment(name), outcomes, why)
            for dataset, backbone in IN_PLACE:
                parts += _in_place(name, dataset, backbone, outcomes)
    return "\n".join(parts).rstrip() + "\n"


def _account(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How much was measured, in a line."""
    lines = [
        line for name in experiment_names() for line in side_by_side(experiment(name), outcomes, {}) if line.number
    ]
    run = {(line.row, line.metric): line.verdict for line in lines if line.verdict != NOT_RUN}
    whole = len({(line.row, line.metric) for line in lines})
    told = sorted(set(run.values()))
    counts = ", ".join(f"{sum(one == kind for one in run.values())} {kind}" for kind in told) or "none"
    seconds = sum(float(one.about["training seconds"]) for one in outcomes)
    machines = sorted({", ".join(one.about["gpus"]) or "CPU" for one in outcomes})
    yield f"Measured so far: {len(run)} of {whole} numbers ({counts}); {len(outcomes)} runs,"
    yield f"{seconds / 3600:.1f} hours of training on {' and '.join(machines) or 'no machine'}.\n"


def _order(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What the paper says of the three losses, wherever two seeds can speak of it."""
    sheet = claims_sheet([experiment(*which) for which in ORDERED], outcomes)
    if sheet is not None:
        yield ORDER
        yield f"{sheet.markdown()}\n"


def _section(one: Experiment, outcomes: Sequence[Outcome], why: dict[str, str]) -> Iterator[str]:
    lines = side_by_side(one, outcomes, why)
    yield f"## {one.heading}\n"
    measured = [line for line in lines if line.verdict != NOT_RUN]
    if measured:
        yield f"{sheet_of(one, measured).markdown()}\n"
        yield from _statistics(one, outcomes)
    missing = [line for line in lines if line.verdict == NOT_RUN]
    if missing:
        yield f"{_not_run(missing).markdown()}\n"


def _in_place(name: str, dataset: str, backbone: str | None, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The same table with other pictures or another network, where any of it was run."""
    one = experiment(name, dataset, backbone)
    if backbone == HEAD and any(row_.stand_in.endswith(("deit", "vits")) for row_ in one.rows):
        return  # a projection after a ResNet-50 stands in for that network alone
    lines = [line for line in side_by_side(one, outcomes, {}) if line.verdict != NOT_RUN and line.row.stand_in]
    if lines:
        yield f"### {one.heading.partition(':')[0]}, {lines[0].row.stand_in}\n"
        yield f"{sheet_of(one, lines).markdown()}\n"
        yield from _statistics(one, outcomes)


def _statistics(one: Experiment, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Rows that differ in their loss alone, against the best of them: the best epoch, and the last."""
    if one.derived == "increase":
        for epoch, called in EPOCHS.items():
            for extra, slope in growth(one, outcomes, epoch).items():
                told = f"{slope.mean:+.2f} ({slope.low:+.2f} to {slope.high:+.2f}, {slope.n} seeds"
                where = f", with {' '.join(extra)}," if extra else ""
                yield f"When the batch is doubled, the increase at the {called} epoch{where} changes by {told};"
                yield "the slope of a line through the increases of each seed).\n"
    if one.derived:
        return
    groups: dict[tuple[object, ...], dict[str, Outcome]] = {}
    for row_ in one.rows:
        for outcome in outcomes:
            if outcome.about.get("key") == row_.key:
                alike = (row_.dataset, row_.backbone, row_.batch_size, row_.stand_in, tuple(outcome.about["with"]))
                groups.setdefault(alike, {})[outcome.name] = outcome
    for (dataset, backbone, batch, stand_in, _), runs in groups.items():
        if len({one.about["key"] for one in runs.values()}) < 2:
            continue
        for epoch in (CHOSEN, LAST):
            found = compare(list(runs.values()), epoch=epoch)
            network = f"{backbone} ({stand_in})" if stand_in else backbone
            yield f"{dataset}, {network}, batch {batch or 'of the recipe'}, {found.selection}:\n"
            remarks = tuple(text for text in found.remarks if text != FLATTERY)
            yield f"{Sheet('', found.sheet.columns, found.sheet.rows, remarks).markdown()}\n"


def _not_run(lines: Sequence[Line]) -> Sheet:
    """A line for each row of the table, with all its numbers."""
    together: dict[object, list[Line]] = {}
    for line in lines:
        together.setdefault(line.row, []).append(line)
    rows = []
    for found in together.values():
        one = found[0].row
        values = ", ".join(f"{line.metric} {line.number.text}" for line in found if line.number) or "-"
        rows.append(row([one.name, one.dataset, one.backbone, str(one.batch_size or "-"), values, found[0].why]))
    return Sheet("", ("not run", "pictures", "network", "batch", "published", "why"), tuple(rows))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
