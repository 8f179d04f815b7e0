"""Revisited Oxford and Paris: 70 queries, cut to their boxes, against a gallery with easy, hard and junk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home
from roadmap.data.records import UNLABELLED, Records, numbered
from roadmap.plain_pickle import plain_pickle

RELEVANCE = ("easy", "hard", "junk")


def roxford5k(root: Path) -> Records:
    """Records of ROxford5k."""
    return _revisited("roxford5k", root)


def rparis6k(root: Path) -> Records:
    """Records of RParis6k."""
    return _revisited("rparis6k", root)


def _revisited(name: str, root: Path) -> Records:
    file = f"gnd_{name}.pkl"
    folder = home(name, root, file)
    published = plain_pickle(folder / file)
    queries, gallery, truth = published["qimlist"], published["imlist"], published["gnd"]
    if len(queries) != len(truth):
        raise ValueError(f"{folder / file}: {len(queries)} queries but ground truth for {len(truth)}")
    landmarks, class_names = numbered([query.rsplit("_", 1)[0] for query in queries])
    boxes = np.full((len(queries) + len(gallery), 4), np.nan)
    boxes[: len(queries)] = [entry["bbx"] for entry in truth]
    return Records(
        name=name,
        root=folder,
        paths=tuple(f"jpg/{picture}.jpg" for picture in [*queries, *gallery]),
        labels=np.concatenate([landmarks, np.full(len(gallery), UNLABELLED)]),
        class_names=class_names,
        boxes=boxes,
        crop=True,
        splits=np.repeat(["query", "gallery"], [len(queries), len(gallery)]),
        ground_truth=tuple({k: np.asarray(entry[k], dtype=np.int64) for k in RELEVANCE} for entry in truth),
    )
