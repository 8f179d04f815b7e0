"""Your own pictures in a folder per class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path, PurePosixPath

import numpy as np

from roadmap.data.pictures.images import HEIF_SUFFIXES, reads_heif
from roadmap.data.records import UNLABELLED, Ints, Records, numbers_of, split_named
from roadmap.data.trees import Tree, tree_over_classes

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
EXPECTED = "expected ROOT/CLASS/picture.jpg"


def folder_records(root: Path) -> Records:
    """ROOT/CLASS/picture.jpg, or ROOT/CATEGORY/.../CLASS/picture.jpg: outer folders become categories, and a tree.

    Where the folders below ROOT are all named as splits are (train, val, valid, test, query, gallery and so on, in any
    case), they are the splits and the classes lie below them; a class is then known by its path below the split, in
    every split. Links to folders are followed, each folder is read once.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; {EXPECTED}")
    tree = _Tree.of(root)
    paths, notes = sorted(tree.pictures), tree.notes()
    if not paths:
        raise FileNotFoundError("; ".join([f"no pictures below {root}", EXPECTED, *notes]))
    loose = [path for path in paths if "/" not in path]
    if loose:
        raise ValueError(f"{loose[0]} lies in {root} itself; every picture must lie in the folder of its class")
    split_of = {top: split_named(top) for top in {path.split("/")[0] for path in paths}}
    divided = all(split_of.values()) and all(path.count("/") >= 2 for path in paths)
    if not divided:
        notes += _no_splits([top for top, split in split_of.items() if split], split_of)
    classes = ["/".join(path.split("/")[divided:-1]) for path in paths]
    labels, class_names = numbers_of(classes)
    categories, category_names = None, tuple[str, ...]()
    if any("/" in name for name in class_names):
        categories, category_names = numbers_of([name.rpartition("/")[0] for name in classes])
    splits = np.asarray([split_of[path.split("/")[0]] for path in paths]) if divided else None
    return Records(
        root.name,
        root,
        tuple(paths),
        labels,
        class_names,
        categories,
        category_names,
        splits=splits,
        notes=notes,
        tree=_tree(labels, class_names),
    )


def _tree(labels: Ints, class_names: tuple[str, ...]) -> Tree | None:
    """Folder over folder over class; None where no folder tells classes apart.

    Classes may lie at different depths: the level of a folder that a class does not have is not known. The pictures
    that lie in a/ itself, beside a/b/, are of the class a below the folder a.
    """
    parts = [name.split("/") for name in class_names]
    deepest = max(len(names) for names in parts)
    levels = {
        f"folder {depth + 1}": [names[depth] if depth < len(names) else "" for names in parts]
        for depth in range(deepest - 1)
    }
    # the outermost folders say nothing where all pictures share them
    telling = dict(dropwhile(lambda level: len(set(level[1])) == 1, levels.items()))
    return tree_over_classes(telling, labels, class_names) if telling else None


def picture_records(root: Path) -> Records:
    """Every picture below a folder: as `folder_records` reads it, or, where pictures lie in ROOT itself, each by the
    folder that it lies in and those of ROOT without a class."""
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder of pictures")
    tree = _Tree.of(root)
    paths = sorted(tree.pictures)
    if all("/" in path for path in paths):
        return folder_records(root)
    inside = [path.rpartition("/")[0] for path in paths]
    names = sorted(set(inside) - {""})
    number = {"": UNLABELLED} | {name: i for i, name in enumerate(names)}
    labels = np.asarray([number[folder] for folder in inside], dtype=np.int64)
    return Records(root.name, root, tuple(paths), labels, tuple(names), notes=tree.notes())


def _no_splits(named: list[str], tops: Collection[str]) -> tuple[str, ...]:
    """A note where folders are named as splits are and cannot be any."""
    if len(named) < 2:
        return ()
    others = sorted(set(tops) - set(named))
    why = f"{_list(others)} lies beside them" if others else "pictures lie in them without the folder of a class"
    return (f"{_list(sorted(named))} are not read as splits: {why}",)


@dataclass
class _Tree:
    """What lies below a folder, hidden files apart. All paths are relative to it, with forward slashes."""

    pictures: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)  # ending -> files
    broken: list[str] = field(default_factory=list)  # links that lead nowhere
    again: list[str] = field(default_factory=list)  # links to folders that are read already
    empty: list[str] = field(default_factory=list)  # folders with neither pictures nor folders
    closed: list[str] = field(default_factory=list)  # folders that may not be read

    @classmethod
    def of(cls, root: Path) -> _Tree:
        """Walks through real folders first, then through links to others, so that no folder is read twice."""
        tree, seen = cls(), set[tuple[int, int]]()
        folders, links = [""], list[str]()
        while folders or links:
            inside = folders.pop() if folders else links.pop(0)
            about = (root / inside).stat()
            if (about.st_dev, about.st_ino) in seen:
                tree.again.append(inside)
                continue
            seen.add((about.st_dev, about.st_ino))
            inner, linked = tree._read(root, inside)
            folders += inner
            links = sorted([*links, *linked])
        return tree

    def _read(self, root: Path, inside: str) -> tuple[list[str], list[str]]:
        """Takes in the files of one folder; the folders and the links to folders in it."""
        folders, links, before = list[str](), list[str](), len(self.pictures)
        try:
            names = sorted(name for name in os.listdir(root / inside) if not name.startswith("."))
        except PermissionError:
            self.closed.append(inside)
            return folders, links
        suffixes = PICTURE_SUFFIXES | (HEIF_SUFFIXES if reads_heif() else frozenset())
        for name in names:
            path, place = root / inside / name, f"{inside}/{name}".removeprefix("/")
            if path.is_dir():
                (links if path.is_symlink() else folders).append(place)
            elif not path.is_file():
                self.broken.append(place)
            elif (suffix := PurePosixPath(name).suffix.lower()) in suffixes:
                self.pictures.append(place)
            else:
                self.ignored[suffix or "without an ending"] += 1
        if inside and not folders and not links and len(self.pictures) == before:
            self.empty.append(inside)
        return folders, links

    def notes(self) -> tuple[str, ...]:
        """What a person should hear about, a sentence each."""
        unread = Counter({suffix: count for suffix, count in self.ignored.items() if suffix in HEIF_SUFFIXES})
        rest = self.ignored - unread
        said = (
            (unread.total(), "file ignored", "files ignored", f"{_list(unread)}; pip install pillow-heif"),
            (rest.total(), "file ignored", "files ignored", _list(rest)),
            (len(self.broken), "link leads nowhere", "links lead nowhere", _list(self.broken)),
            (
                len(self.again),
                "link to a folder that is read already",
                "links to folders that are read already",
                _list(self.again),
            ),
            (len(self.closed), "folder may not be read", "folders may not be read", _list(self.closed)),
            (len(self.empty), "folder holds no picture", "folders hold no picture", _list(self.empty)),
        )
        return tuple(f"{n:,} {one if n == 1 else many}: {names}" for n, one, many, names in said if n)


def _list(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
