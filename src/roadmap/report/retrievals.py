"""A page with queries and what models retrieve for them: one HTML file that needs nothing beside itself.

Nobody picks the queries. Every class takes its turn; those shown are ordered by their AP@R under one model, from the
best to the worst, each with the answers of every model below one another. Orders, scores and AP@R are those of the
evaluations: nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roadmap.atomic import whole_file
from roadmap.data import UNLABELLED, Pack, Records, picture, picture_key
from roadmap.data.pictures.images import Pixels
from roadmap.data.records import Floats, Ints
from roadmap.evaluation import Evaluation
from roadmap.names import printable
from roadmap.report.retrievals_html import Answer, Answers, Question, document

GROUPS = ("The best", "In between", "The worst")
JUDGED_BY = "mAP@R"


@dataclass(frozen=True, eq=False)
class Album:
    """The pictures of queries or of a gallery.

    Attributes:
        records: what is known of them.
        pictures: their pack; or what gives the pixels (H, W, 3) of record i; None reads files.
    """

    records: Records
    pictures: Pack | Callable[[int], Pixels] | None = None

    def places(self, ids: Sequence[str] | None, count: int) -> Ints:
        """(N,) the record of each embedded picture: by its id, or one after the other."""
        if ids is None:
            if count != len(self.records):
                raise ValueError(
                    f"{count} embeddings without ids cannot be matched to {len(self.records)} records; "
                    "give ids, or embed every picture"
                )
            return np.arange(count)
        index = {picture_key(self.records, i): i for i in range(len(self.records))}
        if missing := [name for name in ids if name not in index]:
            raise ValueError(f"{len(missing)} embeddings are of no picture of {self.records.name}: {missing[0]!r}, ...")
        return np.asarray([index[name] for name in ids], dtype=np.int64)


class Side:
    """The queries or the gallery of an evaluation, with their pictures."""

    def __init__(self, given: Album | Records, ids: Sequence[str] | None, labels: Ints) -> None:
        album = given if isinstance(given, Album) else Album(given)
        self.album, self.labels = album, labels
        self.places = album.places(ids, len(labels))
        self._pictures = album.pictures.of(album.records) if isinstance(album.pictures, Pack) else album.pictures
        if not np.array_equal(album.records.labels[self.places], labels):
            raise ValueError(f"the labels of the embeddings are not those of the records of {album.records.name}")

    def pixels(self, row: int) -> Pixels:
        """(H, W, 3)."""
        records, place = self.album.records, int(self.places[row])
        if self._pictures is None:
            return picture(records.path(place), records.box(place))
        return self._pictures.picture(place) if isinstance(self._pictures, Pack) else self._pictures(place)

    def file(self, row: int) -> str:
        return self.album.records.paths[int(self.places[row])]

    def class_name(self, row: int) -> str:
        label, names = int(self.labels[row]), self.album.records.class_names
        return "unlabelled" if label == UNLABELLED else names[label] if names else str(label)


def retrieval_page(
    path: Path,
    title: str,
    evaluations: Mapping[str, Evaluation],
    queries: Album | Records,
    gallery: Album | Records | None = None,
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
        evaluations: model -> what it retrieves, of the same pictures in the same order.
        queries: the pictures of the queries.
        gallery: those that were searched; None: the queries searched one another.
        metrics: model -> metrics for the table; None for those of the evaluations.
        ranked_by: the model whose AP@R orders the queries; None for the last one.
        rows: queries shown: a quarter of them the best, a quarter the worst, the rest in between.
        nearest: how many answers each model gives, at most.
        sample: classes that are looked at, evenly spaced.
    """
    names = list(evaluations)
    judge = (names or [""])[-1] if ranked_by is None else ranked_by
    if min(rows, nearest, sample) < 1:
        raise ValueError(f"rows, nearest and sample must be at least 1, got {rows}, {nearest} and {sample}")
    _check(evaluations, judge, gallery is None)
    first = evaluations[judge]
    asked = Side(queries, first.ids, first.labels.numpy())
    searched = asked if gallery is None else Side(gallery, first.gallery_ids, first.gallery_labels.numpy())
    precisions = first.per_query[JUDGED_BY].numpy()
    candidates = turns(asked.labels, precisions, rows, sample)
    groups = grouped(candidates, precisions, rows)
    if not any(map(len, groups)):
        raise ValueError(f"none of the {len(precisions)} queries looked at has another picture of its class to find")
    questions = _questions(evaluations, asked, searched, groups, nearest)
    if metrics is None:
        metrics = {name: evaluation.metrics for name, evaluation in evaluations.items()}
    text = document(title, _about(asked, searched, candidates, judge, groups), metrics, questions)
    with whole_file(Path(path)) as temporary:
        Path(temporary).write_text(printable(text), encoding="utf-8")


