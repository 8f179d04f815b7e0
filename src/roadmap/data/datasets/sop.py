"""Stanford Online Products: products are classes, the 12 kinds of product are categories."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home, ranks, rows
from roadmap.data.records import Records
from roadmap.data.trees import tree_over_classes


def sop_records(root: Path) -> Records:
    """Records of Stanford_Online_Products/, split by its own two lists."""
    folder = home("sop", root, "Ebay_train.txt")
    listed = {split: rows(folder / f"Ebay_{split}.txt", 4, header=1) for split in ("train", "test")}
    lines = [line for split in listed.values() for line in split]  # image_id class_id super_class_id path
    classes, categories = [int(line[1]) for line in lines], [int(line[2]) for line in lines]
    class_place, category_place = ranks(classes), ranks(categories)
    category_names = [""] * len(category_place)
    for line, category in zip(lines, categories, strict=True):
        category_names[category_place[category]] = line[3].split("/")[0].removesuffix("_final")
    labels, class_names = np.asarray([class_place[c] for c in classes], dtype=np.int64), tuple(map(str, class_place))
    above = dict(zip(classes, (category_names[category_place[c]] for c in categories), strict=True))
    return Records(
        name="sop",
        root=folder,
        paths=tuple(line[3] for line in lines),
        labels=labels,
        class_names=class_names,
        categories=np.asarray([category_place[c] for c in categories], dtype=np.int64),
        category_names=tuple(category_names),
        splits=np.repeat(["train", "test"], [len(listed["train"]), len(listed["test"])]),
        tree=tree_over_classes({"category": [above[c] for c in class_place]}, labels, class_names, "product"),
    )
