"""Queries and what they are searched in, side by side: classes, who is whom, and refined vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roadmap.config.settings import SettingError
from roadmap.embeddings import Embeddings
from roadmap.evaluation.alignment import classes_apart, comparable_pair, differences, own_places
from roadmap.metrics import GroundTruth
from roadmap.refinement import Refinement


@dataclass(frozen=True, eq=False)
class Search:
    """Queries, what they are searched in, and who is of whose class.

    Attributes:
        own: (M,) where each query stands in the gallery, -1 for nowhere.
        classes: of queries and gallery; who has no label is alone in a class.
        alone: the queries search one another.
        notes: what a person should hear.
    """

    queries: Embeddings
    gallery: Embeddings
    own: Tensor
    classes: tuple[Tensor, Tensor]
    alone: bool
    notes: list[str]

    @property
    def one_set(self) -> bool:
        """Whether the queries search one another by the same vectors: refined ones may differ on the two sides."""
        return self.alone and self.queries.vectors is self.gallery.vectors


def search_of(queries: Embeddings, gallery: Embeddings | None, truth: GroundTruth | None) -> Search:
    if gallery is None:
        if truth is not None:
            raise SettingError(
                "gallery", "give gallery=...: the queries of the revisited protocol are not among its database images"
            )
        labels = classes_apart(queries)
        return Search(queries, queries, torch.arange(len(queries)), (labels, labels), True, [])
    queries, gallery = comparable_pair(queries, gallery)
    notes = differences(queries, gallery)
    if truth is None:
        own, said = own_places(queries, gallery)
        notes += said
    else:  # says itself what is junk to whom
        queries, gallery = _in_order(queries, truth.queries, "queries"), _in_order(gallery, truth.images, "database")
        own = torch.full((len(queries),), -1)
    return Search(queries, gallery, own, (classes_apart(queries), classes_apart(gallery, True)), False, notes)


def search_after(search: Search, refinement: Refinement) -> Search:
    queries, gallery = refinement.vectors(
        search.queries.vectors, search.gallery.vectors, search.own.to(search.queries.vectors.device)
    )
    return dataclasses.replace(
        search,
        queries=dataclasses.replace(search.queries, vectors=queries),
        gallery=dataclasses.replace(search.gallery, vectors=gallery),
        notes=[*search.notes, refinement.words()],
    )


def _in_order(embeddings: Embeddings, names: Sequence[str], what: str) -> Embeddings:
    """Rows in the order of the ground truth, where both have names; else they must stand in it already."""
    if embeddings.ids is None or not names:
        return embeddings
    place = {name: i for i, name in enumerate(embeddings.ids)}
    if missing := [name for name in names if name not in place]:
        raise ValueError(
            f"the {what} embeddings lack {len(missing)} images of the ground truth, the first {missing[0]!r}; "
            "their ids must be the names of its image list"
        )
    return embeddings.select(torch.tensor([place[name] for name in names]))
