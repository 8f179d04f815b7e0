"""Published numbers, read from `published.csv`: the rows of the paper's tables (Ramzi et al., NeurIPS 2021), and what
the authors of its baselines report themselves where that is another number."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# The comment of a recipe names its numbers: "Published: cub resnet50, Tables 1, 3"; of one method "...; rows MIC".
REFERENCE = re.compile(r"Published: ([\w ]+) (\w+), (?:Tables? )?([\w, ]+)(?:; rows ([\w, ]+))?$")


@dataclass(frozen=True)
class Number:
    """One number, as printed.

    Attributes:
        table: of the paper, "1" to "10", or figure, "fig4a"; "authors" for what those of a baseline report themselves;
            or "yardstick", which is not published but was measured independently.
        row: the loss by its name here, or what the paper calls a method that is not here.
        dataset, backbone: "cub", "resnet50" (512 dimensions), "resnet50 2048-d", "deit".
        batch_size: None where the paper prints none.
        metric: as an evaluation calls it, such as "R@1".
        value: in percent, with the digits that were printed.
        spread: standard deviation over runs, as printed; empty for a single run.
        source: whose run it was.
    """

    table: str
    row: str
    dataset: str
    backbone: str
    batch_size: int | None
    metric: str
    value: str
    spread: str
    source: str

    @property
    def text(self) -> str:
        """Such as "64.05 ± 0.51"."""
        return f"{self.value} ± {self.spread}" if self.spread else self.value

    @property
    def runs(self) -> int:
        """How many it is the mean of."""
        told = re.search(r"(\d) seeds", self.source)
        return int(told[1]) if told else 5 if "five runs" in self.source else 1


@cache
def numbers() -> tuple[Number, ...]:
    """All of them, table by table."""
    text = files("roadmap.experiments").joinpath("published.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(Number(**(row | {"batch_size": int(row["batch_size"] or 0) or None})) for row in rows)  # type: ignore[arg-type]


def numbers_of(comment: Iterable[str]) -> list[Number]:
    """The numbers that the opening comment of a recipe names; none where it names none."""
    for line in comment:
        if found := REFERENCE.fullmatch(line):
            datasets, backbone, tables = found[1].split(), found[2], re.findall(r"\w+", found[3])
            rows = None if found[4] is None else found[4].split(", ")
            return [
                number
                for number in numbers()
                if number.table in tables
                and number.dataset in datasets
                and number.backbone.split()[0] == backbone
                and (rows is None or number.row in rows)
            ]
    return []


def lines_of(comment: Iterable[str]) -> list[str]:
    """The same, a line for each row of a table, for a person to read."""
    rows: dict[tuple[object, ...], list[Number]] = {}
    for number in numbers_of(comment):
        rows.setdefault((number.table, number.batch_size, number.row, number.backbone), []).append(number)
    return [_line(row) for row in rows.values()]


def _line(row: Sequence[Number]) -> str:
    first = row[0]
    several = len({number.dataset for number in row}) > 1
    values = [f"{number.dataset + ' ' if several else ''}{number.metric} {number.text}" for number in row]
    table = f"Table {first.table}" if first.table.isdigit() else re.sub(r"^fig", "Fig. ", first.table)
    batch = "" if first.batch_size is None else f", batch {first.batch_size}"
    wide = "".join(f", {rest}" for rest in first.backbone.split()[1:])
    return f"{table}{batch}{wide}: {first.row}  {', '.join(values)}  ({first.source})"
