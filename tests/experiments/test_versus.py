"""What decides between groups keeps its level when nothing differs, whatever is best by chance."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from roadmap.experiments import compare
from roadmap.experiments.results import CHOSEN, Measurement, Outcome
from roadmap.experiments.statistics import holm, paired_t
from roadmap.experiments.versus import pairs_of

CLASSES = 30


def run(
    group: str, seed: int, mean: float, per_query: dict[str, np.ndarray] | None = None, labels: Sequence[int] = ()
) -> Outcome:
    kept = per_query or {}
    metrics = {name: float(np.nanmean(values)) for name, values in kept.items()} or {"mAP@R": mean}
    tests = {"cub": {CHOSEN: Measurement(1, metrics, kept, np.asarray(labels, np.int64), "same")}}
    settings = {"seed": seed, "loss.name": group, "data.name": "cub"}
    return Outcome(f"{group}{seed}", settings, "last", "cub", tests, {"commit": "abc"})


def worse(found: dict[str, float]) -> bool:
    return any(p < 0.05 for p in found.values())


def test_the_best_of_eight_alike_is_rarely_better_than_any() -> None:
    """Family-wise error of what is not in bold: at most 0.05. Corrected for the seven tests with the best alone, which
    is chosen by the same numbers, it is nearly twice that."""
    draw, groups, alarms, before = np.random.default_rng(0), [f"g{i}" for i in range(8)], 0, 0
    for _ in range(600):
        values = draw.normal(0, 1, (8, 5))
        best = int(values.mean(1).argmax())
        others = [paired_t(values[best], values[i]).p for i in range(8) if i != best]
        before += min(holm(others)) < 0.05
        runs = {g: {seed: run(g, seed, v) for seed, v in enumerate(row)} for g, row in zip(groups, values, strict=True)}
        tests = pairs_of(runs, "cub", CHOSEN, "mAP@R", groups[best], 100).tests
        assert len(tests) == 28
        alarms += worse({pair[1]: one.p for pair, one in tests.items() if pair[0] == groups[best]})
    assert alarms <= 30  # 0.05
    assert before >= 42  # 0.07


def test_right_answers_by_class_decide_with_classes_drawn() -> None:
    """Three models that are alike but for chance, whose queries of a class are right or wrong together: what decides
    keeps its level, where McNemar's test by itself would find a difference nearly always."""
    draw, alarms, by_mcnemar = np.random.default_rng(1), 0, 0
    labels = np.repeat(np.arange(CLASSES), 10)
    for _ in range(300):
        answers = (draw.random((3, CLASSES)) < 0.6)[:, labels].astype(float)
        runs = {f"g{i}": {0: run(f"g{i}", 0, 0.0, {"R@1": row}, labels)} for i, row in enumerate(answers)}
        best = f"g{int(answers.mean(1).argmax())}"
        tests = pairs_of(runs, "cub", CHOSEN, "R@1", best, 200).tests
        against = {pair[1]: one for pair, one in tests.items() if pair[0] == best}
        alarms += worse({name: one.p for name, one in against.items()})
        by_mcnemar += worse({name: one.p_mcnemar for name, one in against.items()})
    assert alarms <= 21  # 15 are 0.05
    assert by_mcnemar >= 150


def test_few_disagreements_are_too_few_whatever_classes_say() -> None:
    """Five queries of 300 that only one answers, of five classes: by McNemar p = 1/16."""
    labels = np.repeat(np.arange(CLASSES), 10)
    good = np.ones(300)
    bad = good.copy()
    bad[[5, 25, 45, 65, 85]] = 0
    found = compare([run(name, 0, 0.0, {"R@1": row}, labels) for name, row in (("good", good), ("bad", bad))])
    one = found.standings["R@1"][1]
    assert one.versus is not None
    assert one.versus.p_classes < 0.05
    assert one.versus.p == one.versus.p_mcnemar == pytest.approx(1 / 16)
    assert one.best


def test_too_few_classes_are_told_and_decide_nothing() -> None:
    """McNemar's test is shown, and does not decide alone."""
    labels = np.repeat(np.arange(12), 10)
    good = np.ones(120)
    bad = good.copy()
    bad[:60] = 0
    found = compare([run(name, 0, 0.0, {"R@1": row}, labels) for name, row in (("good", good), ("bad", bad))])
    one = found.standings["R@1"][1]
    assert one.versus is not None
    assert one.versus.classes is None
    assert one.versus.p_mcnemar < 1e-9
    assert np.isnan(one.versus.p)
    assert not one.best
    (said,) = (text for text in found.remarks if "classes" in text)
    assert said.startswith("the queries are of 12 classes, too few for a bootstrap over classes, which needs 20")
    assert "-50.00, not tested" in str(found)


def test_seeds_and_queries_that_decide_in_one_table_are_corrected_together() -> None:
    """One group has two seeds in common with the best, the other one."""
    labels, draw = np.repeat(np.arange(CLASSES), 10), np.random.default_rng(2)
    level = {"a": 0.9, "b": 0.6, "c": 0.5}
    runs = [
        run(name, seed, 0.0, {"mAP@R": np.clip(draw.normal(level[name], 0.05, 300), 0, 1)}, labels)
        for name, seeds in (("a", 3), ("b", 3), ("c", 1))
        for seed in range(seeds)
    ]
    found = compare(runs)
    b, c = (one.versus for one in found.standings["mAP@R"][1:])
    assert b is not None
    assert c is not None
    assert b.seeds is not None
    assert c.seeds is None
    assert c.classes is not None
    deciding = [b.seeds.p, c.classes.p, c.classes.p]  # of b and c too there is one seed in common
    assert b.p == pytest.approx(holm(deciding)[0])
    assert c.p == pytest.approx(holm(deciding)[1])
    assert any("groups have other seeds" in text for text in found.remarks)


def test_equal_differences_over_seeds_leave_it_to_the_queries() -> None:
    labels, draw = np.repeat(np.arange(CLASSES), 10), np.random.default_rng(3)
    base = draw.normal(0.5, 0.1, (2, 300))
    runs = [
        run(name, seed, 0.0, {"mAP@R": base[seed] + shift}, labels)
        for name, shift in (("a", 0.25), ("b", 0.0))
        for seed in (0, 1)
    ]
    (one,) = (one.versus for one in compare(runs).standings["mAP@R"] if one.versus is not None)
    assert one.seeds is not None
    assert np.isnan(one.p_seeds)
    assert one.p == one.p_classes < 0.05


def test_the_table_of_false_alarms_is_that_of_its_file() -> None:
    """docs/experiments.md against benchmarks/results/levels.csv."""
    root = Path(__file__).parents[2]
    with (root / "benchmarks" / "results" / "levels.csv").open(newline="") as file:
        measured: dict[str, list[str]] = {}
        for row in csv.DictReader(file):
            measured.setdefault(row["setting"], []).append(row["false alarms"])
    page = (root / "docs" / "experiments.md").read_text()
    table = re.search(r"\| nothing differs between .*\n\|---.*\n((?:\|.*\n)+)", page)
    assert table is not None
    told = {line[1]: line[2:4] for line in (re.split(r" ?\| ?", line) for line in table[1].splitlines())}
    # of R@1: the bootstrap, McNemar, and the larger of both, which decides
    expected = {setting: [found[2], found[1]] if len(found) == 3 else found for setting, found in measured.items()}
    assert told == expected
