"""The revisited Oxford and Paris protocol (Radenović et al., CVPR 2018): Easy, Medium, Hard; junk; trapezoidal AP.

For each query the database images are labelled easy, hard or junk; all others are negatives. A setting says which
labels are positive; the other labels leave the ranking:

    Easy: easy positive, hard and junk leave.  Medium: easy and hard positive, junk leaves.  Hard: the mirror of Easy.

Its AP is the area under the precision-recall curve by the trapezoidal rule: another number than Eq 1's AP, and so
another name here. `mP@k` is the precision among the first k, or up to the last positive where that comes before k.
Queries without positives in a setting stay out of its means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from roadmap.metrics.ranking import positive_counts_of
from roadmap.metrics.vectors import Vectors, unit_queries_and_gallery
from roadmap.plain_pickle import plain_content

KS = (1, 5, 10)
POSITIVE_IN = {"easy": ("easy",), "medium": ("easy", "hard"), "hard": ("hard",)}
LABELS = ("easy", "hard", "junk")
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class GroundTruth:
    """What each query finds easy, hard or junk, as database indices; names where the source gives them."""

    easy: tuple[Indices, ...]
    hard: tuple[Indices, ...]
    junk: tuple[Indices, ...]
    images: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.easy) == len(self.hard) == len(self.junk):
            counts = {name: len(getattr(self, name)) for name in LABELS}
            raise ValueError(f"easy, hard and junk must each have one list per query, got {counts}")
        for i in range(len(self.easy)):
            labelled = np.concatenate([getattr(self, name)[i] for name in LABELS])
            if len(labelled) and labelled.min() < 0:
                raise ValueError(f"query {i} names the database image {labelled.min()}; they are counted from 0")
            if len(np.unique(labelled)) != len(labelled):
                raise ValueError(f"query {i} names a database image twice among easy, hard and junk")

    def split(self, setting: str, query: int) -> tuple[Indices, Indices]:
        """Positives of a query in a setting, and the labelled images that leave its ranking."""
        kept = POSITIVE_IN[setting]
        positives = [getattr(self, name)[query] for name in LABELS if name in kept]
        leaving = [getattr(self, name)[query] for name in LABELS if name not in kept]
        return np.concatenate(positives), np.concatenate(leaving)


def load_ground_truth(path: str | Path) -> GroundTruth:
    """Ground truth from a published file, gnd_roxford5k.pkl or gnd_rparis6k.pkl. No code in it is run."""
    content = plain_content(path)
    if not isinstance(content, dict) or "gnd" not in content:
        raise ValueError(f"{path} holds no ground truth: expected a dict with 'gnd', 'imlist' and 'qimlist'")
    per_query, images, queries = (content.get(part, []) for part in ("gnd", "imlist", "qimlist"))
    if not all(isinstance(part, (list, tuple, np.ndarray)) for part in (per_query, images, queries)):
        raise ValueError(f"{path} holds no ground truth: 'gnd', 'imlist' and 'qimlist' must be lists")
    for i, entry in enumerate(per_query):
        missing = [name for name in LABELS if not isinstance(entry, dict) or name not in entry]
        if missing:
            raise ValueError(f"{path}: query {i} has no {', '.join(missing)} list")
    try:
        easy, hard, junk = (
            tuple(np.asarray(entry[name], np.int64).reshape(-1) for entry in per_query) for name in LABELS
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no ground truth: easy, hard and junk are lists of numbers ({error})") from error
    return GroundTruth(easy, hard, junk, tuple(map(str, images)), tuple(map(str, queries)))


def trapezoidal_average_precision(ranks: ArrayLike) -> float:
    """Area under the precision-recall curve of one ranking by the trapezoidal rule.

    Args:
        ranks: zero-based ranks of all positives, ascending, junk already removed.

    Each positive, the j-th (from zero) at rank r, adds a step of 1/P in recall at the mean of the precisions before
    and after it: j / r (1 at rank 0) and (j + 1) / (r + 1).
    """
    r = np.asarray(ranks, np.float64)
    j = np.arange(len(r))
    before = np.divide(j, r, out=np.ones_like(r), where=r > 0)
    return math.fsum((before + (j + 1) / (r + 1)) / 2) / len(r)


def precision_among(ranks: ArrayLike, k: int) -> float:
    """P@k of one ranking, with k lowered to the place of the last positive. `ranks` as above."""
    place = np.asarray(ranks) + 1
    k = min(int(place.max()), k)
    return float((place <= k).sum() / k)


def revisited_metrics(rankings: ArrayLike | Tensor, truth: GroundTruth) -> dict[str, dict[str, float]]:
    """Easy, Medium and Hard from whole rankings.

    Args:
        rankings: (Q, N) database indices, best first: each row names every image once.
        truth: labels of the same Q queries.

    Returns:
        {"easy": {"trapezoidal mAP", "mP@1", "mP@5", "mP@10", "queries", "queries_without_positives"}, ...}
    """
    order = np.asarray(rankings.cpu() if isinstance(rankings, Tensor) else rankings)
    if order.ndim != 2 or len(order) != len(truth.easy):
        raise ValueError(f"rankings must have shape ({len(truth.easy)}, N), a row for each query, got {order.shape}")
    place = np.empty_like(order)
    for i, row in enumerate(order):
        if not np.array_equal(np.sort(row), np.arange(order.shape[1])):
            raise ValueError(f"ranking {i} must name each of {order.shape[1]} database images once")
        place[i, row] = np.arange(len(row))
    _check_size(truth, order.shape[1])

    def ranks(setting: str) -> list[Indices]:
        found = []
        for i in range(len(order)):
            positives, leaving = (np.sort(place[i, items]) for items in truth.split(setting, i))
            found.append(positives - np.searchsorted(leaving, positives))  # those that leave make room
        return found

    return {setting: _setting_means(ranks(setting)) for setting in POSITIVE_IN}


@overload
def revisited_metrics_of_vectors(
    queries: Vectors, database: Vectors, truth: GroundTruth, per_query: Literal[False] = ...
) -> dict[str, dict[str, float]]: ...


@overload
def revisited_metrics_of_vectors(
    queries: Vectors, database: Vectors, truth: GroundTruth, per_query: Literal[True]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Tensor]]]: ...


@torch.no_grad()
def revisited_metrics_of_vectors(
    queries: Vectors, database: Vectors, truth: GroundTruth, per_query: bool = False
) -> dict[str, dict[str, float]] | tuple[dict[str, dict[str, float]], dict[str, dict[str, Tensor]]]:
    """The same from vectors (Q, D) and (N, D), by cosine; a negative that ties with a positive comes before it.

    Of any float types: scores are float64 where one of the two came as float64, else float32. With `per_query`, a pair:
    that dict, and the values of each query, (Q,) float64, NaN for one without positives.
    """
    q, g = unit_queries_and_gallery(queries, database, "database")
    if len(q) != len(truth.easy):
        raise ValueError(f"queries must be {len(truth.easy)}, as many as the ground truth has, got {len(q)}")
    _check_size(truth, len(g))

    def ranks(setting: str) -> list[Indices]:
        split = [truth.split(setting, i) for i in range(len(q))]
        columns, excluded = (_index_table([pair[part] for pair in split], q.device) for part in (0, 1))
        counts = positive_counts_of(q, g, columns, excluded)
        rank = torch.arange(counts.valid.shape[1], device=q.device) + counts.negatives_at_least
        return [row[valid].cpu().numpy() for row, valid in zip(rank, counts.valid, strict=True)]

    found = {setting: ranks(setting) for setting in POSITIVE_IN}
    means = {setting: _setting_means(some) for setting, some in found.items()}
    return (means, {setting: _query_values(some) for setting, some in found.items()}) if per_query else means


def _query_values(ranks: Sequence[Indices]) -> dict[str, Tensor]:
    def values(measure: Callable[[Indices], float]) -> Tensor:
        return torch.tensor([measure(some) if len(some) else math.nan for some in ranks], dtype=torch.float64)

    precisions = {f"mP@{k}": values(lambda some, k=k: precision_among(some, k)) for k in KS}  # type: ignore[misc]
    return {"trapezoidal mAP": values(trapezoidal_average_precision), **precisions}


def _setting_means(ranks: Sequence[Indices]) -> dict[str, float]:
    counted = [some for some in ranks if len(some)]
    number = len(counted)
    sums = {"trapezoidal mAP": math.fsum(trapezoidal_average_precision(some) for some in counted)}
    sums |= {f"mP@{k}": math.fsum(precision_among(some, k) for some in counted) for k in KS}
    means = {name: total / number if number else math.nan for name, total in sums.items()}
    return means | {"queries": len(ranks), "queries_without_positives": len(ranks) - number}


def _check_size(truth: GroundTruth, database: int) -> None:
    largest = max((int(items.max()) for name in LABELS for items in getattr(truth, name) if len(items)), default=-1)
    if largest >= database or (truth.images and len(truth.images) != database):
        expected = len(truth.images) or f"at least {largest + 1}"
        raise ValueError(f"the ground truth is for {expected} database images, got {database}")


def _index_table(lists: Sequence[Indices], device: torch.device) -> Tensor:
    """(Q, most) with -1 after the end of each list."""
    table = torch.full((len(lists), max(map(len, lists))), -1, dtype=torch.int64)
    for row, items in zip(table, lists, strict=True):
        row[: len(items)] = torch.from_numpy(items)
    return table.to(device)
