"""Metrics where items are relevant by degrees, from a tree of labels, from sets of labels, or pair by pair: exact, and
streamed in tiles.

As in `roadmap.metrics.ranking`, every value follows from counts: of the items that are not relevant to a query, how
many score at least as high as each of those that are. See docs/metrics.md for definitions, ties and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.metrics.counted import Ties, check_ties
from roadmap.metrics.degrees import Degrees, GivenGrades, LabelSets, PairDegrees, TreeDegrees
from roadmap.metrics.graded_values import (
    GradedCounts,
    Levels,
    PlainRelevance,
    average_set_intersection,
    discounted_gain,
    hierarchical_average_precision,
)
from roadmap.metrics.grades import Gain, SetGrades, TreeGrades, check_gain, check_set_grades
from roadmap.metrics.labels import are_sets, label_sets
from roadmap.metrics.levels import Paths, node_numbers
from roadmap.metrics.ranking import (
    check_pair,
    chunk_limits,
    counts_and_order,
    means_of,
    progress_bar,
    vectors_and_exclusions,
    whole_numbers,
)
from roadmap.metrics.relevance import Ignored
from roadmap.metrics.vectors import Vectors

GRADED = ("H-AP", "ASI", "NDCG")
LEAST = 1e-290  # what the coarsest level of a tree may count, so that a share of it is a number still
# Bytes that the tables of one chunk of queries take for each of their places (measured: about 290).
CELL_BYTES = 384
Kind = Literal["paths", "sets", "grades"]


@overload
def graded_metrics(
    queries: Vectors,
    query_labels: Paths | None = ...,
    gallery: Vectors | None = ...,
    gallery_labels: Paths | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    grades: Tensor | ArrayLike | None = ...,
    levels: Sequence[str] | None = ...,
    alpha: float = ...,
    weights: Sequence[float] | None = ...,
    sets: SetGrades | None = ...,
    gain: Gain = ...,
    query_index: Tensor | ArrayLike | None = ...,
    ignore: Ignored | None = ...,
    ties: Ties = ...,
    per_query: Literal[False] = ...,
    memory: int = ...,
    progress: bool | None = ...,
) -> dict[str, float]: ...


@overload
def graded_metrics(
    queries: Vectors,
    query_labels: Paths | None = ...,
    gallery: Vectors | None = ...,
    gallery_labels: Paths | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    grades: Tensor | ArrayLike | None = ...,
    levels: Sequence[str] | None = ...,
    alpha: float = ...,
    weights: Sequence[float] | None = ...,
    sets: SetGrades | None = ...,
    gain: Gain = ...,
    query_index: Tensor | ArrayLike | None = ...,
    ignore: Ignored | None = ...,
    ties: Ties = ...,
    per_query: Literal[True],
    memory: int = ...,
    progress: bool | None = ...,
) -> tuple[dict[str, float], dict[str, Tensor]]: ...


@torch.no_grad()
def graded_metrics(
    queries: Vectors,
    query_labels: Paths | None = None,
    gallery: Vectors | None = None,
    gallery_labels: Paths | None = None,
    ks: int | Sequence[int] = (1,),
    *,
    grades: Tensor | ArrayLike | None = None,
    levels: Sequence[str] | None = None,
    alpha: float = 1.0,
    weights: Sequence[float] | None = None,
    sets: SetGrades | None = None,
    gain: Gain = "exponential",
    query_index: Tensor | ArrayLike | None = None,
    ignore: Ignored | None = None,
    ties: Ties = "pessimistic",
    per_query: bool = False,
    memory: int = 512 << 20,
    progress: bool | None = None,
) -> dict[str, float] | tuple[dict[str, float], dict[str, Tensor]]:
    """Means over the queries of H-AP, ASI and NDCG; and of R@k and mAP@R at each level of a tree of labels, or, where
    labels are sets or there are grades, of all that `retrieval_metrics` says of the items that are relevant at all.

    Args:
        queries: (M, D) vectors of any float type, normalised here.
        query_labels: paths in a tree, (M, L) integers, from the coarsest level to the class; negative where a level is
            not known, which is shared with nobody; a node has one parent. Or sets of labels, (M, C) bool.
        gallery, query_index, ignore, ties, memory, progress: as for `retrieval_metrics`.
        gallery_labels: (N, L) or (N, C) of the gallery.
        ks: the k of Recall@k.
        grades: (M, N), how relevant each item is to each query, in the place of labels: above 0 for positives, 0 for
            negatives, below 0 for those in no ranking. Without a gallery (M, M), whose diagonal does not count.
        levels: of a tree: L names; None for "level 1" (the coarsest) to "level L".
        alpha: of a tree, in H-AP: an item whose finest shared level is l has relevance (l / L)^alpha / (number of such
            items).
        weights: of a tree, in H-AP: L weights, with which it is the weighted mean of the APs of the levels, in place of
            alpha.
        sets: of sets, how relevant an item is: "iou", labels in common over labels together; "count", labels in common.
            None: "iou" by H-AP, "count" by NDCG and ASI, as the losses `HierarchicalAP` and `GradedNDCG` have it.
        gain: of NDCG: "exponential", 2^grade - 1, or "linear", the grade; in a tree the grade is the level.
        per_query: return also the values of each query, (M,) float64, NaN where there is nothing to find.

    Returns:
        {"H-AP", "ASI", "NDCG", "level 1 R@1", "level 1 mAP@R", ..., "queries", "queries_without_positives": with whom
        nobody shares a level or label}; each mean is over the queries that have something to find at that level. For
        sets and grades {..., "NDCG", "R@1", ..., "P@1", "R-precision", "mAP@R", "mAP", "AP loss", ...}. With
        `per_query`, a pair: that dict, and the values of each query.
    """
    check_ties(ties)
    check_gain(gain)
    ks = whole_numbers(ks)
    _check_kinds(query_labels, gallery, gallery_labels, grades)
    q, g, excluded = vectors_and_exclusions(queries, gallery, query_index, ignore)
    table = _table(query_labels, gallery_labels, grades, sets, gain, q, g)
    _check_options(table, levels=levels, weights=weights, alpha=None if alpha == 1 else alpha, sets=sets)
    limits = chunk_limits(memory, q, g, CELL_BYTES, 0 if table is None else 5 * table.width)
    degrees: Degrees
    beside: Levels | PlainRelevance
    if table is None:
        assert query_labels is not None
        paths = node_numbers(query_labels, len(q), gallery_labels, len(g), q.device)
        beside = Levels(ks, ties, _level_names(levels, paths[0].shape[1]), paths[0] >= 0)
        degrees = TreeDegrees.of(*paths, *_tree_rule(alpha, weights, paths[0].shape[1]), excluded)
    else:
        beside, degrees = PlainRelevance(ks, ties), PairDegrees.of(table, len(g), excluded, limits[0])
    values = {name: q.new_full((len(q),), torch.nan, dtype=torch.float64) for name in (*GRADED, *beside.names())}
    rule = _Rule(gain, ties, *_tables(len(g), q.device))
    with progress_bar(int((degrees.positives > 0).sum()), progress) as advance:
        for some in degrees.chunks(*limits):
            tables = degrees.tables(some).by_degree()
            own = some if gallery is None else None
            counts, order = counts_and_order(q[some], g, tables.columns, tables.excluded, ties, own, advance)
            closeness, rel = (
                torch.where(counts.valid, degree.gather(1, order), 0.0)
                for degree in (tables.closeness, tables.relevance)
            )
            found = rule.values(GradedCounts(counts, closeness, rel)) | beside.values(counts, closeness, some)
            for name, value in found.items():
                values[name][some] = value
    # each mean is over the queries that have a value
    means = {name: means_of({name: value}, ~value.isnan())[name] for name, value in values.items()}
    summary = means | means_of({}, degrees.positives > 0)
    return (summary, {name: value.cpu() for name, value in values.items()}) if per_query else summary


def _check_kinds(queries: Paths | None, gallery: object, labels: Paths | None, grades: object) -> None:
    """Labels of one kind on both sides, or grades and no labels."""
    if grades is not None:
        if queries is not None or labels is not None:
            raise ValueError("grades came with labels, and each says how relevant an item is; leave one of them out")
        return
    if queries is None:
        raise ValueError("query_labels are missing: give paths in a tree, sets of labels, or grades in their place")
    check_pair(gallery, labels, "gallery_labels")
    if labels is not None and are_sets(queries) != are_sets(labels):
        kinds = ["sets" if are_sets(some) else "paths" for some in (queries, labels)]
        raise TypeError(f"query_labels are {kinds[0]} and gallery_labels are {kinds[1]}; give both as one kind")


def _table(
    query_labels: Paths | None,
    gallery_labels: Paths | None,
    grades: Tensor | ArrayLike | None,
    sets: SetGrades | None,
    gain: Gain,
    queries: Tensor,
    gallery: Tensor,
) -> LabelSets | GivenGrades | None:
    """What says pair by pair how relevant an item is; None where a tree does."""
    if grades is not None:
        return GivenGrades(_grade_table(grades, len(queries), len(gallery)), gain, queries.device)
    if query_labels is None or not are_sets(query_labels):
        return None
    if sets is not None:
        check_set_grades(sets)
    return LabelSets(*label_sets(query_labels, len(queries), gallery_labels, len(gallery), queries.device), sets)


def _check_options(table: LabelSets | GivenGrades | None, **options: object) -> None:
    """Refuses what was given and says nothing of this kind of labels."""
    kind = "paths" if table is None else "sets" if isinstance(table, LabelSets) else "grades"
    for name, value in options.items():
        of = "sets" if name == "sets" else "paths"
        if value is not None and kind != of:
            raise ValueError(f"{name}={value!r} is for labels that are {of}, and these are {kind}; leave it out")


@dataclass(frozen=True)
class _Rule:
    """What is computed of counts."""

    gain: Gain
    ties: Ties
    discounts: Tensor
    harmonics: Tensor

    def values(self, counts: GradedCounts) -> dict[str, Tensor]:
        """Every metric by degrees of every query, (n,) float64."""
        return {
            "H-AP": hierarchical_average_precision(counts, self.ties),
            "ASI": average_set_intersection(counts, self.harmonics, self.ties),
            "NDCG": discounted_gain(counts, self.discounts, self.gain, self.ties),
        }


def _tables(places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(N + 1,) NDCG's discounts and 1/n, added up over the first 0, 1, ..., N places."""
    ranks = torch.arange(1, places + 1, device=device, dtype=torch.float64)
    discounts, harmonics = (
        torch.nn.functional.pad(some.cumsum(0), (1, 0)) for some in (1 / torch.log2(1 + ranks), 1 / ranks)
    )
    return discounts, harmonics


