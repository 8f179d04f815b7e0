"""What a person sees of a run: what was decided, how far it is, a line for each epoch, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console

from roadmap.config.settings import Settings
from roadmap.engine.auto import WARNING
from roadmap.engine.results import (
    Results,
    choice_words,
    duration,
    processes_words,
    remarks,
    result_tables,
    shown_metrics,
    start_word,
)
from roadmap.engine.splits import Splits, searched_pictures, size_words
from roadmap.progress import Bar, bar
from roadmap.ranks import ALONE, Ranks
from roadmap.runs import Run

if TYPE_CHECKING:
    from roadmap.engine.arithmetic import Arithmetic
    from roadmap.models import Retriever


class Display:
    """Prints to the terminal; where nobody watches, lines without a bar."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(
            quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True
        )  # names as they are
        self._bar = Bar()
        self._loss, self._began = math.nan, time.monotonic()
        self._epochs, self._done = 0, 0

    def start(
        self,
        folder: Path,
        settings: Settings,
        splits: Splits,
        reasons: list[str],
        model: Retriever,
        arithmetic: Arithmetic,
        ranks: Ranks = ALONE,
    ) -> None:
        data = settings.data
        say = self.console.print
        for warning in (reason for reason in reasons if reason.startswith(WARNING)):
            say(f"{warning}\n")
        say(f"run        {folder}")
        say(f"pictures   {data.name}: train {size_words(splits.train)}", end="")
        say("" if splits.val is None else f", validation {size_words(splits.val)}", end="")
        say("".join(f", test {size_words(searched_pictures(test))}" for test in splits.tests))
        source = f"weights {settings.model.weights}"
        say(f"model      {settings.model.name}, {model.dim} dimensions, {_size_words(model)}, {source}")
        say(f"loss       {_loss_words(settings.loss)}")
        if settings.auxiliary["name"] != "none":
            say(f"auxiliary  {_loss_words(settings.auxiliary)}")
        rates = f"{settings.optim.name} at {settings.optim.lr:g}"
        batch = f"batches of {data.batch_size}, {data.per_class} of a class"
        epochs = f"{settings.epochs} epoch{'' if settings.epochs == 1 else 's'}"
        say(f"training   {epochs}, {batch}, {rates}, seed {settings.seed}")
        say(f"device     {arithmetic.device}, precision {arithmetic.precision}")
        if ranks.world > 1:
            say(f"processes  {processes_words(settings)}")
        say(f"best epoch {choice_words(settings, splits)}")
        for note in (*splits.notes, *(reason for reason in reasons if not reason.startswith(WARNING))):
            say(f"  - {note}")

    def before(self, settings: Settings, metrics: Mapping[str, Mapping[str, float]]) -> None:
        for name, values in metrics.items():
            self.console.print(f"{start_word(settings):<10} {name}: {shown_metrics(values)}")

    def training(self, epochs: int, done: int, length: int, batch: int) -> None:
        """Shows how far the run is: so many epochs of so many batches, of which so many steps are done."""
        self._began, self._epochs, self._done = time.monotonic(), epochs, done // length
        first, steps = min(1 + done // length, epochs), done * batch
        self._bar = bar(
            epochs * length * batch, f"epoch {first}/{epochs}", show=False if self.quiet else None, done=steps
        )

    def step(self, loss: float, pictures: int) -> None:
        self._loss = loss if math.isnan(self._loss) else 0.9 * self._loss + 0.1 * loss
        self._bar.note(f"loss {self._loss:.3f}")
        self._bar.update(pictures)

    def epoch(
        self, number: int, loss: float, split: str | None, values: Mapping[str, float], better: bool = False
    ) -> None:
        """A line that stays: the mean loss of an epoch, and what it was judged to be worth."""
        judged = "" if split is None else f", {split} {shown_metrics(values)}{' (best)' if better else ''}"
        line = f"epoch {number:>{len(str(self._epochs))}} of {self._epochs}  loss {loss:.4f}{judged}"
        left = self._epochs - number
        if left and not self._bar.drawn:  # a bar shows it all the time
            seconds = (time.monotonic() - self._began) / max(1, number - self._done) * left
            line += f", {duration(seconds)} left"
        if self._bar.drawn:
            self._bar.print(line)
        else:
            self.console.print(line)
        self._bar.name(f"epoch {min(number + 1, self._epochs)}/{self._epochs}")

    def close(self) -> None:
        self._bar.close()
        self._bar = Bar()

    def finish(self, run: Run, settings: Settings, splits: Splits, results: Results) -> None:
        """The results, what is remarkable about them, and what to do next."""
        self.close()
        for table in result_tables(settings, splits, results):
            self.console.print(table)
        if results.skipped:
            said = "1 picture" if results.skipped == 1 else f"{results.skipped:,} pictures"
            verb = "was" if results.skipped == 1 else "were"
            self.console.print(f"{said} could not be decoded and {verb} left out")
        for remark in remarks(settings, results):
            self.console.print(f"remark     {remark}")
        self.console.print(f"the model  {run.best}")
        self.console.print(f"next       {_next(run, settings, results)}")


def _next(run: Run, settings: Settings, results: Results) -> str:
    folder = quote(str(run.folder))
    if not results.after:
        return f"roadmap embed {folder} --out vectors.npz"
    tests = list(settings.data.test_sets.items())[:1]
    where = "".join(f" --data {name} --root {quote(root)}" for name, root in tests)
    return f"roadmap evaluate {folder}{where} --page retrievals.html"


def _size_words(model: Retriever) -> str:
    """How many parameters, and how many learn where not all do."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    learn = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{weights / 1e6:.1f} M parameters" + ("" if learn == weights else f" of which {learn:,} learn")


def _loss_words(loss: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in loss.items() if k != "name" and v is not None)
    return f"{loss['name']}{f' ({options})' if options else ''}"
