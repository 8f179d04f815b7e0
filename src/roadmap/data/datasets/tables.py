"""Your own pictures in a table: CSV with commas, semicolons or tabs, or Parquet."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from os.path import normpath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.pictures.packs import picture_key
from roadmap.data.records import SPLITS, Floats, Ints, Records, numbers_of, split_named
from roadmap.data.tags import Tags, named_tags, tags_in
from roadmap.data.trees import Tree, tree_over_classes
from roadmap.names import did_you_mean

EDGES = ("left", "top", "right", "bottom")
SEPARATORS = (",", ";", "\t", "|")
NEEDED = ("path", "label")
LEVEL = "level_"  # columns that begin so are levels above the label, in their order, from the coarsest on
Columns = Mapping[str, Sequence[Any]]


def table_records(path: Path) -> Records:
    """A CSV or Parquet file with columns path, label and, as you have them, category, split, a box, levels, and tags.

    Paths are relative to the file's folder, or absolute. A box is four columns left, top, right, bottom (pixels),
    or one column `box` with the four numbers; pictures are cut to their boxes, an empty box keeps the whole one.
    Columns level_NAME, from the coarsest on, are what stands above the label; without them, the category is. A column
    `tags` holds any number of tags with ; | or , between them, or lists; they are for losses and metrics by degrees.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; expected a .csv or .parquet with columns path and label")
    columns = table_columns(path)
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {missing}; it has {sorted(columns)}; needed are path and label")
    paths = [Path(cell).as_posix() for cell in _texts(path, columns, "path")]
    labels, class_names = numbers_of(_texts(path, columns, "label"))
    categories, category_names = None, tuple[str, ...]()
    if "category" in columns:
        categories, category_names = numbers_of(_texts(path, columns, "category"))
    boxes = _boxes(path, columns)
    splits = _splits(path, columns) if "split" in columns else None
    tree, notes = _tree(columns, labels, class_names)
    records = Records(
        path.stem,
        path.parent,
        tuple(paths),
        labels,
        class_names,
        categories,
        category_names,
        boxes,
        crop=boxes is not None,
        splits=splits,
        notes=notes,
        tree=tree,
        tags=_tags(columns["tags"]) if "tags" in columns else None,
    )
    _check_once(path, records)
    return records


def _tree(columns: Columns, labels: Ints, class_names: tuple[str, ...]) -> tuple[Tree | None, tuple[str, ...]]:
    """What stands above the labels; a note where the columns are there and are no tree. Empty cells are not known."""
    names = [name for name in columns if name.startswith(LEVEL)] or [name for name in columns if name == "category"]
    if not names:
        return None, ()
    rows = list(zip(*([_text(cell) for cell in columns[name]] for name in names), strict=True))
    above: dict[int, tuple[int, tuple[str, ...]]] = {}
    for row, (label, way) in enumerate(zip(labels.tolist(), rows, strict=True), start=1):
        first, before = above.setdefault(label, (row, way))
        if way != before:
            ways = " and under ".join(repr("/".join(some)) for some in (before, way))
            return None, (
                f"the columns {', '.join(names)} are no tree: {class_names[label]} stands under {ways} "
                f"(rows {first} and {row}), so there are no levels above the labels",
            )
    levels = {
        name.removeprefix(LEVEL): [above[c][1][i] for c in range(len(class_names))] for i, name in enumerate(names)
    }
    return tree_over_classes(levels, labels, class_names), ()


def _tags(cells: Sequence[Any]) -> Tags | None:
    """Of cells of text, or lists; an empty one is a picture without tags."""
    several = [cell if isinstance(cell, (list, tuple)) else tags_in(_text(cell)) for cell in cells]
    return named_tags([[text for tag in some if (text := _text(tag))] for some in several])


def table_columns(path: Path) -> dict[str, Sequence[Any]]:
    """Every column of a CSV or Parquet file by its name in small letters; cells of a CSV are text."""
    names, columns = _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path)
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise ValueError(f"{path} has two columns {twice[0]!r} (capitals do not count); give each a name of its own")
    return dict(zip(names, columns, strict=True))


