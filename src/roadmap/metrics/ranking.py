"""Recall@k, mAP@R, mAP (Eq 1) and their kin: exact, streamed in tiles, on the device that holds the vectors.

Every one of these metrics follows from the ranks of the positives, and a rank is a count: nothing is sorted but the
few positives of a query, and no (M, N) matrix exists. See docs/metrics.md for definitions, ties and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, overload

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from roadmap.kernels.counts import counts_at_least, implementation, pair_scores
from roadmap.kernels.tiled_counts import working_bytes
from roadmap.metrics.counted import PositiveCounts, Ties, check_ties, query_value_names, query_values
from roadmap.metrics.labels import Labels, class_numbers
from roadmap.metrics.relevance import Exclusions, Ignored, exclusions, relevance
from roadmap.metrics.vectors import Vectors, unit_queries_and_gallery, unit_vectors

# Bytes that the tables of one chunk of queries take for each of their places (measured: about 120).
CELL_BYTES = 160
QUERIES_AT_ONCE = 65_536


@overload
def retrieval_metrics(
    queries: Vectors,
    query_labels: Labels,
    gallery: Vectors | None = ...,
    gallery_labels: Labels | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    query_index: Tensor | ArrayLike | None = ...,
    ignore: Ignored | None = ...,
    ties: Ties = ...,
    per_query: Literal[False] = ...,
    memory: int = ...,
    progress: bool | None = ...,
) -> dict[str, float]: ...


@overload
def retrieval_metrics(
    queries: Vectors,
    query_labels: Labels,
    gallery: Vectors | None = ...,
    gallery_labels: Labels | None = ...,
    ks: int | Sequence[int] = ...,
    *,
    query_index: Tensor | ArrayLike | None = ...,
    ignore: Ignored | None = ...,
    ties: Ties = ...,
    per_query: Literal[True],
    memory: int = ...,
    progress: bool | None = ...,
) -> tuple[dict[str, float], dict[str, Tensor]]: ...


@torch.no_grad()
def retrieval_metrics(
    queries: Vectors,
    query_labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    ks: int | Sequence[int] = (1, 2, 4, 8),
    *,
    query_index: Tensor | ArrayLike | None = None,
    ignore: Ignored | None = None,
    ties: Ties = "pessimistic",
    per_query: bool = False,
    memory: int = 512 << 20,
    progress: bool | None = None,
) -> dict[str, float] | tuple[dict[str, float], dict[str, Tensor]]:
    """Means over the queries of Recall@k, P@1, R-precision, mAP@R, mAP (Eq 1) and the AP loss 1 - mAP.

    Scores are cosines, computed in float32 (float64 for float64 vectors) whatever precision is set for training.

    Args:
        queries: (M, D) vectors of any float type, normalised here.
        query_labels: (M,) integers or strings.
        gallery: (N, D) vectors; None: the queries are the gallery and each leaves its own ranking, by index.
        gallery_labels: (N,) of the same kind; the positives of a query are the gallery items with its label.
        ks: the k of Recall@k, one or several; one larger than the gallery counts the whole gallery.
        query_index: (M,) the gallery index of the item that is the query itself, to leave its ranking; -1: none.
        ignore: for each query the gallery indices that leave its ranking (junk): neither positive nor negative.
        ties: "pessimistic": equal scores count against the query (Eq 1's H(0) = 1); "mean": the expectation over all
            orders of the tied items. Neither depends on the order of the input.
        per_query: return also the values of each query, (M,) float64, NaN for a query without positives.
        memory: bytes to work in, beside the normalised copies of the vectors.
        progress: show a bar (needs tqdm); None: when the work takes long and someone is watching.

    Returns:
        {"R@1": ..., "P@1", "R-precision", "mAP@R", "mAP", "AP loss", "queries": M, "queries_without_positives": n};
        the n queries without positives do not enter the means, which are NaN when no query has any.
        With `per_query`, a pair: that dict, and the values of each query.
    """
    check_ties(ties)
    ks = whole_numbers(ks)
    check_pair(gallery, gallery_labels, "gallery_labels")
    q, g, excluded = vectors_and_exclusions(queries, gallery, query_index, ignore)
    wanted = relevance(*class_numbers(query_labels, len(q), gallery_labels, len(g), q.device), excluded)
    values = {name: q.new_full((len(q),), torch.nan, dtype=torch.float64) for name in query_value_names(ks)}
    with progress_bar(int((wanted.positives > 0).sum()), progress) as advance:
        for some in wanted.chunks(*chunk_limits(memory, q, g)):
            own = some if gallery is None else None
            counts = positive_counts_of(q[some], g, *wanted.columns(some), ties, own, advance)
            for name, value in query_values(counts, ks, ties).items():
                values[name][some] = value
    summary = means_of(values, wanted.positives > 0)
    return (summary, {name: value.cpu() for name, value in values.items()}) if per_query else summary


def check_pair(gallery: object, labels: object, name: str) -> None:
    """A gallery comes with its labels, or neither comes."""
    if (gallery is None) != (labels is None):
        given, missing = ("gallery", name) if labels is None else (name, "gallery")
        raise ValueError(f"{given} came without {missing}; give both, or neither to search among the queries")


def vectors_and_exclusions(
    queries: Vectors, gallery: Vectors | None, query_index: Tensor | ArrayLike | None, ignore: Ignored | None
) -> tuple[Tensor, Tensor, Exclusions]:
    """Checked unit vectors of queries and gallery, and who leaves whose ranking."""
    if gallery is None:
        if query_index is not None:
            raise ValueError("query_index came without a gallery; among the queries each one leaves its own ranking")
        q = g = unit_vectors(queries, "queries")
        own: Tensor | None = torch.arange(len(q), device=q.device)
    else:
        q, g = unit_queries_and_gallery(queries, gallery)
        own = None if query_index is None else torch.as_tensor(query_index)
    return q, g, exclusions(len(q), len(g), own, ignore, q.device)


def positive_counts_of(
    queries: Tensor,
    gallery: Tensor,
    columns: Tensor,
    excluded: Tensor,
    ties: Ties = "pessimistic",
    own: Tensor | None = None,
    advance: Callable[[int], object] = lambda queries_done: None,
) -> PositiveCounts:
    """Counts for given positives in the rankings of n queries.

    Args:
        queries: (n, D) unit vectors.
        gallery: (N, D) unit vectors of the same type on the same device.
        columns: (n, P) gallery indices of each query's positives; -1: none.
        excluded: (n, E) gallery indices that leave each ranking, distinct and no positives of the query; -1: none.
        ties: "mean" asks for the counts of strictly higher negatives also.
        own: (n,) distinct gallery indices of the queries, where all are gallery items: spares nearly half the products.
        advance: told of queries done.
    """
    return counts_and_order(queries, gallery, columns, excluded, ties, own, advance)[0]


def counts_and_order(
    queries: Tensor,
    gallery: Tensor,
    columns: Tensor,
    excluded: Tensor,
    ties: Ties = "pessimistic",
    own: Tensor | None = None,
    advance: Callable[[int], object] = lambda queries_done: None,
) -> tuple[PositiveCounts, Tensor]:
    """As `positive_counts_of`, and (n, P) which column each positive is; equal scores keep the order of the columns."""
    both = ties == "mean"
    impl = implementation(queries, (1 + both) * columns.shape[1])
    wanted = pair_scores(queries, gallery, torch.cat([columns, excluded], dim=1), impl)
    scores, order = wanted[:, : columns.shape[1]].sort(dim=1, descending=True, stable=True)
    left_out = wanted[:, columns.shape[1] :].sort(dim=1, descending=True).values
    valid = scores > -torch.inf
    most = int(valid.sum(1).max())  # fewer than the columns where excluded items left
    scores, valid = scores[:, :most].contiguous(), valid[:, :most]
    thresholds = torch.where(valid, scores, torch.inf)
    if both:  # s > t is s >= the next float after t: one pass counts both
        infinity = thresholds.new_tensor(torch.inf)
        thresholds = torch.cat([thresholds, torch.nextafter(thresholds, infinity)], dim=1)
    everyone = counts_at_least(queries, gallery, thresholds, impl, own, advance)

    # Of those, the positives and the excluded items are not negatives. Rows descend, so their negatives ascend.
    falling, falling_out = -scores, -left_out
    positives_at_least = torch.searchsorted(falling, falling, right=True)
    positives_above = torch.searchsorted(falling, falling, right=False)
    at_least = everyone[:, :most] - positives_at_least - torch.searchsorted(falling_out, falling, right=True)
    above = None
    if both:
        above = everyone[:, most:] - positives_above - torch.searchsorted(falling_out, falling, right=False)
    return PositiveCounts(valid, positives_at_least, positives_above, at_least, above), order[:, :most]


def means_of(values: dict[str, Tensor], counted: Tensor) -> dict[str, float]:
    """Means over the queries that count. Values are added in ascending order, so that the order of the queries does
    not show."""
    number = int(counted.sum())
    summary: dict[str, float] = {
        name: value[counted].sort().values.mean().item() if number else math.nan for name, value in values.items()
    }
    return summary | {"queries": len(counted), "queries_without_positives": len(counted) - number}


def whole_numbers(ks: int | Sequence[int]) -> tuple[int, ...]:
    """The k to report, each once; a single number is one of them."""
    try:
        several = list(ks) if isinstance(ks, Iterable) else [ks]
        checked = [int(k) for k in several]
        if isinstance(ks, (str, bool)) or any(k < 1 or k != given for k, given in zip(checked, several, strict=True)):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"ks must be whole numbers of at least 1, such as 10 or (1, 10), got {ks!r}") from None
    return tuple(dict.fromkeys(checked))


def chunk_limits(
    memory: int, queries: Tensor, gallery: Tensor, cell_bytes: int = CELL_BYTES, label_bytes: int = 0
) -> tuple[int, int]:
    """Places in the tables of a chunk, and queries in a chunk, that fit into `memory` bytes."""
    fixed = working_bytes(gallery)
    row = 2 * queries.shape[1] * queries.element_size() + label_bytes  # a query, gathered
    free = memory - fixed
    if free < cell_bytes * 64 + row:
        raise ValueError(
            f"memory must be at least {fixed + cell_bytes * 64 + row} bytes for vectors of {queries.shape[1]} "
            f"dimensions, got {memory}"
        )
    return free // 2 // cell_bytes, max(1, min(QUERIES_AT_ONCE, free // 2 // row))


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[int], object]]:
    """What to tell of queries done: a progress bar, or nobody."""
    if wanted is False:
        yield lambda done: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if wanted:
            raise ImportError("progress=True needs tqdm: pip install tqdm") from None
        yield lambda done: None
        return
    # unasked, only a terminal that has waited five seconds sees it
    with tqdm(total=total, unit="query", delay=0 if wanted else 5, disable=None if wanted is None else False) as bar:
        yield bar.update
