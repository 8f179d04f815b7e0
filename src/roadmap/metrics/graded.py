"""Metrics where items are relevant by degrees, from a tree of labels: exact, and streamed in tiles.

As in `roadmap.metrics.ranking`, every value follows from counts: of the items that share nothing with a query, how many
score at least as high as each of those that do. See docs/metrics.md for definitions, ties and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.metrics.counted import Ties, check_ties
from roadmap.metrics.graded_values import (
    GradedCounts,
    average_set_intersection,
    decaying_relevance,
    discounted_gain,
    hierarchical_average_precision,
    level_values,
    weighted_relevance,
)
from roadmap.metrics.levels import Paths, coarsest_nodes, node_numbers, shared_levels
from roadmap.metrics.ranking import (
    check_pair,
    chunk_limits,
    counts_and_order,
    means_of,
    progress_bar,
    vectors_and_exclusions,
    whole_numbers,
)
from roadmap.metrics.relevance import Ignored, relevance
from roadmap.metrics.vectors import Vectors

GRADED = ("H-AP", "ASI", "NDCG")
# Bytes that the tables of one chunk of queries take for each of their places (measured: about 290).
CELL_BYTES = 384


@overload
def graded_metrics(
    queries: Vectors,
    query_paths: Paths,
    gallery: Vectors | None = ...,
    gallery_paths: Paths | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    levels: Sequence[str] | None = ...,
    alpha: float = ...,
    weights: Sequence[float] | None = ...,
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
    query_paths: Paths,
    gallery: Vectors | None = ...,
    gallery_paths: Paths | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    levels: Sequence[str] | None = ...,
    alpha: float = ...,
    weights: Sequence[float] | None = ...,
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
    query_paths: Paths,
    gallery: Vectors | None = None,
    gallery_paths: Paths | None = None,
    ks: int | Sequence[int] = (1,),
    *,
    levels: Sequence[str] | None = None,
    alpha: float = 1.0,
    weights: Sequence[float] | None = None,
    query_index: Tensor | ArrayLike | None = None,
    ignore: Ignored | None = None,
    ties: Ties = "pessimistic",
    per_query: bool = False,
    memory: int = 512 << 20,
    progress: bool | None = None,
) -> dict[str, float] | tuple[dict[str, float], dict[str, Tensor]]:
    """Means over the queries of H-AP, ASI and NDCG, and of R@k and mAP@R at each level of a tree of labels.

    Args:
        queries: (M, D) vectors of any float type, normalised here.
        query_paths: (M, L) integers, from the coarsest level to the class; negative where a level is not known, which
            is shared with nobody. A node has one parent.
        gallery, query_index, ignore, ties, memory, progress: as for `retrieval_metrics`.
        gallery_paths: (N, L) of the gallery.
        ks: the k of each level's Recall@k.
        levels: L names; None for "level 1" (the coarsest) to "level L".
        alpha: of H-AP: an item whose finest shared level is l has relevance (l / L)^alpha / (number of such items).
        weights: of H-AP: L weights, with which it is the weighted mean of the APs of the levels, in place of alpha.
        per_query: return also the values of each query, (M,) float64, NaN where there is nothing to find.

    Returns:
        {"H-AP", "ASI", "NDCG", "level 1 R@1", "level 1 mAP@R", ..., "queries", "queries_without_positives": with whom
        nobody shares a level}; each mean is over the queries that have something to find at that level. With
        `per_query`, a pair: that dict, and the values of each query.
    """
    check_ties(ties)
    ks = whole_numbers(ks)
    check_pair(gallery, gallery_paths, "gallery_paths")
    q, g, excluded = vectors_and_exclusions(queries, gallery, query_index, ignore)
    q_paths, g_paths = node_numbers(query_paths, len(q), gallery_paths, len(g), q.device)
    depth = q_paths.shape[1]
    names = _level_names(levels, depth)
    rule = _Rule(ks, names, _relevance_of(alpha, weights, depth), ties, *_tables(len(g), q.device))
    wanted = relevance(*coarsest_nodes(q_paths, g_paths), excluded)
    values: dict[str, Tensor] = {}
    with progress_bar(int((wanted.positives > 0).sum()), progress) as advance:
        for some in wanted.chunks(*chunk_limits(memory, q, g, CELL_BYTES)):
            columns, out = wanted.columns(some)
            shared = shared_levels(q_paths[some], g_paths, columns)
            own = some if gallery is None else None
            known = q_paths[some] >= 0
            counts = _graded_counts(q[some], g, columns, shared, known, out, ties, own, advance)
            for name, value in rule.values(counts).items():
                values.setdefault(name, value.new_full((len(q),), torch.nan))[some] = value
    nothing = torch.full((len(q),), torch.nan, dtype=torch.float64, device=q.device)
    values = {name: values.get(name, nothing) for name in rule.value_names()}
    # each mean is over the queries that have a value
    means = {name: means_of({name: value}, ~value.isnan())[name] for name, value in values.items()}
    summary = means | means_of({}, wanted.positives > 0)
    return (summary, {name: value.cpu() for name, value in values.items()}) if per_query else summary


@dataclass(frozen=True)
class _Rule:
    """What is computed of counts."""

    ks: tuple[int, ...]
    levels: tuple[str, ...]
    relevance: Callable[[Tensor], Tensor]
    ties: Ties
    discounts: Tensor
    harmonics: Tensor

    def value_names(self) -> list[str]:
        each = [*(f"R@{k}" for k in self.ks), "mAP@R"]
        return [*GRADED, *(f"{level} {name}" for level in self.levels for name in each)]

    def values(self, counts: GradedCounts) -> dict[str, Tensor]:
        """Every metric of every query, (n,) float64."""
        found = {
            "H-AP": hierarchical_average_precision(counts, self.relevance(counts.sizes()), self.ties),
            "ASI": average_set_intersection(counts, self.harmonics, self.ties),
            "NDCG": discounted_gain(counts, self.discounts, self.ties),
        }
        for number, level in enumerate(self.levels, start=1):
            for name, value in level_values(counts, number, self.ks, self.ties).items():
                found[f"{level} {name}"] = value
        return found


def _tables(places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(N + 1,) NDCG's discounts and 1/n, added up over the first 0, 1, ..., N places."""
    ranks = torch.arange(1, places + 1, device=device, dtype=torch.float64)
    discounts, harmonics = (
        torch.nn.functional.pad(some.cumsum(0), (1, 0)) for some in (1 / torch.log2(1 + ranks), 1 / ranks)
    )
    return discounts, harmonics


