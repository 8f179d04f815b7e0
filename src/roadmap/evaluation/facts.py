"""What was measured on what, by what and how, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roadmap.data import UNLABELLED, Pack, Records, VectorPack
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder


def facts_of_vectors(
    queries: Embeddings, gallery: Embeddings | None, ties: str, notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "title": f"{queries.about.get('name', 'vectors')}: {sizes(queries, gallery)}",
        "queries": dict(queries.about),
        "gallery": None if gallery is None else dict(gallery.about),
        "vectors": len(queries),
        "dimensions": queries.vectors.shape[1],
        "ties": ties,
        "notes": list(notes),
    }


def facts_of_model(
    encoder: Encoder,
    records: Records,
    parts: Sequence[Embeddings],
    pack: Pack | VectorPack | None,
    ks: Sequence[int] | None,
    ties: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    queries, gallery = parts[0], parts[1] if len(parts) > 1 else None
    return {
        "title": f"{encoder.name} on {records.name}: {sizes(queries, gallery)}",
        "model": {
            "name": encoder.name,
            "architecture": encoder.model.settings.name,
            "weights": encoder.weights,
            "dimensions": queries.vectors.shape[1],
            "checkpoint": None if encoder.checkpoint is None else str(encoder.checkpoint),
            "digest": queries.about["model"],
            "about": encoder.about,
        },
        "data": {
            "name": records.name,
            "root": str(records.root.resolve()),
            "read": "files, decoded" if pack is None else pack.origin,
            "queries": len(queries),
            "gallery": None if gallery is None else len(gallery),
            "classes": class_count(records.evaluation()[0]),
            "skipped": {path: why for part in parts for path, why in part.about["skipped"].items()},
            "notes": list(notes),
        },
        "settings": {
            "image": encoder.crop.size,
            "resize": encoder.crop.resize,
            "side": encoder.side,
            "device": str(encoder.device),
            "precision": encoder.precision,
            "batch": encoder.batch,
            "ties": ties,
            "ks": None if ks is None else list(ks),
        },
    }


def sizes(queries: Embeddings, gallery: Embeddings | None = None) -> str:
    """How many vectors of how many dimensions search where, in words."""
    among = "among themselves" if gallery is None else f"against {len(gallery):,}"
    return f"{len(queries):,} x {queries.vectors.shape[1]} {among}"


def class_count(records: Records) -> int:
    """How many classes there are; pictures without a label belong to none."""
    return len(np.unique(records.labels[records.labels != UNLABELLED]))
