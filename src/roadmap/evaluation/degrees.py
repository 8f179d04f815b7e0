"""What is measured beside a search by class: by the levels of a tree, and with fewer dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roadmap.config.settings import SettingError
from roadmap.data import Records
from roadmap.embeddings import Embeddings
from roadmap.evaluation.alignment import aligned_trees
from roadmap.evaluation.sides import Search
from roadmap.metrics import graded_metrics
from roadmap.metrics.counted import Ties

LEVEL_KS = (1,)
COUNTS = ("queries", "queries_without_positives")

Measures = tuple[dict[str, float], dict[str, Tensor]]


def measured_on(pictures: Records | Embeddings | None, told: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a run measures (`levels`, `dims`), what can be measured on these pictures: levels need a tree."""
    found = {name: told[name] for name in ("levels", "dims") if name in told}
    if isinstance(pictures, Records) and (pictures.tree is None or pictures.ground_truth):
        found.pop("levels", None)
    return found


def graded_measures(search: Search, ties: Ties, memory: int, progress: bool | None) -> Measures:
    """H-AP, ASI, NDCG, and R@1 and mAP@R of every level but the finest, which is the classes: measured already."""
    trees = aligned_trees(search.queries, search.gallery)
    device = search.queries.vectors.device
    paths = [torch.from_numpy(tree.paths).to(device) for tree in trees]
    means, values = graded_metrics(
        search.queries.vectors,
        paths[0],
        None if search.one_set else search.gallery.vectors,
        None if search.one_set else paths[1],
        LEVEL_KS,
        levels=trees[0].levels,
        query_index=None if search.one_set else search.own,
        ties=ties,
        per_query=True,
        memory=memory,
        progress=progress,
    )
    finest = f"{trees[0].levels[-1]} "
    kept = [name for name in means if not name.startswith(finest) and name not in COUNTS]
    return {name: means[name] for name in kept}, {name: values[name] for name in kept}


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
