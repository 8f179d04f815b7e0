"""Runs side by side: what differs between their settings, and what came of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roadmap.runs.folder import Run

SHOWN = ("R@1", "mAP@R")
OF_THE_FOLDER = ("out", "run")  # settings that always differ and say nothing
SPELT = {"loss.name": "loss"}  # as it is typed


def table(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    """A row for each run, all with the same columns, in the order given.

    Columns are "run", the settings in which the runs differ, the test metrics that say most, in 0..1 (with the name of
    the test set before them where there are several), "best epoch", and "training seconds". What a run does not have,
    because it is not finished or has no such setting, is None.
    """
    runs = [Run.open(Path(folder)) for folder in folders]
    settings = [flat(run.settings().as_dict()) for run in runs]
    summaries = [run.summary() for run in runs]
    tests = list(dict.fromkeys(name for summary in summaries for name in summary.get("after", {})))
    rows = []
    for run, values, summary in zip(runs, settings, summaries, strict=True):
        row: dict[str, Any] = {"run": run.folder.name}
        row |= {SPELT.get(name, name): values.get(name) for name in _differing_names(settings)}
        for test in tests:
            for metric in _shown_metrics(test, summaries):
                column = metric if len(tests) == 1 else f"{test} {metric}"
                row[column] = summary.get("after", {}).get(test, {}).get(metric)
        rows.append(row | {name: summary.get(name) for name in ("best epoch", "training seconds")})
    return rows


def table_text(folder: Path) -> str:
    """What came of the runs in a folder, a line each; they are named by what differs between them."""
    rows = table(path.parent for path in sorted(folder.glob("*/config.yaml")))
    columns = [name for name in (rows[0] if rows else []) if re.search("^run$|R@|mAP|best epoch", name)]
    cells = [columns, *([_cell(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}" if isinstance(value, float) else str(value)


def _differing_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for values in settings for name in values)
    several = [name for name in names if any(values.get(name) != settings[0].get(name) for values in settings)]
    return [name for name in several if name not in OF_THE_FOLDER]


def _shown_metrics(test: str, summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    metrics = next(summary["after"][test] for summary in summaries if test in summary.get("after", {}))
    return [name for name in SHOWN if name in metrics] or list(metrics)[:2]


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found
