"""Your own pictures: a folder per class, or a table."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roadmap.data.records import SPLITS, Floats, Records, numbered

PICTURE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "webp",
        "bmp",
        "gif",
        "tif",
        "tiff",
        "ppm",
        "pgm",
        "avif",
        "jp2",
    )
)
EDGES = ("left", "top", "right", "bottom")


def folder(root: Path) -> Records:
    """ROOT/CLASS/picture.jpg, or ROOT/CATEGORY/.../CLASS/picture.jpg: outer folders become categories.

    Where the folders below ROOT are all named train, val, test, query or gallery, they are the splits and the
    classes lie below them; a class is then known by its path below the split, in every split.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; expected ROOT/CLASS/picture.jpg")
    found = [p for p in root.rglob("*") if p.suffix.lower() in PICTURE_SUFFIXES and p.is_file()]
    paths = sorted(p.relative_to(root).as_posix() for p in found if not _hidden(p.relative_to(root)))
    if not paths:
        raise FileNotFoundError(f"no pictures below {root}; expected ROOT/CLASS/picture.jpg")
    loose = [path for path in paths if "/" not in path]
    if loose:
        raise ValueError(f"{loose[0]} lies in {root} itself; every picture must lie in the folder of its class")
    tops = {path.split("/")[0] for path in paths}
    split_by_folder = tops <= set(SPLITS) and all(path.count("/") >= 2 for path in paths)
    classes = ["/".join(path.split("/")[split_by_folder:-1]) for path in paths]
    labels, class_names = numbered(classes)
    categories, category_names = None, tuple[str, ...]()
    if any("/" in name for name in class_names):
        categories, category_names = numbered([name.rpartition("/")[0] for name in classes])
    splits = np.asarray([path.split("/")[0] for path in paths]) if split_by_folder else None
    notes = _empty_classes(root)
    return Records(
        root.name, root, tuple(paths), labels, class_names, categories, category_names, splits=splits, notes=notes
    )


def _empty_classes(root: Path) -> tuple[str, ...]:
    """A note where folders hold neither pictures nor folders: classes that somebody forgot to fill, perhaps."""
    folders = [p for p in sorted(root.rglob("*")) if p.is_dir() and not _hidden(p.relative_to(root))]
    empty = [
        p.relative_to(root).as_posix()
        for p in folders
        if not any(inner.is_dir() or inner.suffix.lower() in PICTURE_SUFFIXES for inner in p.iterdir())
    ]
    if not empty:
        return ()
    named = ", ".join(empty[:3]) + (f" and {len(empty) - 3} more" if len(empty) > 3 else "")
    return (f"{len(empty)} {'folder holds' if len(empty) == 1 else 'folders hold'} no picture: {named}",)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def table(path: Path) -> Records:
    """A CSV or Parquet file with columns path, label and, as you have them, category, split, and a box.

    Paths are relative to the file's folder, or absolute. A box is four columns left, top, right, bottom (pixels),
    or one column `box` with the four numbers; pictures are cut to their boxes, an empty box keeps the whole one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a .csv or .parquet with columns path and label")
    columns = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    missing = [name for name in ("path", "label") if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {missing}; it has {sorted(columns)}; needed are path and label")
    text = {name: ["" if v is None else str(v) for v in columns[name]] for name in ("path", "label")}
    if empty := [row for row in range(len(text["path"])) if not text["path"][row] or not text["label"][row]]:
        raise ValueError(f"{path}: row {empty[0] + 1} has no path or no label")
    labels, class_names = numbered(text["label"])
    categories, category_names = None, tuple[str, ...]()
    if "category" in columns:
        categories, category_names = numbered([str(c) for c in columns["category"]])
    boxes = _boxes(path, columns)
    splits = None
    if "split" in columns:
        splits = np.asarray([str(s).strip().lower() for s in columns["split"]])
    return Records(
        path.stem,
        path.parent,
        tuple(Path(p).as_posix() for p in text["path"]),
        labels,
        class_names,
        categories,
        category_names,
        boxes,
        crop=boxes is not None,
        splits=splits,
    )


def _csv(path: Path) -> dict[str, Sequence[Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = list(csv.reader(file))
    if not lines:
        raise ValueError(f"{path} is empty; its first line must name the columns: path,label,...")
    names = [name.strip().lower() for name in lines[0]]
    for number, line in enumerate(lines[1:], start=2):
        if line and len(line) != len(names):
            raise ValueError(f"{path}, line {number}: expected {len(names)} columns, got {len(line)}")
    kept = [line for line in lines[1:] if line]
    return {name: [line[i].strip() for line in kept] for i, name in enumerate(names)}


def _parquet(path: Path) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow: pip install 'roadmap[data]'") from error
    return {name.strip().lower(): values for name, values in parquet.read_table(path).to_pydict().items()}


def _boxes(path: Path, columns: Mapping[str, Sequence[Any]]) -> Floats | None:
    if "box" in columns:
        cells = [_numbers(path, row, cell) for row, cell in enumerate(columns["box"], start=1)]
    elif all(edge in columns for edge in EDGES):
        rows = zip(*(columns[edge] for edge in EDGES), strict=True)
        cells = [_numbers(path, row, cell) for row, cell in enumerate(rows, start=1)]
    elif any(edge in columns for edge in EDGES):
        raise ValueError(f"{path} has some of the columns {', '.join(EDGES)} but not all four")
    else:
        return None
    return np.asarray(cells, dtype=np.float64).reshape(-1, 4)


def _numbers(path: Path, row: int, cell: Any) -> list[float]:
    parts = cell.replace(",", " ").split() if isinstance(cell, str) else list(cell if cell is not None else ())
    parts = [part for part in parts if part is not None and part != ""]
    if not parts:
        return [math.nan] * 4
    try:
        left, top, right, bottom = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"{path}, row {row}: a box is left, top, right, bottom in pixels, got {cell!r}") from None
    if not (left < right and top < bottom):
        raise ValueError(f"{path}, row {row}: the box {cell!r} is empty; it must have left < right and top < bottom")
    return [left, top, right, bottom]
