"""A model, its pictures and what was measured, as lines of text."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from roadmap.data import Records
from roadmap.encoder import Encoder
from roadmap.evaluation import Evaluation
from roadmap.evaluation.facts import class_count

SHOWN = 3  # skipped pictures that are named


def plan(encoder: Encoder, records: Records, parts: Sequence[Records], read: str) -> Iterator[str]:
    """What is about to be looked at, by what, and what was decided.

    Args:
        encoder: of the model.
        records: with their notes.
        parts: of them: what is embedded; or queries and what they are searched in.
        read: where the pixels come from.
    """
    crop, root, here = encoder.crop, records.root.absolute(), Path.cwd()
    counted = ", searched in ".join(_count(part) for part in parts)
    cut = "" if crop.resize == crop.size else f" from the middle of {crop.resize}"
    model = f"{encoder.model.settings.name}, {encoder.model.dim} dimensions, {encoder.weights}"
    yield f"model      {encoder.name}: {model}"
    yield f"pictures   {records.name}: {counted}, in {root.relative_to(here) if root.is_relative_to(here) else root}"
    yield f"read       {read}"
    yield f"computed   {crop.size} pixels{cut}, on {encoder.device}, precision {encoder.precision}"
    for note in records.notes:
        yield f"  - {note}"


def rate(pictures: int, seconds: float, skipped: Mapping[str, str]) -> Iterator[str]:
    """How long it took and what was left out."""
    yield f"embedded   {pictures:,} pictures in {seconds:.1f} s, {pictures / max(seconds, 1e-9):,.0f} a second"
    if skipped:
        more = ", ..." if len(skipped) > SHOWN else ""
        many = f"{len(skipped):,} picture{'' if len(skipped) == 1 else 's'} that could not be decoded"
        yield f"left out   {many}: {', '.join([*skipped][:SHOWN])}{more}"


def metrics_table(evaluation: Evaluation) -> str:
    """Title, remarks on what was compared, and a table; shares in percent."""
    from rich.console import Console
    from rich.table import Table

    table = Table("metric")
    table.add_column("value", justify="right")
    for name, value in evaluation.metrics.items():
        share = not isinstance(value, int)  # counts are int, everything else lies between 0 and 1
        table.add_row(name, ("-" if math.isnan(value) else f"{100 * value:.2f} %") if share else f"{value:,}")
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    notes = [f"  - {note}" for note in evaluation.facts.get("notes", ())]
    return "\n".join([*notes, evaluation.title, text.getvalue().rstrip("\n")])


def readable_size(size: float) -> str:
    """Bytes for a person: 1.3 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _count(records: Records) -> str:
    known = class_count(records)
    return f"{len(records):,}{f' of {known:,} classes' if known else ''}"
