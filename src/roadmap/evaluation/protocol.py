"""What searches in what, and what is measured: the protocols of the literature."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roadmap.config.settings import SettingError
from roadmap.data import Pack, Records, Tags, Tree, VectorPack
from roadmap.data.pictures.shards import OnError
from roadmap.embeddings import Embeddings
from roadmap.encoder import Encoder
from roadmap.evaluation.degrees import Measures, graded_measures, measured_on, measures_by_dimensions
from roadmap.evaluation.evaluation import Evaluation
from roadmap.evaluation.facts import class_count, facts_of_model, facts_of_vectors
from roadmap.evaluation.neighbours import nearest_items
from roadmap.evaluation.reranking import Reranking
from roadmap.evaluation.sides import Search, search_after, search_of
from roadmap.metrics import GroundTruth, retrieval_metrics, revisited_metrics_of_vectors
from roadmap.metrics.counted import Ties
from roadmap.metrics.vectors import unit_vectors
from roadmap.refinement import Refinement

# The k of Recall@k that are reported for each dataset; others take those of CUB.
KS = {
    "cub": (1, 2, 4, 8),
    "sop": (1, 10, 100, 1000),
    "inaturalist": (1, 4, 16, 32),
    "inshop": (1, 10, 20, 30),
}
# What is measured too, but is no merit: epochs are not chosen by it.
NO_MERIT = ("AP loss", "queries", "queries_without_positives")
NEAREST = 10  # neighbours of each query that are kept
MEMORY = 512 << 20


def recall_ks(dataset: str) -> tuple[int, ...]:
    """The k of Recall@k that the literature reports for a dataset."""
    return KS.get(dataset, KS["cub"])


def merits(
    records: Records, ks: Sequence[int] | None = None, levels: bool = False, dims: Sequence[int] = ()
) -> tuple[str, ...]:
    """The names of what `evaluate` will measure and of which more is better; nothing is embedded for it."""
    wide, tree = max((2, *dims)) + 1, None
    if levels and records.tree is not None:
        nodes = ((),) * len(records.tree.levels)
        tree = Tree(np.zeros((2, len(nodes)), dtype=np.int64), records.tree.levels, nodes)
    tags = Tags(np.ones((2, 1), dtype=bool)) if levels and records.tags is not None else None
    two = Embeddings(torch.eye(2, wide), torch.zeros(2, dtype=torch.int64), tree=tree, tags=tags)
    more: dict[str, Any] = {"levels": (tree or tags) is not None, "dims": dims}
    truth = None
    if records.ground_truth:
        none, first = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        truth = GroundTruth((first,) * 2, (none,) * 2, (none,) * 2)
    ks = recall_ks(records.name) if ks is None else ks
    names = evaluate(two, two, ks=ks, truth=truth, nearest=0, **more).metrics
    return tuple(name for name in names if not name.endswith(NO_MERIT))


def evaluate(
    what: Encoder | Embeddings,
    against: Records | Embeddings | None = None,
    *,
    ks: Sequence[int] | None = None,
    ties: Ties = "pessimistic",
    truth: GroundTruth | None = None,
    pack: Pack | VectorPack | None = None,
    on_error: OnError | None = None,
    nearest: int = NEAREST,
    memory: int = MEMORY,
    progress: bool | None = None,
    refinement: Refinement | None = None,
    levels: bool | None = None,
    dims: Sequence[int] | None = None,
) -> Evaluation:
    """What `roadmap evaluate` measures: R@k, mAP@R, mAP; or Easy, Medium and Hard of the revisited landmarks.

    Args:
        what: an encoder, whose pictures are embedded; or embeddings.
        against: for an encoder the pictures, searched as their dataset says (None: the test pictures of its run); for
            embeddings the gallery (None: they search one another). Classes are compared by name where both have names;
            a query whose id is in the gallery, below the same root, does not find itself.
        ks: the k of Recall@k; None for the dataset's own.
        ties: equal scores count against the query ("pessimistic"), or in the mean over their orders ("mean").
        truth: of embeddings: the ground truth of the revisited Oxford or Paris pictures.
        pack: for an encoder: decoded pictures, or what its backbone made of them.
        on_error: for an encoder: a picture that cannot be decoded, "raise" or "skip"; None: as in its run, or "raise".
        nearest: how many neighbours of each query are kept.
        memory: bytes to work in.
        progress: show bars; None: where a person watches and it takes long.
        refinement: better answers from the same vectors, such as query expansion; what is measured is what they find.
        levels: measure by the tree of labels too: H-AP, ASI, NDCG, and R@1 and mAP@R of each coarser level; and by
            tags, named "tag H-AP" and so on; None: where the model's run did so.
        dims: measure with the first so many dimensions alone, too, such as (64, 128), named "64-d R@1" and so on; None:
            those that the model was trained for.
    """
    told = measured_on(against, {} if isinstance(what, Embeddings) else what.about)
    levels = bool(told.get("levels", False)) if levels is None else levels
    dims = told.get("dims", ()) if dims is None else dims
    options: dict[str, Any] = {"ties": ties, "nearest": nearest, "memory": memory, "refinement": refinement}
    options |= {"levels": levels, "dims": dims}
    if isinstance(what, Embeddings):
        if isinstance(against, Records):
            raise TypeError("embeddings are searched in embeddings; to search in Records, give an Encoder")
        return _of_embeddings(what, against, KS["cub"] if ks is None else ks, truth, progress=progress, **options)
    if isinstance(against, Embeddings):
        raise TypeError("an Encoder is evaluated on Records; embed its queries to search in embeddings")
    records = records_to_search(what.records() if against is None else against)
    queries, gallery = records.evaluation()
    parts = [
        what.embed(part, pack=pack, on_error=on_error, progress=progress)
        for part in (queries, gallery)
        if part is not None
    ]
    if records.ground_truth:
        if len(parts[0]) != len(queries) or gallery is None or len(parts[1]) != len(gallery):
            raise ValueError(
                f"{records.name}: the revisited protocol needs every picture, but some could not be decoded"
            )
        truth = _truth(records)
    ks = recall_ks(records.name) if ks is None else ks
    found = _of_embeddings(parts[0], parts[1] if len(parts) > 1 else None, ks, truth, progress=False, **options)
    notes = (*records.notes, *found.facts["notes"])
    facts = facts_of_model(what, records, parts, pack, None if records.ground_truth else ks, ties, notes)
    facts["settings"] |= {"levels": True} if levels else {}
    facts["settings"] |= {"dims": list(dims)} if dims else {}
    return dataclasses.replace(found, facts=facts)


def records_to_search(records: Records, split: str | None = None) -> Records:
    """The records with what is to be searched as their test pictures, and notes on what that means.

    Args:
        records: of a dataset; without splits, all pictures search one another.
        split: "train", "val", "test", or "all"; None for the test set of the dataset, which may be queries and gallery.
    """
    notes = records.notes
    if split is None and records.splits is None:
        split = "all"
        notes += (
            f"{records.name} has no test set: all {len(records):,} pictures search one another. A model that was "
            "trained on some of them looks better than it is",
        )
    if split is not None or "query" not in records.split_names():
        part = records_of_split(records, split or "test")
        records = dataclasses.replace(part, splits=np.full(len(part), "test"), ground_truth=())
    if not records.ground_truth and class_count(records.evaluation()[0]) == 1:
        notes += ("all pictures are of one class: every answer is right, which says nothing of the model",)
    return dataclasses.replace(records, notes=notes)


def records_of_split(records: Records, split: str) -> Records:
    """The pictures of a split, or of "all" of them."""
    there = records.split_names()
    if split == "all":
        return records
    if split not in there:
        raise SettingError(
            "split", f"{records.name} has no split {split!r}; choose split=NAME from: {', '.join([*there, 'all'])}"
        )
    return records.split(split)


def _truth(records: Records) -> GroundTruth:
    easy, hard, junk = (tuple(truth[kind] for truth in records.ground_truth) for kind in ("easy", "hard", "junk"))
    return GroundTruth(easy, hard, junk)


def _of_embeddings(
    queries: Embeddings,
    gallery: Embeddings | None,
    ks: Sequence[int],
    truth: GroundTruth | None,
    ties: Ties,
    nearest: int,
    memory: int,
    progress: bool | None,
    refinement: Refinement | None,
    levels: bool = False,
    dims: Sequence[int] = (),
) -> Evaluation:
    search = search_of(queries, gallery, truth)
    if refinement:
        search = search_after(search, refinement)
    metrics, values, places, scores = _answers(search, ks, truth, ties, nearest, memory, progress, refinement)
    if levels:
        _check_levels(truth, refinement)
        graded = graded_measures(search, ties, memory, progress)
        metrics, values = metrics | graded[0], values | graded[1]

    def merits_of(some: Embeddings, others: Embeddings | None) -> Measures:
        found = _of_embeddings(some, others, ks, truth, ties, 0, memory, progress, refinement)
        told = [name for name in found.metrics if not name.endswith(NO_MERIT)]
        return {name: found.metrics[name] for name in told}, {name: found.per_query[name] for name in told}

    fewer = measures_by_dimensions(dims, queries, gallery, merits_of)
    asked, held = search.queries, search.gallery
    return Evaluation(
        metrics | fewer[0],
        values | fewer[1],
        asked.labels.cpu(),
        _positives(*search.classes, search.own),
        asked.ids,
        asked.class_names,
        places,
        scores,
        held.labels.cpu(),
        held.ids,
        facts_of_vectors(asked, None if search.alone else held, ties, search.notes),
    )


def _check_levels(truth: GroundTruth | None, refinement: Refinement | None) -> None:
    if truth is not None:
        raise SettingError("levels", "levels are not for landmarks, whose answers are easy, hard or junk")
    if refinement and refinement.rerank:
        raise SettingError("levels", "levels are ranked by cosines; leave rerank out")


def _answers(
    search: Search,
    ks: Sequence[int],
    truth: GroundTruth | None,
    ties: Ties,
    nearest: int,
    memory: int,
    progress: bool | None,
    refinement: Refinement | None,
) -> tuple[dict[str, float], dict[str, Tensor], Tensor, Tensor]:
    """Means, the values of every query, and the places and scores of the nearest."""
    if refinement and refinement.rerank:
        if truth is not None:
            raise SettingError("rerank", "rerank=N is not for landmarks, whose answers are easy, hard or junk")
        ranking = Reranking(search.queries.vectors, search.gallery.vectors, search.own, refinement.rerank)
        return *ranking.measures(*search.classes, ks, ties, memory), *ranking.first(nearest)
    if truth is None:
        found = _measures(search, ks, ties, memory, progress)
    else:
        found = _revisited(search.queries, search.gallery, truth)
    return *found, *_neighbours(search, None if truth else search.classes, nearest, ties)


def _measures(
    search: Search, ks: Sequence[int], ties: Ties, memory: int, progress: bool | None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    vectors, labels = search.queries.vectors, search.classes[0]
    options: dict[str, Any] = {"ks": ks, "ties": ties, "memory": memory, "progress": progress}
    if search.one_set:
        return retrieval_metrics(vectors, labels, per_query=True, **options)
    return retrieval_metrics(
        vectors,
        labels,
        search.gallery.vectors,
        search.classes[1],
        query_index=search.own,
        per_query=True,
        **options,
    )


def _positives(queries: Tensor, gallery: Tensor, own: Tensor) -> Tensor:
    """(M,) how many items of a query's class there are beside itself."""
    labels, counts = torch.unique(gallery, return_counts=True)
    found = torch.searchsorted(labels, queries).clamp(max=len(labels) - 1)
    positives = torch.where(labels[found] == queries, counts[found], 0).cpu()
    itself = own.cpu() >= 0
    same = torch.zeros(len(queries), dtype=torch.bool)
    same[itself] = gallery.cpu()[own.cpu()[itself]] == queries.cpu()[itself]
    return positives - same.to(torch.int64)


def _neighbours(
    search: Search, classes: tuple[Tensor, Tensor] | None, nearest: int, ties: Ties
) -> tuple[Tensor, Tensor]:
    if nearest == 0:
        return torch.empty(len(search.own), 0, dtype=torch.int64), torch.empty(len(search.own), 0)
    q = unit_vectors(search.queries.vectors, "queries")
    g = q if search.one_set else unit_vectors(search.gallery.vectors, "gallery")
    dtype = torch.promote_types(q.dtype, g.dtype)
    places, scores = nearest_items(q.to(dtype), g.to(dtype), search.own.to(q.device), classes, nearest, ties)
    return places.cpu(), scores.cpu()


def _revisited(
    queries: Embeddings, database: Embeddings, truth: GroundTruth
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Easy, Medium and Hard in flat dicts, such as "medium trapezoidal mAP"."""
    means, values = revisited_metrics_of_vectors(queries.vectors, database.vectors, truth, per_query=True)
    return (
        {f"{setting} {name}": value for setting, some in means.items() for name, value in some.items()},
        {f"{setting} {name}": value for setting, some in values.items() for name, value in some.items()},
    )
