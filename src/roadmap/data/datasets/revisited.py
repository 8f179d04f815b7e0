"""Revisited Oxford and Paris: 70 queries, cut to their boxes, against a gallery with easy, hard and junk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home
from roadmap.data.records import UNLABELLED, Floats, Ints, Records, numbers_of
from roadmap.plain_pickle import plain_content

RELEVANCE = ("easy", "hard", "junk")


def roxford5k_records(root: Path) -> Records:
    """Records of ROxford5k."""
    return _landmark_records("roxford5k", root)


def rparis6k_records(root: Path) -> Records:
    """Records of RParis6k."""
    return _landmark_records("rparis6k", root)


def _landmark_records(name: str, root: Path) -> Records:
    file = f"gnd_{name}.pkl"
    folder = home(name, root, file)
    queries, gallery, truth, boxed = _ground_truth(folder / file)
    landmarks, class_names = numbers_of([query.rsplit("_", 1)[0] for query in queries])
    boxes = np.full((len(queries) + len(gallery), 4), np.nan)
    boxes[: len(queries)] = boxed
    return Records(
        name=name,
        root=folder,
        paths=tuple(f"jpg/{picture}.jpg" for picture in [*queries, *gallery]),
        labels=np.concatenate([landmarks, np.full(len(gallery), UNLABELLED)]),
        class_names=class_names,
        boxes=boxes,
        crop=True,
        splits=np.repeat(["query", "gallery"], [len(queries), len(gallery)]),
        ground_truth=truth,
    )


def _ground_truth(file: Path) -> tuple[list[str], list[str], tuple[dict[str, Ints], ...], Floats]:
    """Names of queries and gallery, relevance and box of every query; a file of another shape is refused."""
    content = plain_content(file)
    try:
        queries, gallery = ([str(name) for name in content[part]] for part in ("qimlist", "imlist"))
        truth = tuple(
            {k: np.asarray(entry[k], dtype=np.int64).reshape(-1) for k in RELEVANCE} for entry in content["gnd"]
        )
        boxes = np.asarray([entry["bbx"] for entry in content["gnd"]], dtype=np.float64).reshape(-1, 4)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not the ground truth of revisited landmarks ({error!r}): expected a dict with qimlist, imlist, "
            "and gnd, a list of dicts with bbx, easy, hard and junk"
        ) from error
    if not len(queries) == len(truth) == len(boxes):
        raise ValueError(f"{file}: {len(queries)} queries but ground truth for {len(truth)}")
    far = [entry[k] for entry in truth for k in RELEVANCE if np.any((entry[k] < 0) | (entry[k] >= len(gallery)))]
    if far:
        raise ValueError(f"{file} names a picture {far[0].max()} of a gallery of {len(gallery)}")
    return queries, gallery, truth, boxes
