"""A CSV with a row for each run that was measured: there as soon as it is, and measured once."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import provenance

from roadmap.atomic import whole_file

Row = dict[str, str]
RAN = ("device", "hardware", "torch", "commit", "date")  # `provenance`; the commit is that of the run
OF_THE_MACHINE = ("data.root", "data.workers", "data.pack", "hardware")
FAILURES = (ValueError, TypeError, RuntimeError, OSError, ArithmeticError)


def told(settings: Iterable[str]) -> str:
    """What was set for every run and means something elsewhere; of a file only its name."""
    kept = (text for text in settings if not text.startswith(OF_THE_MACHINE))
    return " ".join(sorted(re.sub(r"=.*/", "=", text) for text in kept))


@dataclass(frozen=True)
class Rows:
    """The rows of a file, each of a name and a seed.

    Attributes:
        path: of the file.
        kind: the column of the names, such as "loss".
        names: all there are, in the order of the rows; seeds of a name stand together.
        ends: the last columns.
    """

    path: Path
    kind: str
    names: Sequence[str]
    ends: Sequence[str]

    def read(self) -> list[Row]:
        """That a former command wrote; none where there was none."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="") as file:
            return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]

    def add(self, new: Row) -> None:
        """In place of the row of the same name and seed; the file is written whole or not at all."""
        rows = [row for row in self.read() if self._key(row) != self._key(new)] + [new]
        rows.sort(key=lambda row: (list(self.names).index(row[self.kind]), int(row["seed"])))
        found = dict.fromkeys(key for row in rows for key in row)
        columns = [*(name for name in found if name not in self.ends), *self.ends]
        with whole_file(self.path) as temporary, open(temporary, "w", newline="") as file:
            table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            table.writeheader()
            table.writerows(rows)

    def fill(
        self,
        asked: Iterable[tuple[str, int]],
        is_done: Callable[[Row], bool],
        row_of: Callable[[str, int], Row],
    ) -> list[str]:
        """Measures each name and seed that has no row yet that is done; gives those that failed, which are told."""
        ran = provenance("cuda" if torch.cuda.is_available() else "cpu")
        failed = []
        for name, seed in asked:
            if any(self._key(row) == (name, str(seed)) and is_done(row) for row in self.read()):
                continue
            torch.compiler.reset()  # what was compiled for the model of one run would be guarded against the next
            try:
                new = ran | row_of(name, seed)
            except FAILURES as error:
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                failed.append(f"{name} {seed}")
                continue
            print("  ".join(f"{key} {value}" for key, value in new.items() if value), flush=True)
            self.add(new)
        return failed

    def _key(self, row: Row) -> tuple[str, str]:
        return row[self.kind], row["seed"]
