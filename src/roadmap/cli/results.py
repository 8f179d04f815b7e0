"""What `roadmap evaluate` measured, as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from roadmap.atomic import whole_file

if TYPE_CHECKING:
    from roadmap.data import Records
    from roadmap.embeddings import Embeddings


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured.

    Attributes:
        title: of the table.
        metrics: name -> value.
        facts: what else belongs into the JSON file.
        embedded: of a model, the pictures and their vectors: queries and, where there is one, the gallery.
    """

    title: str
    metrics: dict[str, float]
    facts: dict[str, Any]
    embedded: tuple[tuple[Records, Embeddings], ...] = ()

    def show(self) -> None:
        """Prints the table."""
        from rich.console import Console
        from rich.table import Table

        table = Table("metric")
        table.add_column("value", justify="right")
        for name, value in self.metrics.items():
            share = not isinstance(value, int)  # counts are int, everything else lies between 0 and 1
            table.add_row(name, ("-" if math.isnan(value) else f"{100 * value:.2f} %") if share else f"{value:,}")
        typer.echo(self.title)
        Console().print(table)

    def write_json(self, path: Path) -> None:
        """Writes the metrics and the facts, whole or not at all."""
        content = json.dumps({**self.facts, "metrics": self.metrics})
        finite = json.loads(content, parse_constant=lambda _: None)  # JSON has no NaN: a mean over no query is null
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            Path(temporary).write_text(json.dumps(finite, indent=2) + "\n")
        typer.echo(f"wrote      {path}")


def sizes(queries: Embeddings, items: Embeddings | None = None) -> str:
    """How many vectors of how many dimensions search where, in words."""
    among = "among themselves" if items is None else f"against {len(items):,}"
    return f"{len(queries):,} x {queries.vectors.shape[1]} {among}"
