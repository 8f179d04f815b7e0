"""retrieval-SfM-120k: 3D models are classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from roadmap.data.datasets.sources import home
from roadmap.data.records import Records, numbers_of
from roadmap.plain_pickle import plain_content

LISTS = "retrieval-SfM-120k.pkl"
SHORTEST_ID = 6  # characters that name the folders


def sfm120k_records(root: Path) -> Records:
    """Records of the published pickle; pictures lie in ims/ by the last characters of their id."""
    folder = home("sfm120k", root, LISTS)
    ids: list[str] = []
    models: list[str] = []
    splits: list[str] = []
    for split, (cids, clusters) in _lists(folder / LISTS).items():
        ids += cids
        models += [f"{split}/{cluster}" for cluster in clusters]  # models are never shared by the two splits
        splits += [split] * len(cids)
    labels, class_names = numbers_of(models)
    return Records(
        "sfm120k", folder, tuple(picture_path(cid) for cid in ids), labels, class_names, splits=np.asarray(splits)
    )


def picture_path(cid: str) -> str:
    """ims/EF/CD/AB/...ABCDEF: the folders are the last characters of the id, in pairs, from the end."""
    return f"ims/{cid[-2:]}/{cid[-4:-2]}/{cid[-6:-4]}/{cid}"


def _lists(file: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Split -> ids of its pictures, and the 3D model of each; a file of another shape is refused."""
    content = plain_content(file)
    if not isinstance(content, dict) or not {"train", "val"} <= set(content):
        raise ValueError(f"{file} must hold a dict with 'train' and 'val'")
    lists = {}
    for split in ("train", "val"):
        try:
            cids = [str(cid) for cid in content[split]["cids"]]
            clusters = _whole_numbers(content[split]["cluster"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: {split} must be a dict with lists 'cids' and 'cluster' ({error!r})") from error
        if len(cids) != len(clusters):
            raise ValueError(f"{file}: {split} has {len(cids)} pictures but {len(clusters)} clusters")
        if odd := [cid for cid in cids if len(cid) < SHORTEST_ID or "/" in cid or ".." in cid]:
            raise ValueError(f"{file}: {split} names a picture {odd[0][:40]!r}, which is no id")
        lists[split] = cids, clusters
    return lists


def _whole_numbers(values: Any) -> list[int]:
    numbers = np.asarray(values).ravel()
    if numbers.size and (numbers.dtype.kind not in "iuf" or (numbers != np.floor(numbers)).any()):
        raise ValueError("not whole numbers")
    whole: list[int] = numbers.astype(np.int64).tolist()
    return whole
