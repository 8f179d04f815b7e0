"""Miniature datasets in the layout in which each original archive unpacks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
from PIL import Image

PRODUCTS = ("bicycle", "cabinet", "chair")


def write_picture(path: Path, number: int, size: tuple[int, int] = (24, 18)) -> None:
    """A small picture; every number gives another one."""
    pixels = np.random.Generator(np.random.PCG64(number)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=90)


def cub_layout(parent: Path) -> Path:
    """CUB_200_2011/ with classes 1, 2 (training) and 101 (test), two pictures each."""
    root = parent / "CUB_200_2011"
    names = {1: "001.Albatross", 2: "002.Auk", 101: "101.Wren"}
    rows = [(number, c, f"{names[c]}/bird_{number}.jpg") for number, c in enumerate([1, 1, 2, 2, 101, 101], start=1)]
    for number, _, name in rows:
        write_picture(root / "images" / name, number)
    (root / "images.txt").write_text("".join(f"{n} {name}\n" for n, _, name in rows))
    (root / "image_class_labels.txt").write_text("".join(f"{n} {c}\n" for n, c, _ in rows))
    (root / "train_test_split.txt").write_text("".join(f"{n} {n % 2}\n" for n, _, _ in rows))
    (root / "classes.txt").write_text("".join(f"{c} {name}\n" for c, name in names.items()))
    (root / "bounding_boxes.txt").write_text("".join(f"{n} 2.0 3.0 10.0 {n}.0\n" for n, _, _ in rows))
    return root


def sop_layout(parent: Path, pictures: bool = True) -> Path:
    """Stanford_Online_Products/ with three categories; two training and two test products in each."""
    root, number, label = parent / "Stanford_Online_Products", 0, 0
    root.mkdir(parents=True)
    for split in ("train", "test"):
        lines = ["image_id class_id super_class_id path"]
        for category, product in enumerate(PRODUCTS, start=1):
            for _ in range(2):
                label += 1
                for view in range(3):
                    number += 1
                    name = f"{product}_final/{1110 + label}_{view}.JPG"
                    lines.append(f"{number} {label} {category} {name}")
                    if pictures:
                        write_picture(root / name, number)
        (root / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def inaturalist_layout(root: Path, lists: bool) -> Path:
    """train_val2018/KINGDOM/SPECIES/ with ten species; SmoothAP's lists or only the official annotations."""
    paths = [
        f"train_val2018/{'Aves' if species < 5 else 'Fungi'}/{100 + species}/{species}_{view}.jpg"
        for species in range(10)
        for view in range(2)
    ]
    for number, path in enumerate(paths):
        write_picture(root / path, number)
    if lists:
        (root / "Inat_dataset_splits").mkdir()
        for split, part in (("train", paths[:12]), ("test", paths[12:])):
            (root / "Inat_dataset_splits" / f"Inaturalist_{split}_set1.txt").write_text("\n".join(part))
    else:
        for file, part in (("train2018.json", paths[::2]), ("val2018.json", paths[1::2])):
            images = [{"id": i, "file_name": path} for i, path in enumerate(part)]
            (root / file).write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    return root


def inshop_layout(parent: Path) -> Path:
    """In-shop Clothes Retrieval Benchmark/ with one training garment and one that is queried."""
    root = parent / "In-shop Clothes Retrieval Benchmark"
    rows = [
        ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
        ("img/WOMEN/Dresses/id_00000002/02_2_side.jpg", "id_00000002", "train"),
        ("img/MEN/Denim/id_00000080/01_1_front.jpg", "id_00000080", "query"),
        ("img/MEN/Denim/id_00000080/01_2_side.jpg", "id_00000080", "gallery"),
        ("img/MEN/Denim/id_00000080/01_3_back.jpg", "id_00000080", "gallery"),
    ]
    for number, (name, _, _) in enumerate(rows):
        write_picture(root / "Img" / name, number)
    (root / "Eval").mkdir()
    (root / "Anno").mkdir()
    header = f"{len(rows)}\nimage_name item_id evaluation_status\n"
    (root / "Eval/list_eval_partition.txt").write_text(header + "".join(f"{a}   {b} {c}\n" for a, b, c in rows))
    header = f"{len(rows)}\nimage_name clothes_type pose_type x_1 y_1 x_2 y_2\n"
    (root / "Anno/list_bbox_inshop.txt").write_text(header + "".join(f"{a} 3 1 2 3 12 14\n" for a, _, _ in rows))
    return root


