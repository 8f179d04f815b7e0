"""A page with queries and what models retrieve for them: one HTML file that needs nothing beside itself.

Nobody picks the queries. A fixed sample of them is ranked by its AP@R under one model; the page shows the best, the
worst, and some evenly spaced in between, each with the answers of every model below one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from roadmap.atomic import whole_file
from roadmap.data import UNLABELLED, Pack, Records, picture, picture_key
from roadmap.data.pictures.images import Pixels
from roadmap.data.records import Floats, Ints
from roadmap.embeddings import Embeddings
from roadmap.evaluation import query_index, retrieval_evaluation
from roadmap.metrics import retrieval_metrics
from roadmap.metrics.vectors import unit_vectors
from roadmap.report.retrievals_html import Answer, Answers, Question, document

GROUPS = ("The best", "In between", "The worst")


@dataclass(frozen=True, eq=False)
class Collection:
    """Pictures, and the vectors that each model gives them.

    Attributes:
        models: name -> embeddings, all of the same pictures in the same order, which is that of `records`; where
            the embeddings have ids, by which each finds its record, pictures may be missing.
        records: what is known of the pictures.
        pictures: their pack, aligned with `records`; or what gives the pixels (H, W, 3) of record i; None reads files.
    """

    models: Mapping[str, Embeddings]
    records: Records
    pictures: Pack | Callable[[int], Pixels] | None = None

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a page needs the embeddings of at least one model, got none")
        for name, embeddings in self.models.items():
            if embeddings.ids != self.first.ids or not torch.equal(embeddings.labels.cpu(), self.first.labels.cpu()):
                raise ValueError(
                    f"the models must embed the same pictures in the same order, but {name!r} and "
                    f"{next(iter(self.models))!r} differ in labels or ids; embed both with the same records"
                )
        if not np.array_equal(self.records.labels[self.places], self.labels):
            raise ValueError(f"the labels of the embeddings are not those of the records of {self.records.name}")

    @property
    def first(self) -> Embeddings:
        return next(iter(self.models.values()))

    @property
    def labels(self) -> Ints:
        return self.first.labels.cpu().numpy()

    @cached_property
    def places(self) -> Ints:
        """(N,) the record of each embedding."""
        if self.first.ids is None:
            if len(self.first) != len(self.records):
                raise ValueError(
                    f"{len(self.first)} embeddings without ids cannot be matched to {len(self.records)} records; "
                    "give ids, or embed every picture"
                )
            return np.arange(len(self.records))
        index = {picture_key(self.records, i): i for i in range(len(self.records))}
        if missing := [name for name in self.first.ids if name not in index]:
            raise ValueError(f"{len(missing)} embeddings are of no picture of {self.records.name}: {missing[0]!r}, ...")
        return np.asarray([index[name] for name in self.first.ids], dtype=np.int64)

    def pixels(self, row: int) -> Pixels:
        """(H, W, 3) of the picture whose embedding is `row`."""
        place = int(self.places[row])
        if self.pictures is None:
            return picture(self.records.path(place), self.records.box(place))
        return self.pictures.picture(place) if isinstance(self.pictures, Pack) else self.pictures(place)

    def class_name(self, row: int) -> str:
        label = int(self.labels[row])
        if label == UNLABELLED:
            return "unlabelled"
        return self.records.class_names[label] if self.records.class_names else str(label)


def retrieval_page(
    path: Path,
    title: str,
    queries: Collection,
    gallery: Collection | None = None,
    *,
    metrics: Mapping[str, Mapping[str, float]] | None = None,
    ranked_by: str | None = None,
    rows: int = 24,
    nearest: int = 10,
    sample: int = 512,
) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the .html file.
        title: of the page.
        queries: what is asked, with one or several models to compare.
        gallery: what is searched, with the same models; None: the queries search each other. A query never finds
            itself: by its place among the queries, by its id in a gallery.
        metrics: model -> metrics as `retrieval_evaluation` gives them, for the table; None computes them.
        ranked_by: the model whose AP@R ranks the sample; None for the last one.
        rows: queries shown: a quarter of them the best, a quarter the worst, the rest in between.
        nearest: how many answers each model gives.
        sample: queries that are looked at, evenly spaced.
    """
    searched = queries if gallery is None else gallery
    names = list(queries.models)
    judge = names[-1] if ranked_by is None else ranked_by
    if judge not in names or list(searched.models) != names:
        raise ValueError(
            f"ranked_by must be one of the models {names} and the gallery must have the same ones, "
            f"got {judge!r} and {list(searched.models)}"
        )
    if min(rows, nearest, sample) < 1:
        raise ValueError(f"rows, nearest and sample must be at least 1, got {rows}, {nearest} and {sample}")
    looked_at = sampled(queries.labels, sample, rows)
    groups = grouped(looked_at, average_precisions(queries, gallery, judge, looked_at), rows)
    if not any(map(len, groups)):
        raise ValueError(f"none of the {len(looked_at)} queries looked at has another picture of its class to find")
    questions = _questions(queries, gallery, groups, nearest)
    if metrics is None:
        metrics = {
            name: retrieval_evaluation(queries.models[name], None if gallery is None else gallery.models[name])
            for name in names
        }
    text = document(title, _about(queries, searched, looked_at, judge, groups), metrics, questions)
    with whole_file(Path(path)) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def sampled(labels: Ints, sample: int, rows: int) -> Ints:
    """Places of at most `sample` labelled queries, evenly spaced; one per class where that leaves enough rows."""
    labelled = np.flatnonzero(labels != UNLABELLED)
    count = min(sample, len(labelled))
    spaced = labelled[(np.arange(count) * 2 + 1) * len(labelled) // (2 * count)] if count else labelled
    first = np.sort(np.unique(labels[spaced], return_index=True)[1])
    return spaced[first] if len(first) >= rows else spaced


def grouped(candidates: Ints, ap: Floats, rows: int) -> list[Ints]:
    """The best, some in between and the worst of the candidates, each from high to low; NaN takes no part.

    Equal values keep the order of the candidates. A quarter of the rows each for best and worst.
    """
    judged = ~np.isnan(ap)
    order = candidates[judged][np.argsort(-ap[judged], kind="stable")]
    rows = min(rows, len(order))
    best, worst = (rows + 3) // 4, (rows + 1) // 4
    middle, between = order[best : len(order) - worst], rows - best - worst
    spaced = (np.arange(between) * 2 + 1) * len(middle) // (2 * between) if between else np.arange(0)
    return [order[:best], middle[spaced], order[len(order) - worst :]]


def average_precisions(queries: Collection, gallery: Collection | None, model: str, chosen: Ints) -> Floats:
    """(len(chosen),) AP@R of the chosen queries under a model; NaN for one without positives."""
    searched = queries if gallery is None else gallery
    asked, found = queries.models[model], searched.models[model]
    if not len(chosen):
        return np.empty(0)
    _, values = retrieval_metrics(
        asked.vectors[chosen],
        asked.labels[chosen],
        found.vectors,
        found.labels,
        ks=(1,),
        query_index=_own_places(queries, gallery)[chosen],
        per_query=True,
        progress=False,
    )
    return values["mAP@R"].numpy()


def nearest_items(queries: Tensor, gallery: Tensor, own: Ints, nearest: int) -> tuple[Ints, Floats]:
    """The `nearest` gallery items of each query by cosine, and their scores: (M, k) each; equal scores by place.

    Args:
        queries: (M, D) unit vectors; all M rows of scores are held at once.
        gallery: (N, D) unit vectors.
        own: (M,) the gallery item that is the query itself and is left out, or -1.
    """
    scores = queries @ gallery.T
    is_own = torch.from_numpy(own).to(scores.device)[:, None] == torch.arange(len(gallery), device=scores.device)
    scores, order = scores.masked_fill(is_own, -torch.inf).sort(dim=1, descending=True, stable=True)
    count = min(nearest, len(gallery) - int((own >= 0).any()))
    return order[:, :count].cpu().numpy(), scores[:, :count].double().cpu().numpy()


def _own_places(queries: Collection, gallery: Collection | None) -> Ints:
    """(M,) where each query stands in what is searched, or -1."""
    if gallery is None:
        return np.arange(len(queries.first))
    places = query_index(queries.first, gallery.first)
    return np.full(len(queries.first), -1) if places is None else places.numpy()


def _questions(
    queries: Collection, gallery: Collection | None, groups: list[Ints], nearest: int
) -> list[tuple[str, list[Question]]]:
    """Every group's name, and its queries with the answers of all models."""
    searched = queries if gallery is None else gallery
    chosen = np.concatenate(groups)
    own = _own_places(queries, gallery)[chosen]
    relevant = (searched.labels == queries.labels[chosen, None]).sum(1) - (own >= 0)
    by_model = [_answers(queries, gallery, model, chosen, nearest) for model in queries.models]
    questions = [
        Question(queries.pixels(row), queries.class_name(row), count, answers)
        for row, count, *answers in zip(chosen.tolist(), relevant.tolist(), *by_model, strict=True)
    ]
    ends = np.cumsum([len(group) for group in groups])
    return [(name, questions[end - len(g) : end]) for name, g, end in zip(GROUPS, groups, ends, strict=True) if len(g)]


def _answers(queries: Collection, gallery: Collection | None, model: str, chosen: Ints, nearest: int) -> list[Answers]:
    """What one model retrieves for each of the chosen queries."""
    searched = queries if gallery is None else gallery
    found, scores = nearest_items(
        unit_vectors(queries.models[model].vectors[chosen], "queries"),
        unit_vectors(searched.models[model].vectors, "gallery"),
        _own_places(queries, gallery)[chosen],
        nearest,
    )
    precisions = average_precisions(queries, gallery, model, chosen)
    right = searched.labels[found] == queries.labels[chosen, None]
    return [
        Answers(
            model,
            float(precision),
            [
                Answer(searched.pixels(item), searched.class_name(item), score, same)
                for item, score, same in zip(found[i].tolist(), scores[i].tolist(), right[i].tolist(), strict=True)
            ],
        )
        for i, precision in enumerate(precisions)
    ]


def _about(queries: Collection, searched: Collection, looked_at: Ints, judge: str, groups: list[Ints]) -> str:
    """How the queries came onto the page, in words."""
    best, between, worst = map(len, groups)
    where = "each other" if searched is queries else f"{len(searched.first):,} others"
    return (
        f"{queries.records.name}: {len(queries.first):,} pictures search {where}. Of {len(looked_at)} evenly spaced "
        f"queries, ranked by their AP@R under {judge}: the best {best}, {between} evenly spaced in between, and the "
        f"worst {worst}. Nobody picked them."
    )