def _grade_table(grades: Tensor | ArrayLike, queries: int, gallery: int) -> Tensor:
    """As a tensor, where they lie: tiles of them are looked at later."""
    found = grades.detach() if isinstance(grades, Tensor) else torch.as_tensor(np.asarray(grades))
    if found.is_complex():
        raise TypeError(f"grades must be real numbers, got {found.dtype}")
    if tuple(found.shape) != (queries, gallery):
        raise ValueError(
            f"grades must have shape (queries, gallery), here ({queries}, {gallery}), got {tuple(found.shape)}"
        )
    return found


def _level_names(levels: Sequence[str] | None, depth: int) -> tuple[str, ...]:
    if levels is None:
        return tuple(f"level {number}" for number in range(1, depth + 1))
    names = tuple(levels)
    if isinstance(levels, str) or len(names) != depth or len(set(names)) != depth:
        raise ValueError(f"levels must be {depth} different names, one for each column of the paths, got {levels!r}")
    return names


def _tree_rule(alpha: float, weights: Sequence[float] | None, depth: int) -> tuple[TreeGrades, list[float]]:
    """Which relevance, and the weights of the levels."""
    if weights is None:
        if not (alpha >= 0 and (1 / depth) ** alpha > LEAST):
            raise ValueError(
                "alpha must be >= 0, since a finer level is no less relevant than a coarser one, and not so large that "
                f"(1 / {depth})^alpha is nothing, got {alpha}"
            )
        return "shared", [(level / depth) ** alpha for level in range(1, depth + 1)]
    given = [float(weight) for weight in weights]
    if len(given) != depth or min(given) < 0 or not 0 < sum(given) < math.inf:
        raise ValueError(f"weights must be {depth} numbers >= 0, finite and not all 0, one a level, got {weights!r}")
    return "nested", given
