"""`Tree`: where pictures stand in a tree of labels, such as script over character or genus over species."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
UNKNOWN = -1  # a level at which nobody knows where a picture stands; the class of one without a label, too
WHO_HAS_ONE = (
    "glyphs, cub, sop and inaturalist have one, folders in folders are one, and so are the columns category or "
    "level_NAME of a table"
)
NAMELESS = "?"  # stands in the name of a node for a level above it that is not known


@dataclass(frozen=True, eq=False)
class Tree:
    """The way of N pictures through L levels, from the coarsest to the finest, which is their class.

    Attributes:
        paths: (N, L) int64; the last column is the class label; UNKNOWN where a level is not known. A node has one
            parent: who shares a level shares all coarser ones.
        levels: L names, such as ("script", "character").
        nodes: for each level the names of its nodes, indexed by their numbers; the last are the class names. () where
            they are mere numbers.
    """

    paths: Ints
    levels: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        freeze(self, "paths", np.asarray(self.paths, dtype=np.int64))
        freeze(self, "levels", tuple(self.levels))
        freeze(self, "nodes", tuple(tuple(names) for names in self.nodes))
        self._check()

    def _check(self) -> None:
        wide = len(self.levels)
        if wide == 0 or self.paths.ndim != 2 or self.paths.shape[1] != wide or len(self.nodes) != wide:
            raise ValueError(
                f"a tree needs paths of shape (pictures, levels) and names for each level, got shape "
                f"{self.paths.shape}, {wide} names of levels and nodes of {len(self.nodes)}"
            )
        if len(set(self.levels)) != wide:
            raise ValueError(f"the levels of a tree must have different names, got {', '.join(self.levels)}")
        for depth, (level, names) in enumerate(zip(self.levels, self.nodes, strict=True)):
            numbers = self.paths[:, depth]
            if names and len(numbers) and (numbers.min() < UNKNOWN or numbers.max() >= len(names)):
                raise ValueError(
                    f"{level} must lie in 0..{len(names) - 1} (or {UNKNOWN}), got {numbers.min()}..{numbers.max()}"
                )
            if len(set(names)) != len(names):
                raise ValueError(f"two nodes of the level {level} have one name; a name stands for one of them")
            self._check_parents(depth)

    def _check_parents(self, depth: int) -> None:
        known = self.paths[self.paths[:, depth] != UNKNOWN]
        _, first, node = np.unique(known[:, depth], return_index=True, return_inverse=True)
        strange = (known[first[node], :depth] != known[:, :depth]).any(1)
        if strange.any():
            row = int(np.flatnonzero(strange)[0])
            ways = [self._words(known[i, :depth]) for i in (int(first[node[row]]), row)]
            name = self._name(depth, int(known[row, depth]))
            raise ValueError(
                f"{self.levels[depth]} {name!r} stands under {ways[0]} and under {ways[1]}; in a tree it has one place"
            )

    def _words(self, path: Ints) -> str:
        return repr(" > ".join(self._name(depth, n) for depth, n in enumerate(path.tolist())))

    def _name(self, depth: int, node: int) -> str:
        if node == UNKNOWN:
            return NAMELESS
        return self.nodes[depth][node] if self.nodes[depth] else str(node)

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, positions: Ints) -> Tree:
        """Of the pictures at some positions, in that order."""
        return Tree(self.paths[positions], self.levels, self.nodes)

    def with_labels(self, labels: Ints, class_names: Sequence[str]) -> Tree:
        """With other numbers for the same classes."""
        paths = self.paths.copy()
        paths[:, -1] = labels
        return Tree(paths, self.levels, (*self.nodes[:-1], tuple(class_names)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` is the inverse."""
        return {"paths": self.paths.tolist(), "levels": list(self.levels), "nodes": [list(n) for n in self.nodes]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tree:
        levels = tuple(values["levels"])
        paths = np.asarray(values["paths"], dtype=np.int64).reshape(-1, len(levels))  # of no pictures, the shape too
        return cls(paths, levels, tuple(values["nodes"]))


def tree_over_classes(
    levels: Mapping[str, Sequence[str]], labels: Ints, class_names: Sequence[str], finest: str = "class"
) -> Tree:
    """The tree of pictures from what stands above their classes.

    Args:
        levels: name of a level -> for each class the name of the node above it, "" where that is not known; from the
            coarsest level down. Nodes of one name below different nodes are different ones, and are known by their
            path, such as "birds/other".
        labels: (N,) of the pictures.
        class_names: C names.
        finest: what the classes are called, as a level.
    """
    ways: list[tuple[str, ...]] = [()] * len(class_names)
    columns, nodes = [], []
    for names in levels.values():
        ways = [(*way, name) for way, name in zip(ways, names, strict=True)]
        known = ["/".join(part or NAMELESS for part in way) if way[-1] else "" for way in ways]
        distinct = sorted(set(known) - {""})
        number = {"": UNKNOWN} | {name: i for i, name in enumerate(distinct)}
        columns.append([number[name] for name in known])
        nodes.append(tuple(distinct))
    # the last row is for pictures without a label, whose label is -1
    of_class = np.full((len(class_names) + 1, len(columns) + 1), UNKNOWN, dtype=np.int64)
    of_class[:-1, :-1] = np.asarray(columns, dtype=np.int64).reshape(len(columns), -1).T
    of_class[:-1, -1] = np.arange(len(class_names))
    return Tree(of_class[labels], (*levels, finest), (*nodes, tuple(class_names)))


def merged_trees(one: Tree, other: Tree) -> tuple[Tree, Tree]:
    """Both with the same numbers for the same nodes, by name; those of the first come first.

    Raises:
        ValueError: they have other levels, or names on one side alone.
    """
    if one.levels != other.levels:
        raise ValueError(f"one tree has the levels {', '.join(one.levels)}, the other {', '.join(other.levels)}")
    if one.nodes == other.nodes:
        return one, other
    columns, nodes = [], []
    for depth, (mine, theirs) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        if bool(mine) != bool(theirs):
            raise ValueError(f"the nodes of the level {one.levels[depth]} have names in one tree and none in the other")
        number = {name: i for i, name in enumerate(dict.fromkeys((*mine, *theirs)))}
        # the last place is for UNKNOWN, which is -1
        numbers = np.asarray([*(number[name] for name in theirs), UNKNOWN], dtype=np.int64)
        columns.append(numbers[other.paths[:, depth]] if theirs else other.paths[:, depth])
        nodes.append(tuple(number))
    return Tree(one.paths, one.levels, tuple(nodes)), Tree(np.stack(columns, axis=1), one.levels, tuple(nodes))
