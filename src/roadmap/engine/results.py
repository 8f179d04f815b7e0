"""What came of a run, in words and tables: before and after, and what a person should notice about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from roadmap.config.settings import Settings
from roadmap.engine.splits import OWN, Splits
from roadmap.engine.state import Best

CHOICES = {
    "held_out": "chosen on held-out training classes",
    "last": "the last epoch, not chosen",
    "test": "CHOSEN ON THE TEST SET, as in the paper: flattering",
}
SHOWN = ("R@1", "mAP@R")
FEW_QUERIES = 50  # below, a single answer moves R@1 by more than two points


@dataclass(frozen=True, eq=False)
class Results:
    """Test metrics by test set, before and after training; the epoch that was chosen; pictures that were left out."""

    before: Mapping[str, Mapping[str, float]]
    after: Mapping[str, Mapping[str, float]]
    best: Best | None
    skipped: int


def choice_words(settings: Settings, splits: Splits) -> str:
    """How the epoch is chosen that is kept."""
    if settings.select.by != "held_out" or not splits.val_given:
        return CHOICES[settings.select.by]
    if settings.data.name in OWN:
        return f"chosen on your {'val/' if settings.data.name == 'folder' else 'validation'} pictures"
    return f"chosen on the validation pictures of {settings.data.name}"


def processes_words(settings: Settings) -> str:
    """How many train together, and what each does."""
    hardware, batch = settings.hardware, settings.data.batch_size
    world = hardware.devices * hardware.nodes
    where = f"{hardware.nodes} machines with {hardware.devices} each" if hardware.nodes > 1 else "this machine"
    return (
        f"{world} on {where}; of a batch of {batch} each embeds {batch // world} and compares these "
        f"{batch // world} rows with all {batch}"
    )


def start_word(settings: Settings) -> str:
    """What the network was before the run: pretrained ones are not untrained."""
    return "untrained" if settings.model.weights == "random" else "before training"


def shown_metrics(values: Mapping[str, float]) -> str:
    """The two that say most, in a line."""
    shown = [name for name in SHOWN if name in values] or list(values)[:2]
    return ", ".join(f"{name} {100 * values[name]:.2f}" for name in shown)


def result_tables(settings: Settings, splits: Splits, results: Results) -> Iterator[Table]:
    """One for each test set."""
    when = "" if results.best is None else f" (epoch {results.best.epoch})"
    for name, values in results.after.items():
        table = Table(title=f"{name}, test: {choice_words(settings, splits)}", title_justify="left")
        for column in ("metric", start_word(settings), f"trained{when}", "change"):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for metric, value in values.items():
            table.add_row(metric, *_cells(results.before.get(name, {}).get(metric, math.nan), value))
        yield table


def remarks(settings: Settings, results: Results) -> Iterator[str]:
    """What a person should know before believing the numbers."""
    for name, values in results.after.items():
        queries = values.get("queries", FEW_QUERIES)
        if queries < FEW_QUERIES:
            yield (
                f"{name} has only {queries} test pictures that search: one answer more or less moves R@1 by "
                f"{100 / max(1, queries):.0f} points; test on more before you rely on it"
            )
        metric = _judged_by(settings, values)
        first, last = (part.get(name, {}).get(metric, math.nan) for part in (results.before, results.after))
        if last < first:
            yield (
                f"training made {name} worse: {metric} {100 * first:.2f} before, {100 * last:.2f} after. Try a lower "
                "optim.lr or fewer epochs, and see whether the training pictures are like those of the test"
            )


def _judged_by(settings: Settings, values: Mapping[str, float]) -> str:
    known = [settings.select.metric, *reversed(SHOWN)]
    return next((name for name in known if name in values), next(iter(values), ""))


def _cells(first: float, value: float) -> tuple[str, str, str]:
    if isinstance(value, int):  # counts
        return f"{first:,}", f"{value:,}", ""
    return _percent(first), _percent(value), "" if math.isnan(value - first) else f"{100 * (value - first):+.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"


def duration(seconds: float) -> str:
    """A time that is not to be taken by the second."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
