"""retrieval-SfM-120k: 3D models are classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roadmap.data.datasets.sources import home
from roadmap.data.records import Records, numbered
from roadmap.plain_pickle import plain_pickle

LISTS = "retrieval-SfM-120k.pkl"


def sfm120k(root: Path) -> Records:
    """Records of the published pickle; pictures lie in ims/ by the last characters of their id."""
    folder = home("sfm120k", root, LISTS)
    lists = plain_pickle(folder / LISTS)
    if not isinstance(lists, dict) or not {"train", "val"} <= set(lists):
        raise ValueError(f"{folder / LISTS} must hold a dict with 'train' and 'val'")
    ids: list[str] = []
    models: list[str] = []
    splits: list[str] = []
    for split in ("train", "val"):
        part = lists[split]
        cids, clusters = [str(cid) for cid in part["cids"]], [int(c) for c in np.asarray(part["cluster"]).ravel()]
        if len(cids) != len(clusters):
            raise ValueError(f"{folder / LISTS}: {split} has {len(cids)} pictures but {len(clusters)} clusters")
        ids += cids
        models += [f"{split}/{cluster}" for cluster in clusters]  # models are never shared by the two splits
        splits += [split] * len(cids)
    labels, class_names = numbered(models)
    return Records("sfm120k", folder, tuple(hashed(cid) for cid in ids), labels, class_names, splits=np.asarray(splits))


def hashed(cid: str) -> str:
    """ims/EF/CD/AB/...ABCDEF: the folders are the last characters of the id, in pairs, from the end."""
    return f"ims/{cid[-2:]}/{cid[-4:-2]}/{cid[-6:-4]}/{cid}"
