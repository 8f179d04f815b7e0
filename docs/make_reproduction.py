"""Writes docs/reproduction.md from published.csv and experiments/results: python docs/make_reproduction.py

With --look it first finds out what the pictures and weights at hand permit, and keeps it in
experiments/results/not_run.json: why rows of the page were not run.
"""

from __future__ import annotations

import argparse
import csv
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from roadmap.experiments.definitions import Experiment, experiment, experiment_names, paper_names
from roadmap.experiments.grouping import origin
from roadmap.experiments.orders import (
    HOLDS,
    METRIC,
    NOT_SHOWN,
    REVERSED,
    RIVALS,
    Claim,
    choices_sheet,
    claims,
    claims_in_short,
    claims_sheet,
    growth,
)
from roadmap.experiments.reproduction import Means, note, prospects, reasons
from roadmap.experiments.results import CHOSEN, LAST, Outcome, all_outcomes
from roadmap.experiments.sheet import Sheet
from roadmap.experiments.standings import FLATTERY, Standings, compare
from roadmap.experiments.verdicts import MINUTES, NOT_RUN, SHOWN, Line, not_run_sheet, sheet_of, side_by_side

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "reproduction.md", HERE.parent / "experiments" / "results"
WHOLE_RUNS = HERE.parent / "benchmarks" / "results" / "cub_resnet50_v1.csv"
# What may stand in for the paper's pictures and networks, where it was run.
HEAD = "resnet50_head"
IN_PLACE = (("cub", None), ("cub", "vits"), ("cub", HEAD), ("glyphs", None))
# Tables that have SmoothAP, SupAP and ROADMAP in the same setting: Table 3 at batch 64, Tables 6 and 7 at the others.
ORDERED = (
    ("table3", None, None),
    ("table6", None, None),
    ("table7", None, None),
    ("ablation_vits", None, None),
    ("ablation_vits_84", None, None),
    ("table3", "cub", HEAD),
    ("table6", "cub", HEAD),
)
DRAWN = (("table3", "glyphs", None), ("table6", "glyphs", None))  # pictures of which the paper says nothing
SHOWN_OF_DRAWN = ("table3", "table6", "table10", "fig5")  # in others they would stand beside what they are not like
RIVALLED = (("table1", None, None), ("table5", None, None), ("table1", "cub", HEAD), ("table5", "cub", HEAD))
ABLATIONS = ("ablation_vits", "ablation_vits_84", "ablation_head")
NAMES = tuple(name for name in experiment_names() if name != "smallest")
# Said once, above: the epoch was chosen on the test set; what one seed tells; runs of several commits (at the end).
SAID = (FLATTERY, "one run each", "the runs differ in code")

BEGINNING = """\
<!-- Written by docs/make_reproduction.py from files that commands made; change those, and run it again. -->
# Reproduction

Every number of the paper's Tables 1 to 10 and Figs. 4, 5 and 13 beside what was measured here, or why it was not.

## Does the paper's claim hold?
"""

ORDER_IN_SHORT = """\
**The order of the losses** by mAP@R: the difference in points at the last epoch, over the seeds that both have, with
Student's 95 % interval. **holds**, **reversed**: p below 0.05 by the paired t-test, after Holm's correction over the
whole table; else not shown, which is not the same as refuted. resnet50_head is a ResNet-50 that stays as it is and a
projection after it that learns: a stand-in, whose numbers are its own.
"""

DRAWN_IN_SHORT = """\
**The same where a whole network learns**, from pictures that are drawn (`recipe=glyphs`, 7 epochs, tested on characters
that it never saw), with a correction of its own. It shows that the order can be had, not that CUB has it: Glyphs is
the toy of this project, and with another head its order is another
([training.md](training.md#the-demonstration)).
"""

RIVALS_IN_SHORT = """\
**ROADMAP over the other AP losses** of Tables 1 and 5 (SmoothAP stands above): the same, with a correction of its own.
"""

CHOICES_IN_SHORT = """\
**What the paper leaves open**: mAP@R less that of ROADMAP, likewise, at batch 128. Eq. (7) as printed is a mean over
all pairs, where the released code takes those that violate.
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
all claims of the same epoch, which are the paper's and were not chosen by what was measured.
"""


