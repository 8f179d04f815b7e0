"""Which pictures of a dataset a run trained on, chose its epoch by and tested on, as a table beside its settings.

pictures.csv[.gz]   id, class, split: a line for each picture, in the order of the run

Drawing the splits again later would be a draw from other pictures as soon as one is added, renamed or removed, and
pictures that were trained on could be tested on.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from roadmap.atomic import whole_file
from roadmap.data import UNLABELLED, Records, picture_key

NAME, COLUMNS = "pictures.csv", ["id", "class", "split"]
FILES = (NAME, f"{NAME}.gz")  # one of the two
LARGE = 10_000  # pictures from which on the table is compressed
SHOWN = 3  # pictures that a sentence names
Key = tuple[str, int]  # a picture, and which of its lines: a table may list one twice


def save_division(folder: Path, records: Records) -> None:
    """Writes the table, whole or not at all."""
    if records.splits is None:
        raise ValueError(f"{records.name} has no splits to be stored; draw them first")
    rows = zip((key for key, _ in _keys(records)), _classes(records), records.splits.tolist(), strict=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    content = text.getvalue().encode("utf-8", "surrogateescape")
    path = folder / FILES[len(records) >= LARGE]
    with whole_file(path) as temporary:
        # without the time: the same pictures are the same bytes
        Path(temporary).write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def stored_division(folder: Path, records: Records) -> tuple[Records, list[str]]:
    """The records as the run divided them, and what has changed since, a sentence each.

    Pictures that the run did not know are left out. Where nothing is stored, the records as they came.
    """
    path = next((found for name in FILES if (found := folder / name).is_file()), None)
    if path is None:
        return records, []
    stored = _rows(path)
    place = {key: i for i, key in enumerate(_keys(records))}
    kept = [key for key in stored if key in place]
    if not kept:
        raise ValueError(
            f"none of the {len(stored):,} pictures of the run is below {records.root} "
            f"({_few(key for key, _ in stored)}); is it another folder than the one it was trained on?"
        )
    division = records.select([place[key] for key in kept])
    division = dataclasses.replace(division, splits=np.asarray([stored[key][1] for key in kept]))
    return division, [*_missing(stored, place), *_new(stored, place), *_moved(stored, kept, division)]


def _missing(stored: dict[Key, tuple[str, str]], place: dict[Key, int]) -> Iterator[str]:
    sizes = Counter(split for _, split in stored.values())
    for split, size in sizes.items():
        gone = [key for key, (_, own) in stored.items() if own == split and (key not in place)]
        if gone:
            yield (
                f"{len(gone):,} of the {size:,} {split} pictures of the run {_are(len(gone))} missing "
                f"({_few(name for name, _ in gone)})"
            )


def _new(stored: dict[Key, tuple[str, str]], place: dict[Key, int]) -> Iterator[str]:
    new = [name for name, number in place if (name, number) not in stored]
    if new:
        yield f"{_pictures(len(new))} {_are(len(new))} new since the run began and left out ({_few(new)})"


def _moved(stored: dict[Key, tuple[str, str]], kept: list[Key], division: Records) -> Iterator[str]:
    moved = [
        f"{name}: {stored[name, number][0]!r} then, {now!r} now"
        for (name, number), now in zip(kept, _classes(division), strict=True)
        if stored[name, number][0] != now
    ]
    if moved:
        has = "has" if len(moved) == 1 else "have"
        yield f"{_pictures(len(moved))} {has} another class than in the run; the class of now counts ({_few(moved)})"


def _rows(path: Path) -> dict[Key, tuple[str, str]]:
    """Picture -> its class and split, in the order of the table."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8", "surrogateescape")
        first, *rows = csv.reader(io.StringIO(text, newline=""))
        if first != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
            raise ValueError(f"its columns must be {', '.join(COLUMNS)}")
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise ValueError(f"{path} is damaged, the pictures of the run are not known: {error}") from error
    keys = _keys_of(row[0] for row in rows)
    return {key: (row[1], row[2]) for key, row in zip(keys, rows, strict=True)}


def _keys(records: Records) -> Iterator[Key]:
    return _keys_of(picture_key(records, i) for i in range(len(records)))


def _keys_of(names: Iterable[str]) -> Iterator[Key]:
    seen: Counter[str] = Counter()
    for name in names:
        yield name, seen[name]
        seen[name] += 1


def _classes(records: Records) -> list[str]:
    """The name of each picture's class; its number where classes have no names, nothing where it has no class."""
    names = records.class_names
    return ["" if label == UNLABELLED else names[label] if names else str(label) for label in records.labels.tolist()]


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _pictures(count: int) -> str:
    return f"{count:,} picture{'' if count == 1 else 's'}"


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")
