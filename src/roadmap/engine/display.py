"""What a person sees of a run: what was decided, a bar while it trains, a table at the end, and what to do next."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from roadmap.config.settings import Settings
from roadmap.data import Records
from roadmap.engine.splits import Splits
from roadmap.engine.state import Best
from roadmap.runs import Run

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from roadmap.models import Retriever

CHOSEN = {
    "held_out": "chosen on held-out training classes",
    "last": "the last epoch, not chosen",
    "test": "CHOSEN ON THE TEST SET, as in the paper: flattering",
}
SHOWN = ("R@1", "mAP@R")


class Display:
    """Prints to the terminal; where nobody watches, a line per epoch instead of a bar."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(
            quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True
        )  # names as they are
        self.bar: tqdm[Any] | None = None
        self._seen, self._since, self._batch = 0, time.monotonic(), 0
        self._loss, self._judged = math.nan, ""

    def start(
        self,
        folder: Path,
        settings: Settings,
        splits: Splits,
        reasons: list[str],
        model: Retriever,
        fabric: Fabric,
    ) -> None:
        data, weights = settings.data, sum(p.numel() for p in model.parameters()) / 1e6
        say = self.console.print
        say(f"run        {folder}")
        say(f"pictures   {data.name}: train {_count(splits.train)}", end="")
        say("" if splits.val is None else f", validation {_count(splits.val)}", end="")
        say("".join(f", test {_count(_tested(test))}" for test in splits.tests))
        source = f"weights {settings.model.weights}"
        say(f"model      {settings.model.name}, {model.dim} dimensions, {weights:.1f} M parameters, {source}")
        say(f"loss       {_described(settings.loss)}")
        rates = f"{settings.optim.name} at {settings.optim.lr:g}"
        batch = f"batches of {data.batch_size}, {data.per_class} of a class"
        say(f"training   {settings.epochs} epochs, {batch}, {rates}, seed {settings.seed}")
        say(f"device     {fabric.device}, precision {fabric.strategy.precision.precision}")
        say(f"best epoch {CHOSEN[settings.select.by]}")
        for note in (*splits.notes, *reasons):
            say(f"  - {note}")

    def before(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in metrics.items():
            self.console.print(f"untrained  {name}: {_line(values)}")

    def training(self, steps: int, done: int, batch: int) -> None:
        self._batch, self._since = batch, time.monotonic()
        self.bar = tqdm(
            total=steps * batch,
            initial=done * batch,
            unit=" pictures",
            unit_scale=True,
            disable=True if self.quiet else None,
            dynamic_ncols=True,
            smoothing=0.05,
        )

    def step(self, loss: float) -> None:
        self._seen += self._batch
        self._loss = loss if math.isnan(self._loss) else 0.9 * self._loss + 0.1 * loss
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix_str(f"loss {self._loss:.3f}{self._judged}", refresh=False)
            self.bar.update(self._batch)

    def rate(self) -> float:
        """Pictures a second since it was last asked."""
        now = time.monotonic()
        rate = self._seen / max(1e-9, now - self._since)
        self._seen, self._since = 0, now
        return rate

    def epoch(self, number: int, split: str | None, values: Mapping[str, float], better: bool = False) -> None:
        judged = "" if split is None else f", {split} {_line(values)}{' (best)' if better else ''}"
        self._judged = judged or self._judged  # a bar goes on showing the last
        if self.bar is not None and self.bar.disable:
            self.console.print(f"epoch {number:>4}  loss {self._loss:.4f}{judged}")
        self._seen, self._since = 0, time.monotonic()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def finish(
        self,
        run: Run,
        settings: Settings,
        before: Mapping[str, Mapping[str, float]],
        after: Mapping[str, Mapping[str, float]],
        best: Best | None,
        skipped: int,
    ) -> None:
        when = "" if best is None else f" (epoch {best.epoch})"
        for name, values in after.items():
            table = Table(title=f"{name}, test: {CHOSEN[settings.select.by]}", title_justify="left")
            for column in ("metric", "untrained", f"trained{when}", "change"):
                table.add_column(column, justify="left" if column == "metric" else "right")
            for metric, value in values.items():
                first = before.get(name, {}).get(metric, math.nan)
                table.add_row(metric, *_cells(first, value))
            self.console.print(table)
        if skipped:
            self.console.print(f"{skipped} pictures could not be decoded and were left out")
        root = "" if settings.data.root is None else f" --root {quote(settings.data.root)}"
        self.console.print(f"the model  {run.best}")
        self.console.print(
            f"next       roadmap embed {quote(str(run.folder))} --data {settings.data.name}{root} --out embeddings.npz"
        )


def _tested(records: Records) -> Records:
    queries, gallery = records.evaluation()
    return queries if gallery is None else gallery


def _count(records: Records) -> str:
    return f"{len(records):,} of {len(np.unique(records.labels)):,} classes"


def _described(loss: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in loss.items() if k != "name" and v is not None)
    return f"{loss['name']}{f' ({options})' if options else ''}"


def _line(values: Mapping[str, float]) -> str:
    shown = [name for name in SHOWN if name in values] or list(values)[:2]
    return ", ".join(f"{name} {100 * values[name]:.2f}" for name in shown)


def _cells(first: float, value: float) -> tuple[str, str, str]:
    if isinstance(value, int):  # counts
        return f"{first:,}", f"{value:,}", ""
    return _percent(first), _percent(value), "" if math.isnan(value - first) else f"{100 * (value - first):+.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.2f}"
