"""Which pictures an index should hold, and what is known of each: a folder, or a table, or both."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roadmap.data import UNLABELLED, Records, picture_key
from roadmap.data.datasets.folders import picture_records
from roadmap.data.datasets.tables import EDGES, table_columns, table_records
from roadmap.names import is_text, printable

TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq")
TAKEN = {"path", "label", "category", "split", "box", *EDGES}  # columns of a table that the reader understands itself
WHOLE = re.compile(r"[+-]?(0|[1-9]\d{0,17})")  # 007 is a name, not a number


@dataclass(frozen=True, eq=False)
class Pictures:
    """What an index is to hold.

    Attributes:
        records: the pictures.
        ids: of each, what the index calls it: its path below the root, with its box where it is cut to one.
        columns: name -> kind, beside `id` and `label`.
        metadata: name -> one value for each picture, `label` among them; as text where `columns` says so.
        notes: what a person should hear, such as pictures that are left out.
    """

    records: Records
    ids: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, Path]:
        """id -> path."""
        return {name: self.records.path(i) for i, name in enumerate(self.ids)}

    def rows(self, places: Sequence[int], kinds: Mapping[str, str]) -> dict[str, list[Any]]:
        """The metadata of some pictures, in the kinds of the index's columns."""
        return {
            name: [_of_kind(values[i], kinds.get(name, "text")) for i in places]
            for name, values in self.metadata.items()
        }


def pictures_of(where: str | Path, table: str | Path | None = None) -> Pictures:
    """The pictures below a folder or in a table (columns path and label, and any others, which become metadata).

    A file that lies outside the folder, by a link or by its path, is left out: an index shows what is in its folder.

    Args:
        where: the folder, or a .csv or .parquet file.
        table: more about the pictures of a folder: a file with a column `path`, relative to the folder, and others.
    """
    where = Path(where)
    if where.is_file() and where.suffix.lower() in TABLES:
        if table is not None:
            raise ValueError(f"{where} is a table itself; leave the other ({table}) out, or name a folder")
        records = table_records(where)
        more: Mapping[str, Sequence[Any]] = table_columns(where)
    else:
        records = picture_records(where)
        more = {} if table is None else _joined(records, Path(table))
    inside = _inside(records)
    kept = [i for i in inside if is_text(records.paths[i])]
    notes = (
        *records.notes,
        *_left_out(records, range(len(records)), inside, f"outside {records.root}"),
        *_left_out(records, inside, kept, "under a name that is not UTF-8 (rename it)"),
    )
    metadata = {**_known(records), **{name: values for name, values in more.items() if name not in TAKEN}}
    chosen = records.select(kept)
    metadata = {name: [values[i] for i in kept] for name, values in metadata.items()}
    columns = {name: kind_of(values) for name, values in metadata.items() if name != "label"}
    ids = tuple(picture_key(chosen, i) for i in range(len(chosen)))
    return Pictures(chosen, ids, columns, metadata, notes)


def kind_of(values: Sequence[Any]) -> str:
    """ "integer", "real", "boolean" or "text": the narrowest that holds all values; empty ones are missing."""
    there = [value for value in values if not _missing(value)]
    if there and all(isinstance(v, bool) or str(v).strip().lower() in ("true", "false") for v in there):
        return "boolean"
    if there and all(not isinstance(v, float) and WHOLE.fullmatch(str(v).strip()) for v in there):
        return "integer"
    return "real" if there and all(_is_number(v) for v in there) else "text"


def _of_kind(value: Any, kind: str) -> Any:
    """A cell as a value of a column; one that is of another kind stays as it is, and the index says so."""
    if _missing(value):
        return None
    text = str(value).strip()
    if kind == "text":
        return text
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "integer" and WHOLE.fullmatch(text):
        return int(text)
    if kind == "real" and _is_number(value):
        return float(text)
    return value


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or str(value).strip() == ""


def _is_number(value: Any) -> bool:
    text = str(value).strip()
    # 007 is a name; so are "inf", 1_000, and a whole number that is too long to be kept exactly
    if isinstance(value, bool) or "_" in text or (re.fullmatch(r"[+-]?\d+", text) and not WHOLE.fullmatch(text)):
        return False
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _known(records: Records) -> dict[str, list[Any]]:
    """What the reader knows of each picture: its class, and category, split and file where they say something."""
    names = records.class_names
    labels = [None if label == UNLABELLED else names[label] for label in records.labels.tolist()]
    found: dict[str, list[Any]] = {"label": labels}
    if records.categories is not None:
        numbers = records.categories.tolist()
        found["category"] = [None if n == UNLABELLED else records.category_names[n] for n in numbers]
    if records.splits is not None:
        found["split"] = records.splits.tolist()
    if records.crop:
        found["path"] = list(records.paths)
    return found


def _left_out(records: Records, before: Sequence[int], after: Sequence[int], where: str) -> tuple[str, ...]:
    """A sentence about the pictures that are not among those `after`, if there are such; it names the first."""
    out = sorted(set(before) - set(after))
    if not out:
        return ()
    left = "1 picture is left out, which lies" if len(out) == 1 else f"{len(out):,} pictures are left out, which lie"
    return (f"{left} {where}: {printable(records.paths[out[0]])}",)


def _inside(records: Records) -> list[int]:
    root = records.root.resolve()
    return [i for i in range(len(records)) if records.path(i).resolve().is_relative_to(root)]


def _joined(records: Records, table: Path) -> dict[str, list[Any]]:
    """The columns of a table in the order of the pictures; pictures that it does not name have no values."""
    if not table.is_file():
        raise FileNotFoundError(f"{table} is not a file; expected a .csv or .parquet with a column path")
    columns = table_columns(table)
    if "path" not in columns:
        raise ValueError(f"{table} has no column path; it has {', '.join(columns) or 'none'}")
    row = {Path(str(path)).as_posix(): i for i, path in enumerate(columns["path"])}
    if not (named := [row.get(path) for path in records.paths]) or all(place is None for place in named):
        raise ValueError(
            f"{table} names none of the pictures below {records.root}; its column path is relative to that folder, "
            f"such as {records.paths[0]}"
        )
    return {
        name: [None if place is None else values[place] for place in named]
        for name, values in columns.items()
        if name not in TAKEN
    }
