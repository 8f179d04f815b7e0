"""Which queries a report shows: by rule, never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roadmap.data.records import Floats, Ints
from roadmap.evaluation import Evaluation

JUDGED_BY, FIRST = "mAP@R", "P@1"


@dataclass(frozen=True, eq=False)
class Choice:
    """Queries for a page.

    Attributes:
        title: what they are.
        about: how they were chosen, in words.
        rows: of the evaluation, in the order in which they are shown.
        models: whose answers stand beside them.
    """

    title: str
    about: str
    rows: Ints
    models: tuple[str, ...]


def random_rows(evaluation: Evaluation, count: int, seed: int = 0) -> Ints:
    """Drawn from all queries that have something to find, in the order of the draw."""
    judged = np.flatnonzero(~np.isnan(_precisions(evaluation)))
    found: Ints = np.random.default_rng(seed).permutation(judged)[:count]
    return found


def hardest_rows(evaluation: Evaluation, count: int) -> Ints:
    """Of each class the query with the lowest AP@R; the lowest of these first."""
    return _one_of_each_class(evaluation, -_precisions(evaluation), count)


def improved_rows(before: Evaluation, after: Evaluation, count: int) -> Ints:
    """Of each class the query whose AP@R grew most; the largest growth first, and only growth."""
    gain = _precisions(after) - _precisions(before)
    return _one_of_each_class(after, np.where(gain > 0, gain, np.nan), count)


def corrected(wrong: Evaluation, right: Evaluation) -> NDArray[np.bool_]:
    """(M,) where the first answer of one is of another class, and that of the other is not, as in Fig. 7."""
    first, second = (evaluation.per_query[FIRST].numpy() for evaluation in (wrong, right))
    found: NDArray[np.bool_] = (first <= 0) & (second >= 1)
    return found


def corrected_rows(wrong: Evaluation, right: Evaluation, count: int) -> Ints:
    """Of each class the corrected query whose AP@R grew most; the largest growth first."""
    gain = _precisions(right) - _precisions(wrong)
    return _one_of_each_class(right, np.where(corrected(wrong, right), gain, np.nan), count)


def _precisions(evaluation: Evaluation) -> Floats:
    found: Floats = evaluation.per_query[JUDGED_BY].numpy().astype(np.float64)
    return found


def _one_of_each_class(evaluation: Evaluation, merits: Floats, count: int) -> Ints:
    """The highest merits first, NaN never; equal ones keep their order."""
    order = np.argsort(-merits, kind="stable")
    order = order[~np.isnan(merits[order])]
    _, first = np.unique(evaluation.labels.numpy()[order], return_index=True)
    found: Ints = order[np.sort(first)][:count]
    return found


def choices(
    runs: Sequence[tuple[str, Evaluation]], before: Evaluation | None, before_name: str, count: int
) -> list[Choice]:
    """The groups of a page: random, hardest, most improved, and where one run corrects the other.

    Args:
        runs: names and evaluations, the first of which judges.
        before: of the first run, before training, where it is known.
        before_name: what it is called on the page.
        count: queries in each group.
    """
    name, first = runs[0]
    names = tuple(run for run, _ in runs)
    found = [
        Choice("Random", "Drawn by a random generator from all queries.", random_rows(first, count), names),
        Choice(
            "Hardest",
            f"Of each class the query with the lowest AP@R under {name}; the lowest of these.",
            hardest_rows(first, count),
            names,
        ),
    ]
    if before is not None:
        about = f"Of each class the query whose AP@R grew most in the training of {name}; the largest growth first."
        found.append(Choice("Most improved", about, improved_rows(before, first, count), (before_name, *names)))
    for other, evaluation in runs[1:]:
        for (better, right), (worse, wrong) in (
            ((name, first), (other, evaluation)),
            ((other, evaluation), (name, first)),
        ):
            number = int(corrected(wrong, right).sum())
            about = (
                f"For {number:,} of {len(right.labels):,} queries the first answer of {better} is right and that of "
                f"{worse} is wrong. Of each class the one whose AP@R differs most."
            )
            rows = corrected_rows(wrong, right, count)
            found.append(Choice(f"{better} corrects {worse}", about, rows, (better, worse)))
    return [choice for choice in found if len(choice.rows)]