def page() -> str:
    """The whole of it."""
    outcomes, why = all_outcomes(RESULTS), reasons(RESULTS)
    own = {name: side_by_side(experiment(name), outcomes, why) for name in NAMES}
    shown = {experiment(name).heading: _runs(_measured(lines), outcomes) for name, lines in own.items()}
    parts = [BEGINNING, *_answer([line for name in paper_names() for line in own[name]], outcomes), HOW]
    if (sheet := claims_sheet(_ordered(), outcomes)) is not None:
        parts += [ORDER, f"{sheet.markdown()}\n"]
    for name in NAMES:
        parts += _section(experiment(name), own[name], outcomes)
        for dataset, backbone in IN_PLACE if name not in ABLATIONS else ():
            if dataset != "glyphs" or name in SHOWN_OF_DRAWN:
                parts += _in_place(experiment(name, dataset, backbone), outcomes, shown)
    return "\n".join([*parts, *_made(outcomes)]).rstrip() + "\n"


def _ordered() -> list[Experiment]:
    return [experiment(*which) for which in ORDERED]


def _answer(lines: Sequence[Line], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What a reader came for, in a screen."""
    yield from _account([line for line in lines if line.number], outcomes)
    resnet = experiment("table5", "cub", "resnet50")
    yield _whole_runs(side_by_side(resnet, outcomes, {}))
    if found := claims(_ordered(), outcomes, LAST):
        yield f"{ORDER_IN_SHORT}\n{claims_in_short(found).markdown()}\n\n{_counted(found)}\n"
    if found := claims([experiment(*which) for which in DRAWN], outcomes, LAST):
        yield f"{DRAWN_IN_SHORT}\n{claims_in_short(found).markdown()}\n\n{_counted(found)}\n"
    if found := claims([experiment(*which) for which in RIVALLED], outcomes, LAST, RIVALS):
        yield f"{RIVALS_IN_SHORT}\n{claims_in_short(found, RIVALS).markdown()}\n\n{_counted(found)}\n"
    yield from _one_run_each(outcomes)
    yield from _batches(outcomes)
    yield from _gap(outcomes)
    if (sheet := choices_sheet([experiment(name) for name in ABLATIONS], outcomes)) is not None:
        yield f"{CHOICES_IN_SHORT}\n{sheet.markdown()}\n"


def _counted(found: Sequence[Claim]) -> str:
    kinds = Counter(one.verdict for one in found)
    return f"Of {len(found)}: {', '.join(f'{kind} {kinds[kind]}' for kind in (HOLDS, NOT_SHOWN, REVERSED))}."


def _account(lines: Sequence[Line], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How much was measured of what the paper prints, and why not more."""
    found = {(line.row, line.metric): line for line in lines}
    missing = [line for line in found.values() if line.verdict == NOT_RUN]
    verdicts = Counter(line.verdict for line in found.values() if line.verdict != NOT_RUN)
    told = f" ({', '.join(f'{n} {kind}' for kind, n in sorted(verdicts.items()))})" if verdicts else ""
    yield f"**In the paper's own setting {len(found) - len(missing)} of its {len(found)} numbers were measured{told}.**"
    yield "Why the others were not:\n"
    for text, count in Counter(line.why for line in missing).most_common():
        yield f"- {count}: {text}"
    seconds = sum(float(one.about["training seconds"]) for one in outcomes)
    machines = " and ".join(sorted({", ".join(one.about["gpus"]) or "CPU" for one in outcomes}))
    told = f"What follows is of {len(outcomes)} runs, {seconds / 3600:.1f} hours of training on {machines}."
    yield f"\n{told}\n"


def _whole_runs(lines: Sequence[Line]) -> str:
    """Runs of Table 5 from before the values of queries were kept: last epochs, which count nowhere else."""
    published = {(line.row.name, line.row.dataset, line.metric): line.number for line in lines}
    told = []
    for run in csv.DictReader(WHOLE_RUNS.read_text(encoding="utf-8").splitlines()):
        if run["test"] == "cub":
            loss = run["command"].rpartition("loss=")[2]
            measured = " / ".join(f"{float(run[metric]):.2f}" for metric in SHOWN)
            printed = " / ".join(number.text for m in SHOWN if (number := published[loss, "cub", m]) is not None)
            told.append(f"{loss} {measured} ({printed})")
    return _paragraph(
        "Not counted are runs of Table 5's setting on cub from before this page kept the values of queries: seed 0,",
        f"last epoch, {' / '.join(SHOWN)}, in brackets the published means of best epochs: {', '.join(told)}",
        f"(`{WHOLE_RUNS.relative_to(HERE.parent)}`).",
    )


def _one_run_each(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The three losses where each was run once: nothing can be tested, and something is known."""
    settings: dict[tuple[str, str, str, int | None], list[str]] = {}
    for one in _ordered():
        for line in side_by_side(one, outcomes, {}):
            if line.metric == METRIC and line.last is not None and line.last.n == 1:
                row_ = line.row
                place = (row_.dataset, row_.backbone, row_.stand_in, row_.batch_size)
                settings.setdefault(place, []).append(f"{row_.name} {line.last.mean:.2f}")
    for (dataset, backbone, stand_in, batch), told in settings.items():
        if len(told) > 1:
            place_told = f"{dataset}, {stand_in or backbone}, batch {batch}"
            yield _paragraph(
                f"**One run each** ({place_told}): mAP@R of {', '.join(told)}. Over seeds nothing can be tested."
            )


def _batches(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What the calibration adds, against the batch size, wherever there are enough sizes and seeds."""
    for place in ((None, None), *IN_PLACE[1:]):
        one = experiment("fig5", *place)
        for found in growth(one, outcomes, LAST).values():
            slope, (small, *_, large) = found.slope, found.gains
            told = "it shrinks, as Fig. 5 has it" if slope.high < 0 else "no trend is shown, though Fig. 5 has one"
            told = "it grows, against Fig. 5" if slope.low > 0 else told
            yield _paragraph(
                f"**The calibration and the batch** ({_setting(one)}): when the batch is doubled, what the calibration",
                f"adds to mAP@R, in percent of it, changes by {slope.mean:+.2f} ({slope.low:+.2f} to",
                f"{slope.high:+.2f}, {slope.n} seeds): {told}. It is {found.gains[small].mean:+.2f} % at batch {small}",
                f"and {found.gains[large].mean:+.2f} % at {large}. Each size: [Fig. 5](#{_slug(_title(one))}).",
            )


def _gap(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The decrease of the gap, beside the published one."""
    for place in ((None, None), *IN_PLACE[1:]):
        one = experiment("table10", *place)
        for line in side_by_side(one, outcomes, {}):
            if (found := line.last) is not None and line.number is not None:
                told = f" ({found.low:+.2f} to {found.high:+.2f}, {found.n} seeds)" if found.n > 1 else ""
                yield _paragraph(
                    f"**The decomposability gap** ({_setting(one)}) decreases from SupAP to ROADMAP by",
                    f"{found.mean:.2f} %{told}; Table 10 has {line.number.value} % for {line.row.dataset}.",
                )


def _paragraph(*texts: str) -> str:
    told = textwrap.fill(" ".join(texts), 120, break_long_words=False, break_on_hyphens=False)
    return f"{told}\n"


def _setting(one: Experiment) -> str:
    return one.rows[-1].stand_in or "the paper's own"


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
    elsewhere = next((title for title, others in shown.items() if runs <= others), None)
    if elsewhere is not None and not one.derived:
        yield f"With {lines[0].row.stand_in}: the runs of [{elsewhere}](#{_slug(elsewhere)}).\n"
        return
    shown[_title(one)] = runs
    yield f"### {_title(one)}\n"
    yield f"{sheet_of(one, lines).markdown()}\n"
    yield from _statistics(one, outcomes)


def _measured(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.verdict != NOT_RUN]


def _runs(lines: Sequence[Line], outcomes: Sequence[Outcome]) -> frozenset[str]:
    keys = {line.row.key for line in lines}
    return frozenset(one.name for one in outcomes if one.about.get("key") in keys)


def _title(one: Experiment) -> str:
    """Of a table with something in place of what the paper has."""
    stand_in = next((row_.stand_in for row_ in one.rows if row_.stand_in), "")
    return f"{one.heading.partition(':')[0]}, {stand_in}" if stand_in else one.heading


def _slug(title: str) -> str:
    """As GitHub makes the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


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
