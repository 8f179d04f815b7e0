"""`roadmap evaluate` of a model: its pictures are embedded, and searched as their dataset says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import typer

from roadmap.cli.options import Asked
from roadmap.cli.results import Evaluation, sizes
from roadmap.cli.sources import Source, classes, source
from roadmap.data import Records
from roadmap.embeddings import Embeddings
from roadmap.evaluation import dataset_evaluation, recall_ks
from roadmap.report import Collection, retrieval_page


def evaluate_model(asked: Asked, ks: tuple[int, ...] | None, out: Path | None, page: Path | None) -> None:
    """Embeds, measures, prints; writes what is wanted.

    Args:
        asked: the model and the pictures.
        ks: of Recall@k; None for the dataset's own.
        out: JSON file.
        page: HTML file with queries and what they retrieve.
    """
    found = source(asked)
    records = _test_set(found)
    if records.ground_truth and (ks is not None or page is not None):
        raise ValueError(f"{records.name} has easy, hard and junk answers and no classes: leave --ks and --page out")
    result = _evaluation(found, records, recall_ks(found.data.name) if ks is None else ks)
    result.show()
    if out is not None:
        result.write_json(out)
    if page is not None:
        _write_page(page, found, result)
    elif not records.ground_truth:
        typer.echo("next       add --page FILE.html to see queries and what they retrieve")


def _evaluation(found: Source, records: Records, ks: tuple[int, ...]) -> Evaluation:
    """By the protocol of the dataset."""
    parts = [part for part in records.evaluation() if part is not None]
    found.announce(*parts)
    vectors: list[Embeddings] = []

    def embedded(part: Records) -> Embeddings:
        vectors.append(found.embeddings(part))
        return vectors[-1]

    values = dataset_evaluation(records, embedded, ks)
    found.report()
    pairs = tuple(zip(parts, vectors, strict=True))
    facts = _facts(found, pairs)
    facts["settings"]["ks"] = None if records.ground_truth else list(ks)
    return Evaluation(f"{found.named.name} on {records.name}: {sizes(*vectors)}", values, facts, pairs)


def _test_set(found: Source) -> Records:
    """The pictures of the protocol. Own pictures without a test set are all taken, and it is said."""
    records = found.records
    found.notes += found.division
    if classes(records) == 1:
        found.notes += ("all pictures are of one class: every answer is right, which says nothing of the model",)
    if {"test", "query"} & set(records.split_names()) or not found.own:
        found.notes += _changed_since(found)
        return records
    found.notes += (
        f"{records.name} has no test set: all {len(records):,} pictures search one another. A model that was trained "
        "on some of them looks better than it is",
    )
    return dataclasses.replace(records, splits=np.full(len(records), "test"))


def _changed_since(found: Source) -> tuple[str, ...]:
    """A warning where a run divided its pictures itself and there are others by now: the draw depends on them all."""
    if not found.division or found.named.run is None:
        return ()
    tested = found.named.run.summary().get("after", {}).get(found.records.name, {}).get("queries")
    now = len(found.records.split("test"))
    if tested in (None, now):
        return ()
    return (
        f"the pictures changed since the run, which tested on {tested:,} and not {now:,}: the model may have been "
        "trained on some of these. Lay them out below train/ and test/ to keep a test set fixed",
    )


def _facts(found: Source, embedded: tuple[tuple[Records, Embeddings], ...]) -> dict[str, Any]:
    model, (queries, vectors) = found.named, embedded[0]
    return {
        "model": {
            "name": model.name,
            "architecture": model.architecture,
            "weights": model.weights,
            "dimensions": vectors.vectors.shape[1],
            "checkpoint": None if model.checkpoint is None else str(model.checkpoint),
            "about": model.about,
        },
        "data": {
            "name": found.data.name,
            "root": found.data.root,
            "queries": len(vectors),
            "gallery": len(embedded[1][1]) if len(embedded) > 1 else None,
            "classes": classes(queries),
            "skipped": found.skipped,
            "notes": list(found.notes),
        },
        "settings": found.settings(),
    }


def _write_page(path: Path, found: Source, result: Evaluation) -> None:
    name = found.named.name
    asked, *searched = (
        Collection({name: vectors.to("cpu")}, part, found.decoded(part)) for part, vectors in result.embedded
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{name} on {found.records.name}"
    retrieval_page(path, title, asked, searched[0] if searched else None, metrics={name: result.metrics})
    typer.echo(f"wrote      {path}: queries and what they retrieve, for a browser")
