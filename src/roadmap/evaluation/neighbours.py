"""The nearest gallery items of each query, by the very scores that the metrics rank by.

A plain product rounds a score by its place in the matrix: an order drawn from it could contradict the AP beside it. It
serves here to find candidates; `pair_scores`, whose scores depend on the two vectors alone, decides among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roadmap.kernels.counts import TRITON_THRESHOLDS, implementation, pair_scores
from roadmap.kernels.precision import full_float32
from roadmap.metrics.counted import Ties

CHUNK_BYTES = 64 << 20  # of scores held at once
MORE = 64  # candidates beside those that are wanted


@torch.no_grad()
def nearest_items(
    queries: Tensor, gallery: Tensor, own: Tensor, right: tuple[Tensor, Tensor] | None, count: int, ties: Ties
) -> tuple[Tensor, Tensor]:
    """(M, count) positions and scores, best first; -1 and -inf where the gallery has no more.

    Args:
        queries: (M, D) unit vectors, float32 or float64.
        gallery: (N, D) unit vectors of the same type, on the same device.
        own: (M,) the gallery item that is the query itself, or -1.
        right: labels of queries and gallery, by which equal scores are ordered; None orders them by place.
        count: items for each query.
        ties: "pessimistic": of equal scores, items of other classes come first, as the metrics count them.
    """
    count = min(count, len(gallery))
    places = torch.full((len(queries), count), -1, device=queries.device)
    scores = queries.new_full((len(queries), count), -torch.inf)
    if count == 0:
        return places, scores
    height = max(1, CHUNK_BYTES // (queries.element_size() * len(gallery)))
    for rows, width in _query_groups(right, len(queries), ties, queries.device):
        for some in torch.split(rows, height):
            labels = None if right is None else (right[0][some], right[1])
            impl = implementation(queries, width)
            candidates = _candidates(queries[some], gallery, own[some], count)
            exact = pair_scores(queries[some], gallery, candidates, impl)
            order = _order(exact, candidates, labels if ties == "pessimistic" else None)[:, :count]
            scores[some], places[some] = exact.gather(1, order), candidates.gather(1, order)
    return places, scores


def _query_groups(
    right: tuple[Tensor, Tensor] | None, queries: int, ties: Ties, device: torch.device
) -> list[tuple[Tensor, int]]:
    """Queries for which the metrics choose the same implementation, by their number of positives."""
    everyone = torch.arange(queries, device=device)
    if right is None:
        return [(everyone, 1)]
    labels, counts = torch.unique(right[1], return_counts=True)
    found = torch.searchsorted(labels, right[0]).clamp(max=len(labels) - 1)
    positives = torch.where(labels[found] == right[0], counts[found], 0)
    many = positives * (1 + (ties == "mean")) > TRITON_THRESHOLDS
    return [(everyone[~many], 1), (everyone[many], TRITON_THRESHOLDS + 1)]


def _candidates(queries: Tensor, gallery: Tensor, own: Tensor, count: int) -> Tensor:
    """(n, C) positions, ascending, among which the nearest `count` surely are; -1 for the query itself."""
    with full_float32():
        rough = queries @ gallery.T
    itself = own >= 0
    rough[itself.nonzero()[:, 0], own[itself]] = -torch.inf
    # two ways to add D products of unit vectors differ by no more than 2 D eps; each side of a comparison may be off
    slack = 4 * queries.shape[1] * torch.finfo(queries.dtype).eps
    width = min(len(gallery), count + MORE)
    while True:
        values, found = rough.topk(width, dim=1)
        if width == len(gallery) or bool((values[:, -1] < values[:, count - 1] - slack).all()):
            break
        width = min(len(gallery), 4 * width)
    return torch.where(values > -torch.inf, found, -1).sort(dim=1).values


def _order(scores: Tensor, candidates: Tensor, labels: tuple[Tensor, Tensor] | None) -> Tensor:
    """(n, C): from the highest score down; of equal ones items of other classes first, then by place."""
    if labels is None:
        return scores.sort(dim=1, descending=True, stable=True).indices
    right = labels[1][candidates.clamp(min=0)] == labels[0][:, None]
    first = right.to(torch.int8).sort(dim=1, stable=True).indices
    return first.gather(1, scores.gather(1, first).sort(dim=1, descending=True, stable=True).indices)
