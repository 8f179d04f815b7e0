"""`Records`: what every dataset is, once read. Paths, labels, and what is known about each picture.

A reader turns files on disk into Records; samplers, loaders, evaluation and search see nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roadmap.atomic import whole_file
from roadmap.data.drawing import drawn_classes, drawn_pictures
from roadmap.data.tags import Tags
from roadmap.data.trees import Tree

UNLABELLED = -1
SPLITS = ("train", "val", "test", "query", "gallery")
SPELLINGS = {  # how else people name them, in folders and tables
    "training": "train",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "testing": "test",
    "queries": "query",
}

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Records:
    """N pictures of a dataset, in the order of its own lists. Nothing is opened or decoded.

    Attributes:
        name: the dataset's name.
        root: folder that `paths` are relative to.
        paths: N paths, with forward slashes.
        labels: (N,) int64 in 0..C-1, or UNLABELLED.
        class_names: C names, indexed by label.
        categories: (N,) int64, the coarser class (SOP's 12), or None.
        category_names: names indexed by category.
        boxes: (N, 4) float64 left, top, right, bottom in pixels of the picture, NaN where there is none; or None.
        crop: whether pictures are cut to their boxes when decoded (queries of ROxford and RParis are).
        splits: (N,) of "train", "val", "test", "query", "gallery"; or None when no split is given.
        ground_truth: for revisited landmarks one dict per query: "easy", "hard", "junk" -> gallery positions.
        notes: decisions of the reader that a person should hear about.
        tree: what stands above the classes, level by level (script over character); or None.
        tags: what else the pictures show, any number of tags each; or None.
    """

    name: str
    root: Path
    paths: tuple[str, ...]
    labels: Ints
    class_names: tuple[str, ...] = ()
    categories: Ints | None = None
    category_names: tuple[str, ...] = ()
    boxes: Floats | None = None
    crop: bool = False
    splits: NDArray[np.str_] | None = None
    ground_truth: tuple[Mapping[str, Ints], ...] = ()
    notes: tuple[str, ...] = ()
    tree: Tree | None = None
    tags: Tags | None = None

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "root", Path(self.root))
        freeze(self, "paths", tuple(self.paths))
        freeze(self, "labels", np.asarray(self.labels, dtype=np.int64))
        if self.categories is not None:
            freeze(self, "categories", np.asarray(self.categories, dtype=np.int64))
        if self.boxes is not None:
            freeze(self, "boxes", np.asarray(self.boxes, dtype=np.float64))
        if self.splits is not None:
            freeze(self, "splits", np.asarray(self.splits, dtype=np.str_))
        self._check()

    def _check(self) -> None:
        fields: tuple[tuple[str, NDArray[Any] | None, tuple[int, ...]], ...] = (
            ("labels", self.labels, (len(self),)),
            ("categories", self.categories, (len(self),)),
            ("boxes", self.boxes, (len(self), 4)),
            ("splits", self.splits, (len(self),)),
        )
        for field, values, shape in fields:
            if values is not None and values.shape != shape:
                raise ValueError(f"{field} has shape {values.shape} but {len(self)} pictures need {shape}")
        for field, ids, names in (
            ("labels", self.labels, self.class_names),
            ("categories", self.categories, self.category_names),
        ):
            if ids is not None and names and len(ids) and (ids.max() >= len(names) or ids.min() < UNLABELLED):
                raise ValueError(
                    f"{field} must lie in 0..{len(names) - 1} (or {UNLABELLED}), got {ids.min()}..{ids.max()}"
                )
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"two {field} are called {twice[0]!r}; a name stands for one of them")
        if self.splits is not None and (unknown := set(self.splits.tolist()) - set(SPLITS)):
            raise ValueError(f"unknown splits {sorted(unknown)}; allowed are {', '.join(SPLITS)}")
        if self.tree is not None and not np.array_equal(self.tree.paths[:, -1], self.labels):
            raise ValueError("the finest level of the tree must be the labels, one path for each picture")
        if self.tags is not None and len(self.tags) != len(self):
            raise ValueError(f"there are tags of {len(self.tags)} pictures, but {len(self)} pictures")

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, index: int) -> Path:
        """Where picture `index` lies on disk."""
        return self.root / self.paths[index]

    def box(self, index: int) -> tuple[float, float, float, float] | None:
        """What picture `index` is to be cut to: its box where `crop` is set and it has one."""
        if not self.crop or self.boxes is None or np.isnan(self.boxes[index]).any():
            return None
        left, top, right, bottom = self.boxes[index].tolist()
        return left, top, right, bottom

    def select(self, chosen: ArrayLike) -> Records:
        """The pictures of a boolean mask or of positions, in that order. Labels keep their meaning."""
        positions = np.asarray(chosen)
        if positions.dtype == np.bool_:
            positions = np.flatnonzero(positions)
        positions = positions.astype(np.int64)
        return dataclasses.replace(
            self,
            paths=tuple(self.paths[i] for i in positions),
            labels=self.labels[positions],
            categories=None if self.categories is None else self.categories[positions],
            boxes=None if self.boxes is None else self.boxes[positions],
            splits=None if self.splits is None else self.splits[positions],
            tree=None if self.tree is None else self.tree.select(positions),
            tags=None if self.tags is None else self.tags.select(positions),
        )

    def split_names(self) -> tuple[str, ...]:
        """The splits that have at least one picture, in the order of SPLITS."""
        present = set() if self.splits is None else set(self.splits.tolist())
        return tuple(name for name in SPLITS if name in present)

    def split(self, *names: str) -> Records:
        """The pictures of the named splits, in the order of the lists."""
        missing = [name for name in names if name not in self.split_names()]
        if missing:
            raise ValueError(
                f"{self.name} has no split {missing}; it has {list(self.split_names())}"
                + ("" if self.splits is not None else "; make one with split_by_class()")
            )
        return self.select(np.isin(self._named_splits(), names))

    def _named_splits(self) -> NDArray[np.str_]:
        if self.splits is None:
            raise ValueError(f"{self.name} has no splits; make them with split_by_class()")
        return self.splits

    def evaluation(self) -> tuple[Records, Records | None]:
        """Queries and gallery; (test, None) where every test picture queries all the others."""
        if "query" in self.split_names():
            return self.split("query"), self.split("gallery")
        return self.split("test"), None

    def split_by_class(self, test: float = 0.5, seed: int = 0) -> Records:
        """Open-set splits: whole classes go to "train" or "test", drawn by the hash of their names.

        A class that is added, renamed or removed moves no other (`roadmap.data.drawing`).

        Args:
            test: share of the classes that go to the test set, about; strictly between 0 and 1.
            seed: another one is another draw.
        """
        held = self._drawn_labels(self.labels != UNLABELLED, test, "test", seed)
        return dataclasses.replace(self, splits=np.where(np.isin(self.labels, held), "test", "train"))

    def hold_out_classes(self, fraction: float = 0.1, seed: int = 0) -> Records:
        """Moves about a fraction of the training classes to "val", to choose models without the test set.

        Drawn as by `split_by_class`, at least 2 of them where there are 4.
        """
        splits = self._named_splits()
        train = splits == "train"
        held = self._drawn_labels(train & (self.labels != UNLABELLED), fraction, "val", seed)
        return dataclasses.replace(self, splits=np.where(np.isin(self.labels, held) & train, "val", splits))

    def split_within_classes(self, test: float = 0.2, fewest: int = 4, seed: int = 0) -> Records:
        """Closed-set splits: of every class some pictures go to "test", at least 2, drawn by the hash of their paths.

        Args:
            test: share of the pictures of a class, strictly between 0 and 1.
            fewest: a class with fewer pictures stays in "train" whole.
            seed: another one is another draw.
        """
        _check_fraction(test, "pictures")
        splits = np.full(len(self), "train", dtype="<U7")
        for label in np.unique(self.labels[self.labels != UNLABELLED]):
            members = np.flatnonzero(self.labels == label)
            if len(members) >= fewest:
                drawn = drawn_pictures([self.paths[i] for i in members], test, "test", seed)
                splits[members[drawn]] = "test"
        return dataclasses.replace(self, splits=splits)

    def _drawn_labels(self, among: NDArray[np.bool_], fraction: float, purpose: str, seed: int) -> Ints:
        _check_fraction(fraction, "classes")
        labels = np.unique(self.labels[among])
        if len(labels) < 2:
            raise ValueError(f"splitting by class needs at least 2 classes, {self.name} has {len(labels)}")
        names = [self.class_names[label] if self.class_names else str(label) for label in labels.tolist()]
        held: Ints = labels[drawn_classes(names, fraction, purpose, seed)]
        return held

    def singletons(self) -> Ints:
        """Labels with a single picture: as queries they have no positive, in training they teach little."""
        labels, sizes = np.unique(self.labels[self.labels != UNLABELLED], return_counts=True)
        return np.asarray(labels[sizes == 1], dtype=np.int64)

    def fingerprint(self) -> str:
        """What identifies the pictures: root, paths and crops, but not labels."""
        digest = hashlib.sha256(str(self.root.resolve()).encode())
        digest.update("\n".join(self.paths).encode("utf-8", "surrogateescape"))
        if self.crop and self.boxes is not None:
            digest.update(self.boxes.tobytes())
        return digest.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` is the inverse."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["root"] = str(self.root)
        fields["tree"] = None if self.tree is None else self.tree.as_dict()
        fields["tags"] = None if self.tags is None else self.tags.as_dict()
        fields["ground_truth"] = [{k: v.tolist() for k, v in query.items()} for query in self.ground_truth]
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Records:
        """The Records that `as_dict` described, in this version or one before there were trees or tags."""
        fields = dict(values)
        fields["tree"] = None if fields.get("tree") is None else Tree.from_dict(fields["tree"])
        fields["tags"] = None if fields.get("tags") is None else Tags.from_dict(fields["tags"])
        for name in ("paths", "class_names", "category_names", "notes"):
            fields[name] = tuple(fields.get(name, ()))
        fields["ground_truth"] = tuple(
            {k: np.asarray(v, dtype=np.int64) for k, v in query.items()} for query in fields.get("ground_truth", ())
        )
        return cls(**fields)

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all; NaN boxes are written as NaN, which Python's JSON reads back."""
        with whole_file(Path(path)) as temporary:
            Path(temporary).write_text(json.dumps(self.as_dict()))

    @classmethod
    def load(cls, path: Path) -> Records:
        """Reads what `save` wrote.

        Raises:
            ValueError: naming the file, when it holds something else or is damaged.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{path} does not hold records ({error})") from error


def _check_fraction(fraction: float, what: str) -> None:
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction of {what} must be strictly between 0 and 1, got {fraction}")


def split_named(name: str) -> str | None:
    """The split that a person means by a name such as Train or validation; None where it is the name of no split."""
    plain = name.strip().lower()
    return plain if plain in SPLITS else SPELLINGS.get(plain)


def numbers_of(names: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Numbers for names, and the sorted names they index. Integers sort as numbers."""
    distinct = sorted(set(names), key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    index = {name: i for i, name in enumerate(distinct)}
    return np.asarray([index[name] for name in names], dtype=np.int64), tuple(distinct)
