"""What is measured beside a search by class: by the levels of a tree, by tags, and with fewer dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roadmap.config.settings import SettingError
from roadmap.data import Records
from roadmap.embeddings import Embeddings
from roadmap.evaluation.alignment import aligned_tags, aligned_trees
from roadmap.evaluation.sides import Search
from roadmap.metrics import graded_metrics
from roadmap.metrics.counted import Ties

LEVEL_KS = (1,)
COUNTS = ("queries", "queries_without_positives")
BY_TAGS = ("H-AP", "ASI", "NDCG", "R@1", "mAP@R", "mAP")

Measures = tuple[dict[str, float], dict[str, Tensor]]


def measured_on(pictures: Records | Embeddings | None, told: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a run measures (`levels`, `dims`), what can be measured on these pictures: levels need a tree or tags."""
    found = {name: told[name] for name in ("levels", "dims") if name in told}
    if isinstance(pictures, Records) and (pictures.ground_truth or (pictures.tree is None and pictures.tags is None)):
        found.pop("levels", None)
    return found


def graded_measures(search: Search, ties: Ties, memory: int, progress: bool | None) -> Measures:
    """By the tree of labels and by tags: by both where both are there, and by one at least."""
    options = {"ties": ties, "memory": memory, "progress": progress}
    tagged = search.queries.tags is not None and search.gallery.tags is not None
    by_tree = not tagged or (search.queries.tree is not None and search.gallery.tree is not None)
    means, values = _tree_measures(search, **options) if by_tree else ({}, {})
    more = _tag_measures(search, **options) if tagged else ({}, {})
    return means | more[0], values | more[1]


def _tree_measures(search: Search, **options: Any) -> Measures:
    """H-AP, ASI, NDCG, and R@1 and mAP@R of every level but the finest, which is the classes: measured already."""
    trees = aligned_trees(search.queries, search.gallery)
    paths = [torch.from_numpy(tree.paths) for tree in trees]
    means, values = _measures(search, *paths, levels=trees[0].levels, **options)
    finest = f"{trees[0].levels[-1]} "
    kept = [name for name in means if not name.startswith(finest) and name not in COUNTS]
    return {name: means[name] for name in kept}, {name: values[name] for name in kept}


def _tag_measures(search: Search, **options: Any) -> Measures:
    """H-AP, ASI, NDCG, and R@1, mAP@R and mAP of who shares a tag, under names such as "tag R@1"."""
    marks = [torch.from_numpy(tags.marks) for tags in aligned_tags(search.queries, search.gallery)]
    means, values = _measures(search, *marks, **options)
    return {f"tag {name}": means[name] for name in BY_TAGS}, {f"tag {name}": values[name] for name in BY_TAGS}


def _measures(search: Search, queries: Tensor, gallery: Tensor, **options: Any) -> Measures:
    found: Measures = graded_metrics(
        search.queries.vectors,
        queries,
        None if search.one_set else search.gallery.vectors,
        None if search.one_set else gallery,
        LEVEL_KS,
        query_index=None if search.one_set else search.own,
        per_query=True,
        **options,
    )
    return found


def measures_by_dimensions(
    dims: Sequence[int],
    queries: Embeddings,
    gallery: Embeddings | None,
    measures: Callable[[Embeddings, Embeddings | None], Measures],
) -> Measures:
    """What `measures` finds with the first d dimensions alone, under names such as "64-d R@1", for every d of `dims`.

    All dimensions together are measured already, and so left out.
    """
    whole = queries.vectors.shape[1]
    wrong = [d for d in dims if isinstance(d, bool) or not isinstance(d, int) or not 1 <= d <= whole]
    if wrong:
        raise SettingError(
            "dims", f"dims={wrong[0]}: the vectors have {whole} dimensions; give whole numbers up to that"
        )
    means: dict[str, float] = {}
    values: dict[str, Tensor] = {}
    for d in sorted(set(dims) - {whole}):
        found = measures(_first(queries, d), None if gallery is None else _first(gallery, d))
        means |= {f"{d}-d {name}": value for name, value in found[0].items()}
        values |= {f"{d}-d {name}": value for name, value in found[1].items()}
    return means, values


def _first(embeddings: Embeddings, d: int) -> Embeddings:
    """The first d dimensions; whoever compares them normalises them."""
    return dataclasses.replace(embeddings, vectors=embeddings.vectors[:, :d])
