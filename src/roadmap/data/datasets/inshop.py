"""DeepFashion In-Shop: garments are classes; queries and gallery are separate."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import explanation, home, present, rows
from roadmap.data.records import Records, numbers_of

PARTITIONS = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
BOXES = ("Anno/list_bbox_inshop.txt", "list_bbox_inshop.txt")


def inshop_records(root: Path) -> Records:
    """Records of the benchmark's folder. Categories are the folders: WOMEN/Dresses and so on."""
    folder = home("inshop", root, *PARTITIONS)
    partition = next(p for name in PARTITIONS if (p := present(folder / name)))
    lines = rows(partition, 3, header=2)  # a count, then: image_name item_id evaluation_status
    names = [line[0] for line in lines]
    labels, class_names = numbers_of([line[1] for line in lines])
    categories, category_names = numbers_of(["/".join(name.split("/")[1:3]) for name in names])
    boxes = None
    if found := next((p for name in BOXES if (p := present(folder / name))), None):
        # image_name clothes_type pose_type x_1 y_1 x_2 y_2
        box_of = {row[0]: [float(x) for x in row[3:]] for row in rows(found, 7, header=2)}
        boxes = np.asarray([box_of.get(name, [np.nan] * 4) for name in names])
    prefix = _pictures_below(folder)
    return Records(
        "inshop",
        folder,
        tuple(prefix + name for name in names),
        labels,
        class_names,
        categories,
        category_names,
        boxes,
        splits=np.asarray([line[2] for line in lines]),
    )


def _pictures_below(folder: Path) -> str:
    """The lists say img/...; the archive unpacks to Img/img/, people also keep img/ at the top."""
    for prefix in ("Img/", ""):
        if (folder / prefix / "img").is_dir():
            return prefix
    raise FileNotFoundError(f"no Img/img/ in {folder}. {explanation('inshop')}")
