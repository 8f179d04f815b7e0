"""CUB-200-2011, zero-shot: classes 1-100 train, 101-200 test, as the paper has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home, present, ranks, rows
from roadmap.data.records import Records

LAST_TRAINING_CLASS = 100


def cub_records(root: Path) -> Records:
    """Records of CUB_200_2011/. Its train_test_split.txt is for classification and is not used."""
    folder = home("cub", root, "images.txt")
    names = dict(rows(folder / "images.txt", 2))
    class_of = {picture: int(label) for picture, label in rows(folder / "image_class_labels.txt", 2)}
    unlabelled = [picture for picture in names if picture not in class_of]
    if unlabelled:
        raise ValueError(f"{folder}/image_class_labels.txt has no class for picture {unlabelled[0]} of images.txt")
    ids = [class_of[picture] for picture in names]
    place = ranks(ids)
    class_names = [""] * len(place)
    for picture, path in names.items():
        class_names[place[class_of[picture]]] = path.split("/")[0]
    boxes = None
    if present(folder / "bounding_boxes.txt"):
        box_of = {row[0]: [float(x) for x in row[1:]] for row in rows(folder / "bounding_boxes.txt", 5)}
        boxes = np.asarray([box_of.get(picture, [np.nan] * 4) for picture in names])
        boxes[:, 2:] += boxes[:, :2]  # x, y, width, height in the file
    return Records(
        name="cub",
        root=folder,
        paths=tuple(f"images/{path}" for path in names.values()),
        labels=np.asarray([place[i] for i in ids], dtype=np.int64),
        class_names=tuple(class_names),
        boxes=boxes,
        splits=np.where(np.asarray(ids) <= LAST_TRAINING_CLASS, "train", "test"),
    )