def _graded_counts(
    queries: Tensor,
    gallery: Tensor,
    columns: Tensor,
    shared: Tensor,
    known: Tensor,
    excluded: Tensor,
    ties: Ties,
    own: Tensor | None,
    advance: Callable[[int], object],
) -> GradedCounts:
    """Counts of n queries, whose positives come in the worst order of ties: coarse levels first."""
    order = shared.sort(dim=1, stable=True).indices
    columns, shared = columns.gather(1, order), shared.gather(1, order)
    counts, ranked = counts_and_order(queries, gallery, columns, excluded, ties, own, advance)
    return GradedCounts(counts, torch.where(counts.valid, shared.gather(1, ranked), 0), known)


def _level_names(levels: Sequence[str] | None, depth: int) -> tuple[str, ...]:
    if levels is None:
        return tuple(f"level {number}" for number in range(1, depth + 1))
    names = tuple(levels)
    if isinstance(levels, str) or len(names) != depth or len(set(names)) != depth:
        raise ValueError(f"levels must be {depth} different names, one for each column of the paths, got {levels!r}")
    return names


def _relevance_of(alpha: float, weights: Sequence[float] | None, depth: int) -> Callable[[Tensor], Tensor]:
    if weights is None:
        if not alpha >= 0:
            raise ValueError(f"alpha must be >= 0: a finer level is no less relevant than a coarser one, got {alpha}")
        return lambda sizes: decaying_relevance(sizes, alpha)
    given = [float(weight) for weight in weights]
    if len(given) != depth or min(given) < 0 or not 0 < sum(given) < math.inf:
        raise ValueError(f"weights must be {depth} numbers >= 0, finite and not all 0, one a level, got {weights!r}")
    return lambda sizes: weighted_relevance(sizes, given)
