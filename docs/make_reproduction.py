"""Writes docs/reproduction.md from published.csv and experiments/results: python docs/make_reproduction.py

With --look it first finds out what the pictures and weights at hand permit, and keeps it in
experiments/results/not_run.json: why rows of the page were not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from roadmap.experiments.definitions import Experiment, experiment, experiment_names, paper_names
from roadmap.experiments.grouping import origin
from roadmap.experiments.orders import claims_sheet
from roadmap.experiments.reproduction import Means, note, prospects, reasons
from roadmap.experiments.results import CHOSEN, LAST, Outcome, all_outcomes
from roadmap.experiments.sheet import Sheet
from roadmap.experiments.standings import FLATTERY, Standings, compare
from roadmap.experiments.verdicts import MINUTES, NOT_RUN, Line, not_run_sheet, sheet_of, side_by_side

sys.path.insert(0, str(Path(__file__).parent))

from reproduction_answer import ABLATIONS, HEAD, IN_PLACE, PROJECTED, WHOLE, answer, ordered, slug, title

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "reproduction.md", HERE.parent / "experiments" / "results"
SHOWN_OF_DRAWN = ("table3", "table6", "table10", "fig5")  # in others they would stand beside what they are not like
NAMES = tuple(name for name in experiment_names() if name != "smallest")
# Said once, above: the epoch was chosen on the test set; what one seed tells; runs of several commits (at the end).
SAID = (FLATTERY, "one run each", "the runs differ in code")

BEGINNING = """\
<!-- Written by docs/make_reproduction.py from files that commands made; change those, and run it again. -->
# Reproduction

Every number of the paper's Tables 1 to 10 and Figs. 4, 5 and 13 beside what was measured here, or why it was not.