def _annotations(fields: list[dict[str, object]]) -> np.ndarray:
    kinds = [(name, object) for name in fields[0]]
    return np.asarray([tuple(field.values()) for field in fields], dtype=kinds)[None]


def cars_layout(root: Path, devkit: bool) -> Path:
    """cars_annos.mat + car_ims/, or the devkit with cars_train/ and cars_test/. Classes 1, 2, 99."""
    from scipy.io import savemat

    classes = [1, 2, 99, 99, 1, 2]
    box = {"bbox_x1": 1, "bbox_y1": 2, "bbox_x2": 11, "bbox_y2": 12}
    names = np.asarray([f"Car {i}" for i in range(1, 197)], dtype=object)[None]
    if not devkit:
        rows = []
        for number, label in enumerate(classes, start=1):
            name = f"car_ims/{number:06d}.jpg"
            write_picture(root / name, number)
            rows.append({"relative_im_path": name, **box, "class": label, "test": number % 2})
        savemat(root / "cars_annos.mat", {"annotations": _annotations(rows), "class_names": names})
        return root
    (root / "devkit").mkdir(parents=True)
    parts = {"cars_train": classes[:3], "cars_test": classes[3:]}
    files = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
    for inner, labels in parts.items():
        rows = []
        for number, label in enumerate(labels, start=1):
            write_picture(root / inner / f"{number:05d}.jpg", number)
            rows.append({**box, "class": label, "fname": f"{number:05d}.jpg"})
        savemat(root / files[inner], {"annotations": _annotations(rows)})
    savemat(root / "devkit/cars_meta.mat", {"class_names": names})
    return root


def sfm_layout(root: Path) -> Path:
    """retrieval-SfM-120k.pkl with arrays and lists, pictures in folders hashed by the end of their id."""
    lists: dict[str, dict[str, object]] = {}
    for split, cids in (("train", ["aa00112233", "bb44556677", "cc8899aabb"]), ("val", ["dd00000001", "ee00000002"])):
        lists[split] = {"cids": cids, "cluster": np.arange(len(cids)) // 2, "qidxs": [0], "pidxs": [1]}
        for number, cid in enumerate(cids):
            write_picture_as_jpeg(root / "ims" / cid[-2:] / cid[-4:-2] / cid[-6:-4] / cid, number)
    root.mkdir(parents=True, exist_ok=True)
    (root / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(lists, protocol=2))
    return root


def write_picture_as_jpeg(path: Path, number: int) -> None:
    """A JPEG whose name has no suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(path.with_suffix(".jpg"), number)
    path.with_suffix(".jpg").rename(path)


def revisited_layout(parent: Path, name: str = "roxford5k") -> Path:
    """gnd_NAME.pkl and jpg/: two queries with boxes, a gallery of three."""
    root = parent / name
    queries, gallery = ["all_souls_000013", "radcliffe_camera_000519"], ["a_000001", "b_000002", "c_000003"]
    for number, picture in enumerate([*queries, *gallery]):
        write_picture(root / "jpg" / f"{picture}.jpg", number, (40, 30))
    truth = [
        {"bbx": [4.4, 5.0, 24.6, 25.0], "easy": [0], "hard": [1], "junk": [2]},
        {"bbx": np.asarray([0.0, 0.0, 10.0, 20.0]), "easy": [], "hard": [2], "junk": []},
    ]
    (root / f"gnd_{name}.pkl").write_bytes(pickle.dumps({"imlist": gallery, "qimlist": queries, "gnd": truth}, 2))
    return root


def folder_layout(root: Path, classes: int = 6, pictures: int = 4, size: tuple[int, int] = (40, 30)) -> Path:
    """ROOT/CLASS/picture.png."""
    for label in range(classes):
        for view in range(pictures):
            write_picture(root / f"class_{label}" / f"{view}.png", label * 100 + view, size)
    return root