def _texts(path: Path, columns: Columns, name: str) -> list[str]:
    """A column as text. Nothing may be missing: an empty cell, or a NaN that some program wrote into it, is refused."""
    texts = [_text(cell) for cell in columns[name]]
    for row, text in enumerate(texts, start=1):
        if not text or text.lower() == "nan":
            raise ValueError(f"{path}: row {row} has no {name}{f' ({text})' if text else ''}")
    return texts


def _text(cell: Any) -> str:
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))  # a column of integers becomes one of floats where a single number is missing
    if isinstance(cell, bytes):
        return cell.decode("utf-8", "surrogateescape").strip()
    return "" if cell is None else str(cell).strip()


def _splits(path: Path, columns: Columns) -> NDArray[np.str_]:
    named = []
    for row, text in enumerate(_texts(path, columns, "split"), start=1):
        if (split := split_named(text)) is None:
            raise ValueError(
                f"{path}: row {row} is of the unknown split {text!r}{did_you_mean(text.lower(), SPLITS)} "
                f"Allowed are {', '.join(SPLITS)}"
            )
        named.append(split)
    return np.asarray(named, dtype=np.str_)


def _check_once(path: Path, records: Records) -> None:
    """A picture that is listed twice would find itself: refused, unless its boxes or its splits differ."""
    seen: dict[tuple[str, str], int] = {}
    splits = [""] * len(records) if records.splits is None else records.splits.tolist()
    for row, split in enumerate(splits, start=1):
        key = picture_key(records, row - 1)
        whole = normpath(records.root / key)  # a/../b.jpg is b.jpg, and so may an absolute path be
        if (first := seen.setdefault((whole, split), row)) != row:
            raise ValueError(f"{path}: rows {first} and {row} both name {key}; list each picture once")


def _csv(path: Path) -> tuple[list[str], list[Sequence[Any]]]:
    """Names and cells of the columns."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as CSV with UTF-8") from error
    first = text.lstrip().partition("\n")[0].lower()
    # the one that separates the columns we need; a comma where that cannot be said
    named = {s: {_plain_name(name) for name in first.split(s)} for s in SEPARATORS}
    separator = next((s for wanted in (NEEDED, NEEDED[:1]) for s in SEPARATORS if set(wanted) <= named[s]), ",")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=separator))
    except csv.Error as error:
        raise ValueError(f"{path} is not a table ({error})") from error
    if not any(lines):
        raise ValueError(f"{path} is empty; its first line must name the columns: path,label,...")
    (_, header), *rest = [(number, line) for number, line in enumerate(lines, start=1) if line]
    names = [_plain_name(name.lower()) for name in header]
    for number, line in rest:
        if len(line) != len(names):
            raise ValueError(f"{path}, line {number}: expected {len(names)} columns, got {len(line)}")
    return names, [[line[i].strip() for _, line in rest] for i in range(len(names))]


def _plain_name(name: str) -> str:
    return name.strip().strip("\"'").strip()


def _parquet(path: Path) -> tuple[list[str], list[Sequence[Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow: pip install 'roadmap-retrieval[data]'") from error
    table = parquet.ParquetFile(path).read()  # read_table looks for columns by name, and fails where two have one
    return [name.strip().lower() for name in table.column_names], [column.to_pylist() for column in table.columns]


def _boxes(path: Path, columns: Columns) -> Floats | None:
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
    """Left, top, right, bottom; four NaN where the cell is empty or says NaN."""
    wrong = ValueError(f"{path}, row {row}: a box is left, top, right, bottom in pixels, got {cell!r}")
    parts = cell.replace(",", " ").split() if isinstance(cell, str) else cell
    if parts is None or isinstance(parts, (int, float)):
        parts = [math.nan if parts is None else parts]
    try:
        numbers = [math.nan if part is None or part == "" else float(part) for part in parts]
    except (TypeError, ValueError):
        raise wrong from None
    if all(math.isnan(number) for number in numbers):
        return [math.nan] * 4
    if len(numbers) != 4 or not all(math.isfinite(number) for number in numbers):
        raise wrong
    left, top, right, bottom = numbers
    if not (left < right and top < bottom):
        raise ValueError(f"{path}, row {row}: the box {cell!r} is empty; it must have left < right and top < bottom")
    return numbers