## Does the paper's claim hold?
"""

HOW = """\
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
- Where rows differ in their settings alone, a second table sets them against the best of them. p over seeds is that of
  the paired t-test. Over the queries of one seed there are two: a bootstrap over classes, and for R@1 McNemar's exact
  test, which takes the queries of a class to be independent and is too sure of itself. All are after Holm's correction
  over all pairs of rows, since the best is chosen by the same numbers ([experiments.md](experiments.md#compare-runs)).
  In bold: the best, and what was tested and not found worse, over seeds where there are several in common, else over
  queries, for R@1 by both tests. Two trained models may differ while two losses do not: where there is one seed,
  nothing is known of how much it matters, and p over queries says nothing of the losses.
- **yardstick**: what an independent, simple trainer with the released losses measured; nobody published it.
- Errata of the paper's own numbers: [maths.md](maths.md#its-numbers).

To measure a table yourself:

```sh
roadmap reproduce                                             # what there is
roadmap reproduce smallest --seeds 1                          # a few steps of three losses, to see it work
roadmap reproduce table3 --dataset glyphs --seeds 2           # with pictures that need no download
roadmap reproduce table5 --dataset cub --backbone resnet50 --root cub=CUB_200_2011 --dry-run   # what it would cost
roadmap compare experiments/results/cub_vits.jsonl            # the statistics again, from the values of every query
```
"""

ORDER = """\
## The order of the losses, claim by claim

The paper: SupAP is better than SmoothAP, and ROADMAP than SupAP. As above, with the best epoch too; p is corrected over
all claims of the same epoch in a table, which are the paper's and were not chosen by what was measured.
"""


def page() -> str:
    """The whole of it."""
    outcomes, why = all_outcomes(RESULTS), reasons(RESULTS)
    own = {name: side_by_side(experiment(name), outcomes, why) for name in NAMES}
    shown = {experiment(name).heading: _runs(_measured(lines), outcomes) for name, lines in own.items()}
    parts = [BEGINNING, *answer([line for name in paper_names() for line in own[name]], outcomes), HOW]
    sheets = [claims_sheet(ordered(which), outcomes) for which in (WHOLE, PROJECTED)]
    if any(sheets):
        parts += [ORDER, *(f"{sheet.markdown()}\n" for sheet in sheets if sheet is not None)]
    for name in NAMES:
        parts += _section(experiment(name), own[name], outcomes)
        for dataset, backbone in IN_PLACE if name not in ABLATIONS else ():
            if dataset != "glyphs" or name in SHOWN_OF_DRAWN:
                parts += _in_place(experiment(name, dataset, backbone), outcomes, shown)
    return "\n".join([*parts, *_made(outcomes)]).rstrip() + "\n"


def _section(one: Experiment, lines: Sequence[Line], outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield f"## {one.heading}\n"
    if measured := _measured(lines):
        yield f"{sheet_of(one, measured).markdown()}\n"
        yield from _statistics(one, outcomes)
    missing = [line for line in lines if line.verdict == NOT_RUN]
    if missing:
        sheet = not_run_sheet(missing)
        told = "1 row was" if len(sheet.rows) == 1 else f"{len(sheet.rows)} rows were"
        yield f"<details><summary>{told} not run: published numbers, and why</summary>\n"
        yield f"{sheet.markdown()}\n\n</details>\n"


def _in_place(one: Experiment, outcomes: Sequence[Outcome], shown: dict[str, frozenset[str]]) -> Iterator[str]:
    """The same table with other pictures or another network, where any of it was run. Runs that another place shows
    all of are not shown again."""
    if any(row_.stand_in.endswith("deit") and HEAD in row_.stand_in for row_ in one.rows):
        return  # a projection after a ResNet-50 stands in for that network alone
    found = _measured(side_by_side(one, outcomes, {}))
    lines = [line for line in found if line.row.stand_in and line.metric != MINUTES]  # times of another network
    if not lines:
        return
    runs = _runs(lines, outcomes)
    elsewhere = next((where for where, others in shown.items() if runs <= others), None)
    if elsewhere is not None and not one.derived:
        yield f"With {lines[0].row.stand_in}: the runs of [{elsewhere}](#{slug(elsewhere)}).\n"
        return
    shown[title(one)] = runs
    yield f"### {title(one)}\n"
    yield f"{sheet_of(one, lines).markdown()}\n"
    yield from _statistics(one, outcomes)


def _measured(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.verdict != NOT_RUN]


def _runs(lines: Sequence[Line], outcomes: Sequence[Outcome]) -> frozenset[str]:
    keys = {line.row.key for line in lines}
    return frozenset(one.name for one in outcomes if one.about.get("key") in keys)


def _statistics(one: Experiment, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Rows that differ in their settings alone, against the best of them: the best epoch, and the last."""
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
        best, last = (compare(list(runs.values()), epoch=epoch) for epoch in (CHOSEN, LAST))
        network = f"{backbone} ({stand_in})" if stand_in else backbone
        place = f"{dataset}, {network}, batch {batch or 'of the recipe'}"
        if best.sheet.rows == last.sheet.rows:
            yield f"{place}, {best.selection}, which is {last.selection} too:\n\n{_standings(last)}\n"
        else:
            yield from (f"{place}, {found.selection}:\n\n{_standings(found)}\n" for found in (best, last))


def _standings(found: Standings) -> str:
    remarks = tuple(text for text in found.remarks if not text.startswith(SAID))
    return Sheet("", found.sheet.columns, found.sheet.rows, remarks).markdown()


def _made(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Where all of it comes from."""
    if outcomes:
        yield "## Where the runs were made\n"
        recipes = sorted({str(one.settings["recipe"]) for one in outcomes})
        for recipe in recipes:
            runs = [one for one in outcomes if one.settings["recipe"] == recipe]
            yield f"- `{recipe}`: {len(runs)} runs {origin(runs)}"


def look(results: Path = RESULTS, names: Sequence[str] = NAMES) -> None:
    """Keeps why rows cannot be run, or that nothing but time is missing; pictures are looked for in ROADMAP_DATA."""
    means = Means(out=HERE.parent / "runs" / "reproduce", results=results, missing=True)
    for name in names:
        note(prospects(experiment(name), 1, means), means)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--look", action="store_true", help="find out anew what can be run, before the page is written")
    if asked.parse_args().look:
        look()
    PAGE.write_text(page(), encoding="utf-8")
