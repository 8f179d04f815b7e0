"""Cars196: classes 1-98 train, 99-196 test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from roadmap.data.datasets.sources import home, ranks
from roadmap.data.records import Records

LAST_TRAINING_CLASS = 98
ALL = "cars_annos.mat"
DEVKIT = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "devkit/cars_test_annos_withlabels.mat"}
DEVKIT_BESIDE = {"cars_test": "cars_test_annos_withlabels.mat"}  # published apart from the devkit


def cars_records(root: Path) -> Records:
    """Records from cars_annos.mat and car_ims/, or from the devkit, cars_train/ and cars_test/."""
    folder = home("cars", root, ALL, DEVKIT["cars_train"])
    if (folder / ALL).is_file():
        mat = _mat(folder / ALL)
        pictures = [(str(a.relative_im_path), a) for a in mat["annotations"]]
        names = mat["class_names"]
    else:
        pictures = []
        for inner, file in DEVKIT.items():
            path = folder / DEVKIT_BESIDE.get(inner, file)
            path = path if path.is_file() else folder / file
            pictures += [(f"{inner}/{a.fname}", a) for a in _mat(path)["annotations"]]
        names = _mat(folder / "devkit/cars_meta.mat")["class_names"]
    ids = [int(_field(a, "class")) for _, a in pictures]
    place = ranks(ids)
    edges = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
    return Records(
        name="cars",
        root=folder,
        paths=tuple(path for path, _ in pictures),
        labels=np.asarray([place[i] for i in ids], dtype=np.int64),
        class_names=tuple(str(np.atleast_1d(names)[i - 1]) for i in place),
        boxes=np.asarray([[float(_field(a, edge)) for edge in edges] for _, a in pictures]),
        splits=np.where(np.asarray(ids) <= LAST_TRAINING_CLASS, "train", "test"),
    )


def _field(annotation: Any, name: str) -> Any:
    return getattr(annotation, name)  # a method for `class`, which Python keeps for itself


def _mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f"reading {path} needs scipy: pip install 'roadmap-retrieval[data]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    mat: dict[str, Any] = loadmat(str(path), squeeze_me=True, struct_as_record=False)
    return mat | {"annotations": np.atleast_1d(mat["annotations"])} if "annotations" in mat else mat
