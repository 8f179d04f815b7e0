"""How relevant an item is to a query, as a number: from paths in a label tree, or from sets of labels.

Both first say how close two items are (0: not at all), then turn the closeness of a query's positives into grades.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from roadmap.losses.arguments import check_number
from roadmap.metrics.grades import (
    UNKNOWN,
    SetGrades,
    TreeGrades,
    check_set_grades,
    common_labels,
    finest_shared_level,
    set_grades,
    tree_grades,
)


@dataclass(frozen=True)
class TreeRelevance:
    """Grades of items whose labels are paths in a tree, coarse to fine; two items share l of its levels.

    With Ω^l the positives of a query that share exactly l levels with it, Ω^{>=l} those that share l or more:

        "shared"   l^alpha / |Ω^l|: the items of a level share its weight (HAPPIER, Ramzi et al., ECCV 2022)
        "levels"   l^alpha
        "nested"   Σ_{p <= l} w_p / |Ω^{>=p}|, w_p = p^alpha - (p - 1)^alpha: with it H-AP is the mean of the APs of all
                   levels, weighted by w_p; alpha = 1 weighs them alike

    H-AP does not change when all grades are multiplied: (l / L)^alpha, as the paper has it, is the same.
    """

    kind: TreeGrades = "shared"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(TreeGrades):
            raise ValueError(f"relevance must be 'shared', 'levels' or 'nested', got {self.kind!r}")
        check_number("alpha", self.alpha, at_least=0)

    def closeness(self, queries: Tensor, gallery: Tensor, dtype: torch.dtype) -> Tensor:
        """How many levels each pair shares, (M, N) int16: those down to the deepest that is equal and known."""
        return finest_shared_level(queries[:, None], gallery[None])

    def weights(self, depth: int) -> tuple[float, ...]:
        """Of levels 1 to `depth`: l^alpha, or w_l where the grades are nested."""
        found = [float(level) ** self.alpha for level in range(1, depth + 1)]
        if self.kind != "nested":
            return tuple(found)
        return tuple(w - before for w, before in zip(found, [0.0, *found], strict=False))  # nobody shares 0 levels

    def grades(self, closeness: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
        """(M, N), 0 where the closeness is 0; `depth` is the number of levels."""
        return tree_grades(closeness, self.kind, self.weights(depth), dtype)


@dataclass(frozen=True)
class SetRelevance:
    """Grades of items that have several labels each: how many they share, or that over how many they have together."""

    kind: SetGrades = "iou"

    def __post_init__(self) -> None:
        check_set_grades(self.kind)

    def closeness(self, queries: Tensor, gallery: Tensor, dtype: torch.dtype) -> Tensor:
        """(M, N)."""
        common = common_labels(queries, gallery).to(dtype)
        return set_grades(common, queries.sum(1, keepdim=True), gallery.sum(1), self.kind)

    def grades(self, closeness: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
        """The closeness itself, (M, N)."""
        return closeness.to(dtype)


@dataclass(frozen=True)
class Relevance:
    """What a loss takes for relevance: one rule for paths in a tree, one for sets of labels."""

    tree: TreeRelevance = TreeRelevance()
    sets: SetRelevance = SetRelevance()

    def of(self, labels: Tensor) -> TreeRelevance | SetRelevance:
        """The rule for labels of this kind."""
        return self.sets if labels.dtype == torch.bool else self.tree


def check_tree(*tables: Tensor) -> None:
    """Refuses paths in which one class lies under two others: its number would stand for two things.

    Call only where values are free to read.
    """
    paths = torch.unique(torch.cat([table.long() for table in tables]), dim=0)
    for level in range(1, paths.shape[1]):
        for above in reversed(range(level)):  # where a parent is not known, a grandparent may be
            _check_links(paths, level, above)


def _check_links(paths: Tensor, level: int, above: int) -> None:
    """A class of `level` lies under one class of the level `above`."""
    known = (paths[:, above] != UNKNOWN) & (paths[:, level] != UNKNOWN)
    links = torch.unique(paths[known][:, [level, above]], dim=0)
    twice = (links[1:, 0] == links[:-1, 0]).nonzero()
    if len(twice):
        child, one = links[twice[0, 0]].tolist()
        other = int(links[twice[0, 0] + 1, 1])
        raise ValueError(
            f"labels are no tree: {child} in column {level} lies under {one} and under {other} of column "
            f"{above}; number the classes of a level over the whole tree, not anew under each parent"
        )
