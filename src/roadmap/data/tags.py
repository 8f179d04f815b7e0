"""`Tags`: what else pictures show beside their class, several labels each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roadmap.data.trees import Ints

Marks = NDArray[np.bool_]
BETWEEN = re.compile("[;|,]")  # the tags of a picture


@dataclass(frozen=True, eq=False)
class Tags:
    """Which of C tags each of N pictures has.

    Attributes:
        marks: (N, C) bool, at least one column.
        names: C names; () where the tags are mere numbers.
    """

    marks: Marks
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        marks = np.asarray(self.marks)
        if marks.dtype.kind in "iu" and np.isin(marks, (0, 1)).all():
            marks = marks.astype(bool)
        if marks.dtype != np.bool_ or marks.ndim != 2 or marks.shape[1] == 0:
            raise ValueError(f"tags must be bool of shape (pictures, tags), got {marks.dtype} {marks.shape}")
        object.__setattr__(self, "marks", marks)
        object.__setattr__(self, "names", tuple(self.names))
        if self.names and len(set(self.names)) != marks.shape[1]:
            raise ValueError(f"tags need {marks.shape[1]} different names, one each, got {len(set(self.names))}")

    def __len__(self) -> int:
        return len(self.marks)

    def select(self, positions: Ints) -> Tags:
        """Of the pictures at some positions, in that order."""
        return Tags(self.marks[positions], self.names)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` is the inverse."""
        each = [np.flatnonzero(row).tolist() for row in self.marks]
        return {"names": list(self.names), "count": self.marks.shape[1], "of": each}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tags:
        return cls(_marks(values["of"], values["count"]), tuple(values["names"]))


def tags_in(text: str) -> list[str]:
    """Tags with ; | or , between them."""
    return [tag for part in BETWEEN.split(text) if (tag := part.strip())]


def named_tags(each: Sequence[Sequence[str]]) -> Tags | None:
    """Of the names of each picture's tags; None where no picture has any."""
    names = sorted({name for some in each for name in some})
    number = {name: i for i, name in enumerate(names)}
    return Tags(_marks([[number[name] for name in some] for some in each], len(names)), tuple(names)) if names else None


def merged_tags(one: Tags, other: Tags) -> tuple[Tags, Tags]:
    """Both with the same columns for the same tags, by name; those of the first come first.

    Raises:
        ValueError: names on one side alone, or mere numbers of which one side has more.
    """
    if bool(one.names) != bool(other.names):
        raise ValueError("the tags of one have names and those of the other are mere numbers")
    if one.names == other.names:
        if one.marks.shape[1] != other.marks.shape[1]:
            raise ValueError(f"one has {one.marks.shape[1]} tags without names and the other {other.marks.shape[1]}")
        return one, other
    number = {name: i for i, name in enumerate(dict.fromkeys((*one.names, *other.names)))}
    wide = []
    for tags in (one, other):
        marks = np.zeros((len(tags), len(number)), dtype=bool)
        marks[:, [number[name] for name in tags.names]] = tags.marks
        wide.append(Tags(marks, tuple(number)))
    return wide[0], wide[1]


def _marks(each: Sequence[Sequence[int]], count: int) -> Marks:
    marks = np.zeros((len(each), count), dtype=bool)
    for row, numbers in zip(marks, each, strict=True):
        row[list(numbers)] = True
    return marks
