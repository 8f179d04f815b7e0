"""What `roadmap embed` and `roadmap evaluate` say of a model, its pictures and the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from roadmap.data import Records
from roadmap.encoder import Encoder
from roadmap.evaluation.facts import class_count

SHOWN = 3  # skipped pictures that are named


def print_start(encoder: Encoder, records: Records, parts: Sequence[Records], read: str) -> None:
    """What is about to be looked at, by what, and what was decided."""
    counted = ", searched in ".join(_count(part) for part in parts)
    crop = encoder.crop
    cut = "" if crop.resize == crop.size else f" from the middle of {crop.resize}"
    model = f"{encoder.model.settings.name}, {encoder.model.dim} dimensions, {encoder.weights}"
    typer.echo(f"model      {encoder.name}: {model}")
    root, here = records.root.absolute(), Path.cwd()
    where = root.relative_to(here) if root.is_relative_to(here) else root
    typer.echo(f"pictures   {records.name}: {counted}, in {where}")
    typer.echo(f"read       {read}")
    typer.echo(f"computed   {crop.size} pixels{cut}, on {encoder.device}, precision {encoder.precision}")
    for note in records.notes:
        typer.echo(f"  - {note}")


def print_rate(pictures: int, seconds: float, skipped: Mapping[str, str]) -> None:
    """How long it took and what was left out."""
    typer.echo(f"embedded   {pictures:,} pictures in {seconds:.1f} s, {pictures / max(seconds, 1e-9):,.0f} a second")
    if skipped:
        more = ", ..." if len(skipped) > SHOWN else ""
        many = f"{len(skipped):,} picture{'' if len(skipped) == 1 else 's'} that could not be decoded"
        typer.echo(f"left out   {many}: {', '.join([*skipped][:SHOWN])}{more}")


def print_metrics(title: str, metrics: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        share = not isinstance(value, int)  # counts are int, everything else lies between 0 and 1
        table.add_row(name, ("-" if math.isnan(value) else f"{100 * value:.2f} %") if share else f"{value:,}")
    typer.echo(title)
    Console().print(table)


def readable_size(size: float) -> str:
    """Bytes for a person: 1.3 MB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def dataset_name(encoder: Encoder, data: str | None) -> str:
    """The kind of dataset that was asked for, or that of the run."""
    return data or ("" if encoder.run is None else encoder.run.settings().data.name)


def _count(records: Records) -> str:
    known = class_count(records)
    return f"{len(records):,}{f' of {known:,} classes' if known else ''}"
