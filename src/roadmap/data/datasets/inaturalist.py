"""iNaturalist 2018 as a retrieval dataset: species are classes, split by species."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from roadmap.data.datasets.sources import home, rows
from roadmap.data.records import Ints, Records, numbers_of
from roadmap.data.trees import Tree, tree_over_classes

LISTS = "Inat_dataset_splits/Inaturalist_{split}_set1.txt"
PICTURES = "train_val2018"
TEST_FRACTION = 0.3
TAXONOMY = ("kingdom", "phylum", "class", "order", "family", "genus")  # above the species, in the annotations


def inaturalist_records(root: Path) -> Records:
    """Records by SmoothAP's lists when they are there; else a 70/30 split of the classes, said aloud.

    SmoothAP's lists name one picture a line, .../KINGDOM/SPECIES/name.jpg, below train_val2018/. The tree has the whole
    taxonomy where train2018.json or categories.json holds it, else the two levels of the folders.
    """
    in_root = LISTS.format(split="train").rsplit("/")[-1]  # some copies lie beside the pictures
    folder = home("inaturalist", root, LISTS.format(split="train"), in_root, "train2018.json")
    lists = LISTS if (folder / LISTS.format(split="train")).is_file() else LISTS.rsplit("/")[-1]
    if (folder / lists.format(split="train")).is_file():
        listed = {s: _list_paths(folder / lists.format(split=s)) for s in ("train", "test")}
        splits = np.repeat(list(listed), [len(paths) for paths in listed.values()])
        return _records(folder, [path for paths in listed.values() for path in paths], splits)
    whole = _records(folder, _annotation_paths(folder), None)
    note = (
        f"{folder} has no {LISTS.format(split='train')}: the classes are split 70/30 by a fixed draw instead of "
        "SmoothAP's, so results are not comparable with published ones"
    )
    warnings.warn(note, stacklevel=2)
    split = whole.split_by_class(test=TEST_FRACTION, seed=0)
    return _records(folder, list(split.paths), split.splits, (note,))


def _list_paths(path: Path) -> list[str]:
    pictures = []
    for (line,) in rows(path, 1):
        parts = PurePosixPath(line).parts
        if len(parts) < 3:
            raise ValueError(f"{path}: expected .../KINGDOM/SPECIES/name.jpg, got {line!r}")
        pictures.append("/".join((PICTURES, *parts[-3:])))
    return pictures


def _annotation_paths(folder: Path) -> list[str]:
    pictures: list[str] = []
    for name in ("train2018.json", "val2018.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing")
        listed = json.loads((folder / name).read_text())["images"]
        pictures += [str(picture["file_name"]) for picture in listed]
    return pictures


def _records(
    folder: Path,
    paths: list[str],
    splits: NDArray[np.str_] | None,
    notes: tuple[str, ...] = (),
) -> Records:
    """The folders say the classes: train_val2018/KINGDOM/SPECIES/name.jpg."""
    labels, class_names = numbers_of([path.split("/")[-2] for path in paths])
    categories, category_names = numbers_of([path.split("/")[-3] for path in paths])
    return Records(
        "inaturalist",
        folder,
        tuple(paths),
        labels,
        class_names,
        categories,
        category_names,
        splits=splits,
        notes=notes,
        tree=_tree(folder, labels, class_names, categories, category_names),
    )


def _tree(
    folder: Path, labels: Ints, class_names: Sequence[str], categories: Ints, category_names: Sequence[str]
) -> Tree:
    """Kingdom, phylum, class, order, family, genus, species; or the folders alone: supercategory, species."""
    known = _taxonomy(folder)
    if all(name in known for name in class_names):
        levels = {rank: [known[name][rank] for name in class_names] for rank in TAXONOMY}
    else:
        _, firsts = np.unique(labels, return_index=True)
        levels = {"supercategory": [category_names[c] for c in categories[firsts]]}
    return tree_over_classes(levels, labels, class_names, "species")


def _taxonomy(folder: Path) -> dict[str, dict[str, str]]:
    """Folder of a species, which is the number of its category -> rank -> name; those that have a rank of all six."""
    for name in ("categories.json", "train2018.json"):
        if not (folder / name).is_file():
            continue
        content = json.loads((folder / name).read_text())
        listed = content["categories"] if isinstance(content, dict) else content
        whole = [entry for entry in listed if all(rank in entry for rank in TAXONOMY)]
        if whole:
            return {str(entry["id"]): {rank: str(entry[rank]) for rank in TAXONOMY} for entry in whole}
    return {}
