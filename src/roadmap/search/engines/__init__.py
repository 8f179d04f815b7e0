"""Engines that find the nearest vectors: one protocol, one file each.

    exact    ours: every vector compared, on the GPU where there is one
    faiss    flat, HNSW or IVF-PQ, whichever suits the size; mapped from disk
    milvus   a file, a server or a cluster

The index keeps vectors, ids and metadata itself. What an engine keeps can always be made again from them, so an engine
can be lost, late or exchanged for another, and the index loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roadmap.search.columns import Column, Mask, mask_of
from roadmap.search.engines.options import ENGINES as ENGINES
from roadmap.search.engines.options import check_engine as check_engine
from roadmap.search.engines.options import installed as installed
from roadmap.search.filters import Filter
from roadmap.search.vectors import Floats, Slots, VectorFile

NOTHING = -1  # the slot where there are fewer results than were asked for


@dataclass(frozen=True)
class Mark:
    """How far an engine has come: it holds the slots below `slots`, and knows of removals up to commit `commit`."""

    slots: int = 0
    commit: int = 0


class Selection:
    """A filter as engines take it: the expression for those that have columns of their own, else a mask of slots."""

    def __init__(self, condition: Filter, column: Callable[[str], Column], count: int) -> None:
        self.condition = condition
        self._column, self._count = column, count

    @cached_property
    def mask(self) -> Mask:
        """(count,): which slots pass. Removed slots may pass; the engine knows them."""
        return mask_of(self.condition, self._column, self._count)


@dataclass(frozen=True)
class Place:
    """Where an engine lives.

    Attributes:
        folder: its own, for what it keeps.
        vectors: the index's vectors by slot.
        columns: name -> kind of the metadata.
        column: (name, start, stop) -> the values of a column for slots start..stop.
        removed: () -> all slots that were removed.
        options: the engine's own.
        writable: whether it may keep anything, or only search.
    """

    folder: Path
    vectors: VectorFile
    columns: Mapping[str, str]
    column: Callable[[str, int, int], list[Any]]
    removed: Callable[[], Slots]
    options: Mapping[str, Any]
    writable: bool


class Engine(Protocol):
    """What every engine does. Vectors are unit vectors, float32; slots are numbers that are never used twice."""

    name: str

    def load(self) -> Mark:
        """Take up what `save` wrote, if anything; how far it goes. Raises DamagedError where it is damaged."""

    def add(self, start: int, stop: int) -> None:
        """Take slots start..stop, whose vectors and metadata are in the index now. After an error, again from start."""

    def remove(self, slots: Slots) -> None:
        """Never find these again. Slots that are not there are left out silently: removing twice is no mistake."""

    def search(self, vectors: Floats, k: int, selection: Selection | None = None) -> tuple[Floats, Slots]:
        """Scores (Q, k), highest first, and slots (Q, k); NOTHING and -inf where fewer than k were found."""

    def build(self) -> dict[str, Any]:
        """Make searching fast for what there is now; facts, such as the recall that was measured."""

    def save(self, mark: Mark) -> None:
        """Keep what is not kept yet, and how far it goes: whole or not at all."""

    def facts(self) -> dict[str, Any]:
        """Plain values for people: the kind of index, its recall, its memory."""

    def close(self) -> None:
        """Let files and connections go."""

    def __len__(self) -> int:
        """How many vectors can be found."""


def engine_named(name: str, place: Place) -> Engine:
    """A fresh engine; `load` it next. Its options were checked before they were kept."""
    check_engine(name, {})
    if name == "faiss":
        from roadmap.search.engines.faiss import FaissEngine

        return FaissEngine(place)
    if name == "milvus":
        from roadmap.search.engines.milvus import MilvusEngine

        return MilvusEngine(place)
    from roadmap.search.engines.exact import ExactEngine

    return ExactEngine(place)


def no_results(queries: int, k: int) -> tuple[Floats, Slots]:
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), NOTHING, np.int64)


def passing(live: Mask, mask: Mask) -> Mask:
    """Which rows are live and pass; those that came after the mask was made are not for its search."""
    found, both = np.zeros(len(live), np.bool_), min(len(live), len(mask))
    found[:both] = live[:both] & mask[:both]
    return found


def merged(parts: Sequence[tuple[Floats, Slots]], k: int) -> tuple[Floats, Slots]:
    """The k best of several results; of equal scores, the lower slot first."""
    scores = np.concatenate([scores for scores, _ in parts], axis=1)
    slots = np.concatenate([slots for _, slots in parts], axis=1)
    order = np.lexsort((slots, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(slots, order, 1)
