"""What a report shows of a model on a test set beside the run's own evaluation: computed once, kept with the run.

RUN/report/TEST.json         how scores are spread, precision at every rank, and the map; before and after training
RUN/report/TEST-before.npz   the evaluation of the model before training

They are computed again when the checkpoint, the evaluation or this program's way of doing it changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roadmap.atomic import whole_file
from roadmap.data import Pack, Records
from roadmap.data.records import Floats, Ints
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.evaluation import Evaluation, evaluate, recall_ks
from roadmap.evaluation.neighbours import nearest_items
from roadmap.evaluation.sides import search_of
from roadmap.metrics.vectors import unit_vectors
from roadmap.report.mapping import flat_map, sample
from roadmap.report.scores import ScoreCounts, precisions_at_ranks, score_counts

VERSION = 2
RANKS = 100  # answers of each query that precision is looked at among


@dataclass(frozen=True, eq=False)
class Measures:
    """Of one model on the queries and the gallery of a test set.

    Attributes:
        counts: how the scores of pairs are spread.
        precisions: (2, K) mean precision among the first 1..K answers, and the best possible.
        places: (S,) the queries on the map.
        flat: (S, 2) where they lie.
        how: the map was made, in words.
    """

    counts: ScoreCounts
    precisions: Floats
    places: Ints
    flat: Floats
    how: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        arrays = {name: getattr(self, name).tolist() for name in ("precisions", "places", "flat")}
        return {"counts": self.counts.as_dict(), "how": self.how, **arrays}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measures:
        """What `as_dict` described."""
        return cls(
            ScoreCounts.from_dict(values["counts"]),
            np.asarray(values["precisions"], dtype=np.float64),
            np.asarray(values["places"], dtype=np.int64),
            np.asarray(values["flat"], dtype=np.float64).reshape(-1, 2),
            str(values["how"]),
        )


@dataclass(frozen=True, eq=False)
class Sides:
    """Queries and what they are searched in, as unit vectors; `own` and `classes` as in `score_counts`."""

    queries: Tensor
    gallery: Tensor
    own: Tensor
    classes: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, queries: Embeddings, gallery: Embeddings | None) -> Sides:
        """None: the queries search one another."""
        found = search_of(queries, gallery, None)
        q = unit_vectors(found.queries.vectors, "queries")
        g = q if found.alone else unit_vectors(found.gallery.vectors, "gallery")
        return cls(q, g, found.own.to(q.device), found.classes)


def measures_of(sides: Sides, labels: Ints, alpha: float, beta: float, progress: bool | None = None) -> Measures:
    """Everything of `Measures` from vectors.

    Args:
        sides: queries and gallery.
        labels: (M,) of the queries, for the choice of those on the map.
        alpha, beta: thresholds of the scores.
        progress: show bars; None: where a person watches and it takes long.
    """
    counts = score_counts(sides.queries, sides.gallery, sides.own, sides.classes, alpha, beta, progress)
    there = len(sides.gallery) - int((sides.own >= 0).any())
    ranks = max(1, min(RANKS, there))
    found, _ = nearest_items(sides.queries, sides.gallery, sides.own, sides.classes, ranks, "pessimistic")
    right = sides.classes[1][found.clamp(min=0)] == sides.classes[0][:, None]
    precisions = precisions_at_ranks(found.cpu(), right.cpu(), _positives(sides).cpu())
    places = sample(labels)
    flat, how = flat_map(sides.queries[torch.from_numpy(places).to(sides.queries.device)].float().cpu().numpy())
    return Measures(counts, precisions, places, flat, how)


def _positives(sides: Sides) -> Tensor:
    """(M,) how many items of its class each query has to find."""
    labels, counts = torch.unique(sides.classes[1], return_counts=True)
    at = torch.searchsorted(labels, sides.classes[0]).clamp(max=len(labels) - 1)
    found = torch.where(labels[at] == sides.classes[0], counts[at], 0)
    itself = (sides.own >= 0) & (sides.classes[1][sides.own.clamp(min=0)] == sides.classes[0])
    return found - itself.to(torch.int64)


def embeddings_of_test(
    encoder: Encoder, records: Records, pack: Pack | None, progress: bool | None
) -> list[Embeddings]:
    """The queries of a test set and, where it has one, its gallery."""
    parts = [part for part in records.evaluation() if part is not None]
    return [encoder.embed(part, pack=pack, on_error="skip", progress=progress) for part in parts]


def evaluation_of(parts: list[Embeddings], name: str) -> Evaluation:
    """What the vectors achieve, by the protocol of the dataset."""
    return evaluate(parts[0], parts[1] if len(parts) > 1 else None, ks=recall_ks(name), progress=False)


def stamp(*files: Path, **others: Any) -> str:
    """What the kept numbers were computed from: other files or values, another stamp."""
    digest = hashlib.sha256(json.dumps({"version": VERSION, "ranks": RANKS, **others}, sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def save(folder: Path, test: str, stamped: str, measures: Mapping[str, Measures], before: Evaluation | None) -> None:
    """Keeps what was computed, each file whole or not at all; the one with the stamp is written last."""
    folder.mkdir(exist_ok=True)
    if before is not None:
        before.save(folder / f"{test}-before.npz")
    values = {"stamp": stamped, **{name: value.as_dict() for name, value in measures.items()}}
    with whole_file(folder / f"{test}.json") as temporary:
        Path(temporary).write_text(json.dumps(values))


def load(folder: Path, test: str, stamped: str) -> tuple[dict[str, Measures], Evaluation | None]:
    """What `save` kept under the same stamp; nothing where it is another, or cannot be read."""
    try:
        values = json.loads((folder / f"{test}.json").read_text())
        if values.pop("stamp") != stamped:
            return {}, None
        found = {name: Measures.from_dict(value) for name, value in values.items()}
        return found, Evaluation.load(folder / f"{test}-before.npz") if "before" in found else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}, None
