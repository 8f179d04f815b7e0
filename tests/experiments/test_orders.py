"""Claims about losses are tested over the seeds that both have, and say so when nothing is shown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import ttest_rel

from roadmap.experiments.definitions import Row, experiment
from roadmap.experiments.orders import HOLDS, NOT_SHOWN, REVERSED, claims, claims_sheet, growth
from roadmap.experiments.results import CHOSEN, LAST, Measurement, Outcome

HEAD = experiment("table6", "cub", "resnet50_head")
FIG5 = experiment("fig5", "cub", "resnet50_head")
BATCH = {row.name: row for row in HEAD.rows if row.batch_size == 128}


def outcome(row: Row, seed: int, percent: float) -> Outcome:
    tests = {"cub": {CHOSEN: Measurement(1, {"mAP@R": percent / 100})}}
    return Outcome(f"{row.key}{seed}", {"seed": seed}, "test", "", tests, {"key": row.key, "with": []})


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


def test_one_seed_speaks_of_nothing() -> None:
    assert claims_sheet([HEAD], outcomes({"supap": [21.0], "roadmap": [22.0]})) is None


def test_the_growth_of_the_gain_is_a_line_through_each_seed() -> None:
    """Gains of 4, 3, 2, ... percent for one seed and 8, 6, 4, ... for the other."""
    found = []
    for first, second in zip(FIG5.rows[::2], FIG5.rows[1::2], strict=True):
        place = math.log2(second.batch_size or 0)
        for seed, slope in enumerate((-1.0, -2.0)):
            found += [outcome(first, seed, 20.0), outcome(second, seed, 20.0 * (1 + (12 + slope * place) / 100))]
    slope = growth(FIG5, found, CHOSEN)
    assert slope is not None
    assert (slope.mean, slope.n) == (pytest.approx(-1.5), 2)
    assert growth(FIG5, found, LAST) is None
    assert growth(FIG5, found[:4], CHOSEN) is None  # one size