def _check(evaluations: Mapping[str, Evaluation], judge: str, alone: bool) -> None:
    """The evaluations are of the same pictures, and have what a page shows."""
    if not evaluations:
        raise ValueError("a page needs the evaluation of at least one model, got none")
    if judge not in evaluations:
        raise ValueError(f"ranked_by must be one of the models {list(evaluations)}, got {judge!r}")
    first = evaluations[judge]
    for name, other in evaluations.items():
        same = other.ids == first.ids and other.gallery_ids == first.gallery_ids
        labels = (
            np.array_equal(getattr(other, part).numpy(), getattr(first, part).numpy())
            for part in ("labels", "gallery_labels")
        )
        if not same or not all(labels):
            raise ValueError(
                f"the models must embed the same pictures in the same order, but {name!r} and {judge!r} differ in "
                "labels or ids; evaluate both with the same records"
            )
        if JUDGED_BY not in other.per_query:
            raise ValueError(f"{name!r} has no AP@R of its queries: landmarks have easy, hard and junk answers")
        if not other.neighbours.shape[1]:
            raise ValueError(f"the evaluation of {name!r} kept no neighbours; evaluate with nearest=10")
    if alone and len(first.gallery_labels) != len(first.labels):
        raise ValueError("the queries were searched in a gallery: give its pictures too")


def turns(labels: Ints, precisions: Floats, rows: int, sample: int) -> list[Ints]:
    """Queries to show: in each turn one of every class, as many turns as `rows` take; only who has something to find.

    Classes are at most `sample`, evenly spaced; the queries of a class are evenly spaced too.
    """
    judged = np.flatnonzero((labels != UNLABELLED) & ~np.isnan(precisions))
    classes, first = np.unique(labels[judged], return_index=True)
    classes = _spaced(classes[np.argsort(first)], sample)
    members = [judged[labels[judged] == label] for label in classes.tolist()]
    number, most = 1, max(map(len, members), default=0)
    while number < most and sum(min(len(some), number) for some in members) < rows:
        number += 1
    taken = [_spaced(some, number) for some in members]
    return [np.asarray([some[turn] for some in taken if len(some) > turn], dtype=np.int64) for turn in range(number)]


def _spaced(items: Ints, count: int) -> Ints:
    """At most `count` of them, evenly spaced."""
    count = min(count, len(items))
    return items[(np.arange(count) * 2 + 1) * len(items) // (2 * count)] if count else items[:0]


def grouped(candidates: Sequence[Ints], precisions: Floats, rows: int) -> list[Ints]:
    """The best, those in between and the worst, each from high to low; no class comes again before all have come.

    All turns but the last are shown whole; of the last, what there is room for: a quarter of it the best, a quarter
    the worst, the rest evenly spaced in between. Equal values keep their order.
    """
    whole = [int(query) for turn in candidates[:-1] for query in turn]
    last = _descending(candidates[-1], precisions) if candidates else np.arange(0)
    best, between, worst = _parts(last, rows - len(whole))
    order = _descending(np.asarray([*whole, *best, *between, *worst], dtype=np.int64), precisions)
    top, bottom = (len(order) + 3) // 4, (len(order) + 1) // 4
    return [order[:top], order[top : len(order) - bottom], order[len(order) - bottom :]]


def _descending(queries: Ints, precisions: Floats) -> Ints:
    return queries[np.argsort(-precisions[queries], kind="stable")]


def _parts(order: Ints, rows: int) -> tuple[Ints, Ints, Ints]:
    """Of queries from high to low as many as `rows`: from both ends, and evenly spaced between them."""
    rows = min(rows, len(order))
    best, worst = (rows + 3) // 4, (rows + 1) // 4
    middle = order[best : len(order) - worst]
    return order[:best], _spaced(middle, rows - best - worst), order[len(order) - worst :]


def _questions(
    evaluations: Mapping[str, Evaluation], asked: Side, searched: Side, groups: list[Ints], nearest: int
) -> list[tuple[str, list[Question]]]:
    """Every group's name, and its queries with the answers of all models."""
    return [
        (name, [question(evaluations, asked, searched, row, nearest) for row in group.tolist()])
        for name, group in zip(GROUPS, groups, strict=True)
        if len(group)
    ]


def question(evaluations: Mapping[str, Evaluation], asked: Side, searched: Side, row: int, nearest: int) -> Question:
    """A query, and what every model retrieves for it."""
    first = next(iter(evaluations.values()))
    answers = [_answers(name, evaluation, asked, searched, row, nearest) for name, evaluation in evaluations.items()]
    return Question(asked.pixels(row), asked.class_name(row), asked.file(row), int(first.positives[row]), answers)


def _answers(name: str, evaluation: Evaluation, asked: Side, searched: Side, row: int, nearest: int) -> Answers:
    """What one model retrieves for a query."""
    places, scores = evaluation.neighbours[row, :nearest].tolist(), evaluation.scores[row, :nearest].tolist()
    items = [
        Answer(
            searched.pixels(item),
            searched.class_name(item),
            searched.file(item),
            score,
            bool(searched.labels[item] == asked.labels[row]),
        )
        for item, score in zip(places, scores, strict=True)
        if item >= 0
    ]
    return Answers(name, float(evaluation.per_query[JUDGED_BY][row]), items)


def _about(asked: Side, searched: Side, candidates: Sequence[Ints], judge: str, groups: list[Ints]) -> str:
    """How the queries came onto the page, in words."""
    best, between, worst = map(len, groups)
    where = "one another" if searched is asked else f"{len(searched.labels):,} others"
    of_each = "one query" if len(candidates) == 1 else f"up to {len(candidates)} queries"
    return (
        f"{asked.album.records.name}: {len(asked.labels):,} pictures search {where}. Each of {len(candidates[0]):,} "
        f"classes sends {of_each}; ranked by their AP@R under {judge}: the best {best}, {between} in between, and the "
        f"worst {worst}. Nobody picked them."
    )
