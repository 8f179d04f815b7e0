"""How often the tests of `roadmap compare` find a difference where there is none, by simulation.

    python benchmarks/bench_levels.py    # into benchmarks/results/levels.csv

Each row is a procedure in a setting: the share of tables (or tests) with a false alarm at the level 0.05, of `repeats`.
Beside each is what would be done without it: a correction for the tests with the best alone, McNemar's test, plain
percentiles. The time is a minute on one core; nothing is trained.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from measure import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from roadmap.atomic import whole_file  # noqa: E402
from roadmap.experiments.statistics import clustered_bootstrap, holm, mcnemar, paired_t  # noqa: E402

REPEATS = 2000
DRAWS = 999
LEVEL = 0.05
Row = tuple[str, str, float, int]


def with_the_best(groups: int, seeds: int) -> Iterator[Row]:
    """Groups that do not differ: is any found worse than the best of them?"""
    draw, alarms = np.random.default_rng(0), np.zeros(2)
    for _ in range(REPEATS):
        values = draw.normal(0, 1, (groups, seeds))
        best = int(values.mean(1).argmax())
        pairs = [(i, j) for j in range(groups) for i in range(j)]
        p = dict(zip(pairs, [paired_t(values[i], values[j]).p for i, j in pairs], strict=True))
        own = [pair for pair in pairs if best in pair]
        corrected = dict(zip(pairs, holm(list(p.values())), strict=True))
        alarms += [min(corrected[pair] for pair in own) < LEVEL, min(holm([p[pair] for pair in own])) < LEVEL]
    setting = f"{groups} groups of {seeds} seeds"
    yield "Holm over all pairs", setting, alarms[0] / REPEATS, REPEATS
    yield "Holm over the tests with the best", setting, alarms[1] / REPEATS, REPEATS


def right_answers(classes: int) -> Iterator[Row]:
    """Two models that do not differ, whose queries of a class are right or wrong together (R@1)."""
    draw, alarms = np.random.default_rng(1), np.zeros(3)
    for _ in range(REPEATS):
        clusters = np.repeat(np.arange(classes), draw.integers(5, 60, classes))
        a, b = ((draw.random(classes) < 0.6)[clusters].astype(float) for _ in range(2))
        by_class, by_query = clustered_bootstrap(a, b, clusters, DRAWS).p, mcnemar(a, b).p
        alarms += [by_class < LEVEL, by_query < LEVEL, max(by_class, by_query) < LEVEL]
    setting = f"R@1, {classes} classes, right or wrong together"
    names = ("bootstrap over classes", "McNemar", "the larger of both")
    yield from ((name, setting, float(share), REPEATS) for name, share in zip(names, alarms / REPEATS, strict=True))


def few_classes(classes: int, what: str, lean: Callable[[np.random.Generator, int], np.ndarray]) -> Iterator[Row]:
    """Two models that do not differ but for how classes lean."""
    draw, alarms = np.random.default_rng(2), np.zeros(2)
    for _ in range(REPEATS):
        clusters = np.repeat(np.arange(classes), draw.integers(5, 60, classes))
        d = lean(draw, classes)[clusters] + draw.normal(0, 1, len(clusters))
        found = clustered_bootstrap(np.zeros(len(d)), d, clusters, DRAWS)
        sums, counts = np.bincount(clusters, d), np.bincount(clusters)
        weights = np.random.default_rng(0).multinomial(classes, np.full(classes, 1 / classes), DRAWS)
        low, high = np.quantile((weights @ sums) / (weights @ counts), [LEVEL / 2, 1 - LEVEL / 2])
        alarms += [found.p < LEVEL, not low <= 0 <= high]
    setting = f"{classes} classes that lean {what}"
    names = ("bootstrap over classes", "the same, plain percentiles")
    yield from ((name, setting, float(share), REPEATS) for name, share in zip(names, alarms / REPEATS, strict=True))


def even(draw: np.random.Generator, classes: int) -> np.ndarray:
    return draw.normal(0, 1, classes)


def skewed(draw: np.random.Generator, classes: int) -> np.ndarray:
    return draw.exponential(1, classes) - 1


def rows() -> Iterator[Row]:
    for groups in (3, 5, 8):
        for seeds in (3, 5):
            yield from with_the_best(groups, seeds)
    for classes in (20, 100):
        yield from right_answers(classes)
    for classes in (20, 40, 100):
        yield from few_classes(classes, "either way alike", even)
        yield from few_classes(classes, "far in a few", skewed)


def main() -> None:
    ran = provenance("cpu")
    path = ROOT / "benchmarks" / "results" / "levels.csv"
    names = ("procedure", "setting", "false alarms", "repeats", *ran)
    with whole_file(path) as temporary, open(temporary, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        for procedure, setting, share, repeats in rows():
            print(f"{share:.3f}  {procedure}: {setting}", flush=True)
            table.writerow([procedure, setting, f"{share:.3f}", repeats, *ran.values()])


if __name__ == "__main__":
    main()
