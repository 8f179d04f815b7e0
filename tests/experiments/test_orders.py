"""Claims about losses are tested over the seeds that both have, and say so when nothing is shown."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from roadmap.experiments.definitions import Row, experiment
from roadmap.experiments.orders import (
    HOLDS,
    NOT_SHOWN,
    REVERSED,
    RIVALS,
    choices_sheet,
    claims,
    claims_in_short,
    claims_sheet,
    growth,
)
from roadmap.experiments.results import CHOSEN, LAST, Measurement, Outcome

DOCS = Path(__file__).parents[2] / "docs"
HEAD = experiment("table6", "cub", "resnet50_head")
FIG5 = experiment("fig5", "cub", "resnet50_head")
BATCH = {row.name: row for row in HEAD.rows if row.batch_size == 128}


def outcome(row: Row, seed: int, percent: float, *extra: str) -> Outcome:
    tests = {"cub": {CHOSEN: Measurement(1, {"mAP@R": percent / 100})}}
    return Outcome(
        f"{row.key}{seed}{''.join(extra)}", {"seed": seed}, "test", "", tests, {"key": row.key, "with": [*extra]}
    )


def outcomes(values: dict[str, list[float]]) -> list[Outcome]:
    return [outcome(BATCH[name], seed, v) for name, found in values.items() for seed, v in enumerate(found)]


def test_claims_against_scipy_and_holm_by_hand() -> None:
    values = {"smoothap": [20.0, 20.4, 20.1, 9.0], "supap": [21.0, 21.5, 21.0], "roadmap": [20.9, 21.6, 21.2]}
    found = claims([HEAD], outcomes(values), CHOSEN)
    assert [(one.first.name, one.second.name) for one in found] == [
        ("smoothap", "supap"), ("supap", "roadmap"), ("smoothap", "roadmap")
    ]  # fmt: skip
    raw = [float(ttest_rel(values[b.second.name], values[b.first.name][:3]).pvalue) for b in found]
    assert [one.test.p for one in found] == pytest.approx(raw)
    order = np.argsort(raw)
    corrected = np.maximum.accumulate([min(1.0, (3 - k) * raw[i]) for k, i in enumerate(order)])
    assert [found[i].p for i in order] == pytest.approx(corrected.tolist())
    assert [one.test.n for one in found] == [3, 3, 3]
    assert [one.verdict for one in found] == [HOLDS, NOT_SHOWN, HOLDS]
    assert found[0].published == pytest.approx(24.90 - 24.44)  # at batch 128
    assert claims([HEAD], outcomes(values), LAST) == []


def test_an_order_that_is_reversed_says_so() -> None:
    found = claims([HEAD], outcomes({"supap": [21.0, 21.5, 21.0], "roadmap": [20.0, 20.5, 20.1]}), CHOSEN)
    assert [one.verdict for one in found] == [REVERSED]
    sheet = claims_sheet([HEAD], outcomes({"supap": [21.0, 21.5, 21.0], "roadmap": [20.0, 20.5, 20.1]}))
    assert sheet is not None
    (row,) = sheet.rows
    assert [cell.text for cell in row][1:5] == [
        "resnet50_head in place of resnet50",
        "128",
        "roadmap over supap",
        "best",
    ]
    assert row[6].text == "-0.97"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((None, None), ["cub", "resnet50"]),
        (("cub", "resnet50_head"), ["cub", "resnet50_head in place of resnet50"]),
        (("glyphs", None), ["glyphs in place of cub", "its small network in place of resnet50"]),
    ],
)
def test_what_stands_in_for_pictures_or_network_stands_in_its_column(
    place: tuple[str | None, str | None], told: list[str]
) -> None:
    table = experiment("table6", *place)
    rows = {row.name: row for row in table.rows if row.dataset == "cub" and row.batch_size == 128}
    found = []
    for name, values in {"supap": [21.0, 21.5, 21.0], "roadmap": [20.0, 20.5, 20.1]}.items():
        for seed, percent in enumerate(values):
            one = outcome(rows[name], seed, percent)
            tests = {"glyphs" if place[0] == "glyphs" else "cub": one.tests["cub"]}
            found.append(dataclasses.replace(one, tests=tests))
    sheet = claims_sheet([table], found)
    assert sheet is not None
    short = claims_in_short(claims([table], found, CHOSEN))
    assert [[cell.text for cell in row[:2]] for row in (*sheet.rows, *short.rows)] == [told, told]


def test_one_seed_speaks_of_nothing() -> None:
    assert claims_sheet([HEAD], outcomes({"supap": [21.0], "roadmap": [22.0]})) is None


def test_the_growth_of_the_gain_is_a_line_through_each_seed() -> None:
    """Gains of 4, 3, 2, ... percent for one seed and 8, 6, 4, ... for the other."""
    found = []
    for first, second in zip(FIG5.rows[::2], FIG5.rows[1::2], strict=True):
        place = math.log2(second.batch_size or 0)
        for seed, slope in enumerate((-1.0, -2.0)):
            found += [outcome(first, seed, 20.0), outcome(second, seed, 20.0 * (1 + (12 + slope * place) / 100))]
    ((extra, told),) = growth(FIG5, found, CHOSEN).items()
    assert (extra, told.slope.mean, told.slope.n) == ((), pytest.approx(-1.5), 2)
    assert list(told.gains) == [32, 64, 128, 224, 384]
    assert (told.gains[32].mean, told.gains[64].mean) == (pytest.approx(4.5), pytest.approx(3.0))
    assert growth(FIG5, found, LAST) == {}
    assert growth(FIG5, found[:4], CHOSEN) == {}  # one size
    # runs with other settings have a line of their own
    others = [outcome(row, seed, 20.0, "x=1") for row in FIG5.rows for seed in range(3)]
    both = growth(FIG5, [*others, *found], CHOSEN)
    assert (both[()].slope.mean, both[()].slope.n) == (pytest.approx(-1.5), 2)
    assert (both["x=1",].slope.mean, both["x=1",].slope.n) == (pytest.approx(0), 3)


def test_every_batch_size_of_the_paper_is_among_the_claims() -> None:
    """64 stands in Table 3, the others in Table 6."""
    spec = importlib.util.spec_from_file_location("make_reproduction", DOCS / "make_reproduction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tables = [experiment(*which) for which in (*module.WHOLE, *module.PROJECTED)]
    rows = {row.key: row for table in tables for row in table.rows}.values()
    sheet = claims_sheet(tables, [outcome(row, seed, 20 + seed + len(row.name) / 7) for row in rows for seed in (0, 1)])
    assert sheet is not None
    told = [[cell.text for cell in row] for row in sheet.rows if row[4].text == "best"]
    for pictures, network in (("cub", "resnet50"), ("sop", "resnet50"), ("cub", "resnet50_head in place of resnet50")):
        sizes = [(row[2], row[3]) for row in told if row[:2] == [pictures, network]]
        pairs = ("supap over smoothap", "roadmap over supap", "roadmap over smoothap")
        assert sizes == [(size, pair) for size in ("32", "64", "128", "224", "384") for pair in pairs]


def test_seeds_without_spread_show_nothing() -> None:
    """t would be infinite."""
    (found,) = claims([HEAD], outcomes({"supap": [21.0, 21.5, 21.0], "roadmap": [22.0, 22.5, 22.0]}), CHOSEN)
    assert math.isnan(found.p)
    assert found.verdict == NOT_SHOWN
    sheet = claims_sheet([HEAD], outcomes({"supap": [21.0, 21.5, 21.0], "roadmap": [22.0, 22.5, 22.0]}))
    assert sheet is not None
    assert [cell.text for cell in sheet.rows[0]][6:] == ["+1.00", "-", "3", "-", NOT_SHOWN]


def test_seeds_may_come_in_any_order_and_a_diverged_one_is_named() -> None:
    values = {"supap": [21.0, 21.5, 20.0], "roadmap": [22.0, 22.1, 21.9]}
    runs = outcomes(values)
    shuffled = claims([HEAD], [runs[place] for place in (4, 0, 5, 2, 3, 1)], CHOSEN)
    assert shuffled == claims([HEAD], runs, CHOSEN)
    sheet = claims_sheet([HEAD], outcomes({"supap": [21.0, 21.5, math.nan], "roadmap": [22.0, 22.1, 21.9]}))
    assert sheet is not None
    assert sheet.rows[0][8].text == "2"
    assert sheet.notes == (
        "the runs are of commit unknown, on CPU, with torch unknown",
        f"left out, for they gave no number: {BATCH['supap'].key}2",
    )


def test_one_seed_twice_and_epochs_chosen_otherwise_are_refused() -> None:
    runs = outcomes({"supap": [21.0, 21.5], "roadmap": [22.0, 22.1]})
    twice = dataclasses.replace(runs[0], name="again")
    with pytest.raises(ValueError, match="and again are the same run twice: row cub_resnet50_head.*, seed 0; leave"):
        claims([HEAD], [*runs, twice], CHOSEN)
    last = dataclasses.replace(runs[0], by="last", settings={"seed": 9})
    with pytest.raises(ValueError, match="are of one row, and their epochs were chosen by test and by last"):
        claims([HEAD], [*runs, last], CHOSEN)


def test_claims_in_short_have_a_row_for_each_setting() -> None:
    values = {"smoothap": [20.0, 20.4, 20.1, 9.0], "supap": [21.0, 21.5, 21.0], "roadmap": [20.9, 21.6, 21.2]}
    found = claims([HEAD], outcomes(values), CHOSEN)
    (row,) = claims_in_short(found).rows
    assert [cell.text for cell in row[:4]] == ["cub", "resnet50_head in place of resnet50", "128", "3"]
    for cell, one in zip(row[4:], found, strict=True):
        assert cell.bold == (one.verdict != NOT_SHOWN)
        assert cell.text.startswith(f"{one.test.difference:+.2f} ({one.test.low:+.2f} to {one.test.high:+.2f}), p ")
        assert cell.text.endswith(f": {one.verdict}")
    # without one of the losses
    (row,) = claims_in_short(claims([HEAD], outcomes({k: values[k] for k in ("supap", "roadmap")}), CHOSEN)).rows
    assert [cell.text for cell in (row[4], row[6])] == ["-", "-"]


def test_roadmap_stands_against_the_other_losses_of_tables_1_and_5() -> None:
    tables = [experiment(name, "cub", "resnet50_head") for name in ("table1", "table5")]
    values = {"fastap": (21.0, 21.5, 21.3), "blackboxap": (19.0, 19.5, 19.2), "roadmap": (20.0, 20.4, 20.3)}
    rows = {row.name: row for row in tables[1].rows}
    found = claims(
        tables,
        [outcome(rows[name], seed, v) for name, of in values.items() for seed, v in enumerate(of)],
        CHOSEN,
        RIVALS,
    )
    assert [(one.first.name, one.verdict) for one in found] == [("fastap", "reversed"), ("blackboxap", "holds")]
    sheet = claims_in_short(found, RIVALS)
    assert sheet.columns[4:] == ("roadmap over fastap", "roadmap over softbinap", "roadmap over blackboxap")
    assert [cell.text.rpartition(": ")[2] for cell in sheet.rows[0][4:]] == ["reversed", "-", "holds"]


def test_what_the_paper_leaves_open_stands_against_roadmap() -> None:
    table = experiment("ablation_head")
    rows = {row.name: row for row in table.rows}
    runs = []
    printed = "ROADMAP, Eq. (7) as printed"
    every = {"roadmap": (20.0, 20.4, 20.1), printed: (17.0, 17.5, 17.0), "calibration alone": (19.0,)}
    for name, percents in every.items():
        for seed, percent in enumerate(percents):
            one = outcome(rows[name], seed, percent)
            runs.append(dataclasses.replace(one, tests={"cub": {**one.tests["cub"], LAST: one.tests["cub"][CHOSEN]}}))
    sheet = choices_sheet([table], runs)
    assert sheet is not None
    (row,) = sheet.rows  # of calibration alone there is one seed
    told = [cell.text for cell in row]
    assert told[:4] == [printed, "cub", "resnet50_head", "-3.00"]
    assert told[-3:] == ["3", f"{ttest_rel(every[printed], every['roadmap']).pvalue:.2g}", "worse"]
    assert choices_sheet([table], runs[:3]) is None
