"""CUB-200-2011, zero-shot: classes 1-100 train, 101-200 test, as the paper has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home, present, ranks, rows
from roadmap.data.records import Records
from roadmap.data.trees import tree_over_classes

LAST_TRAINING_CLASS = 100


def cub_records(root: Path) -> Records:
    """Records of CUB_200_2011/. Its train_test_split.txt is for classification and is not used.

    The tree groups species by name, since the lists hold no taxonomy: see `group_by_name`.
    """
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
    labels = np.asarray([place[i] for i in ids], dtype=np.int64)
    groups = {"group": [group_by_name(name) for name in class_names]}
    return Records(
        name="cub",
        root=folder,
        paths=tuple(f"images/{path}" for path in names.values()),
        labels=labels,
        class_names=tuple(class_names),
        boxes=boxes,
        splits=np.where(np.asarray(ids) <= LAST_TRAINING_CLASS, "train", "test"),
        tree=tree_over_classes(groups, labels, class_names, "species"),
    )


def group_by_name(class_name: str) -> str:
    """The last word of a species: "004.Groove_billed_Ani" is an Ani.

    A stand-in for the genus or family, which the lists do not hold. It is close: all Albatrosses, Warblers and
    Sparrows come together. It is not taxonomy: a Waterthrush is no Warbler by name though it is one by family, and
    the Widow of Chuck_will_Widow is alone.
    """
    return class_name.rpartition(".")[2].rpartition("_")[2]
