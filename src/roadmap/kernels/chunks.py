"""A rank loss from embeddings by plain torch, some queries at a time: bounded memory on any device.

The scores of a chunk of queries live only while the chunk is worked on. Where one chunk holds all of them they are kept
for the backward, with the derivative of AP; where not, the backward computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roadmap.kernels import blocked
from roadmap.kernels.calls import LossCall
from roadmap.kernels.directions import has_direction
from roadmap.kernels.precision import full_float32
from roadmap.kernels.rules import AP_COUNT, AP_SUM, NEG_COUNT, NEG_SUM, POS_COUNT, POS_SUM, TERMS, CalibrationRule
from roadmap.kernels.scores import embedding_gradient, score_rows, units_of

CHUNK_SCORES = 1 << 21  # scores held at once: 8 MiB of float32
FEWEST_ROWS = 16  # a product of fewer rows reads the whole gallery for next to nothing


def terms(call: LossCall, keep: bool) -> tuple[Tensor, Tensor]:
    """(TERMS,) sums and counts; and (bytes,) what the backward would otherwise compute again, if there will be one."""
    M, N = call.shape
    with torch.autocast(call.queries.device.type, enabled=False), full_float32():
        queries, gallery = units_of(call.queries, call.gallery)
        state = queries.vectors.new_empty(state_numbers(M, N) if keep else 0)
        total = queries.vectors.new_zeros(TERMS)
        for rows in _chunks(M, N):
            kept = state.view(2, M, N) if len(state) else None
            scores = score_rows(queries.vectors[rows], gallery, None if kept is None else kept[0])
            chunk = _Chunk(call, rows, scores)
            chunk.add_ranks(total, None if kept is None else kept[1])
            chunk.add_calibration(total)
    whole = has_direction(queries.lengths).all() & has_direction(gallery.lengths).all()
    total[AP_SUM::2] += torch.where(whole, 0.0, torch.nan).to(total.dtype)
    return total, state.view(torch.uint8)


def state_numbers(M: int, N: int) -> int:
    """How many numbers a forward keeps for its backward."""
    return 2 * M * N if M * N <= CHUNK_SCORES else 0


def gradients(
    call: LossCall, state: Tensor, upstream: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients at queries and gallery, where needed, from those at the terms. Without a gallery, both roles in one."""
    M, N = call.shape
    with torch.autocast(call.queries.device.type, enabled=False), full_float32():
        queries, gallery = units_of(call.queries, call.gallery, find_copies=not len(state))
        kept = state.view(queries.vectors.dtype).view(2, M, N) if len(state) else None
        for_queries = torch.zeros_like(queries.vectors) if needs[0] else None
        for_gallery = torch.zeros_like(gallery.vectors) if needs[1] or call.gallery is None else None
        for rows in _chunks(M, N):
            scores = score_rows(queries.vectors[rows], gallery) if kept is None else kept[0]
            weights = _Chunk(call, rows, scores).weights(upstream, None if kept is None else kept[1])
            if for_queries is not None:
                torch.mm(weights, gallery.vectors, out=for_queries[rows])
            if for_gallery is not None:
                for_gallery.addmm_(weights.T, queries.vectors[rows])
    if call.gallery is None:
        assert for_queries is not None
        assert for_gallery is not None
        return embedding_gradient(for_queries + for_gallery, queries, call.queries), None
    return (
        None if for_queries is None else embedding_gradient(for_queries, queries, call.queries),
        None if for_gallery is None else embedding_gradient(for_gallery, gallery, call.gallery),
    )


def _chunks(M: int, N: int) -> Iterator[slice]:
    height = max(FEWEST_ROWS, CHUNK_SCORES // max(N, 1))
    return (slice(top, min(top + height, M)) for top in range(0, M, height))


class _Chunk:
    """Some queries with their scores, (m, N), and who is whose positive and negative."""

    def __init__(self, call: LossCall, rows: slice, scores: Tensor) -> None:
        self.rule, self.scores = call.rule, scores
        same = call.query_labels[rows, None] == call.gallery_labels[None, :]
        self.negatives = ~same
        self.pairs = same  # with other items than the query itself
        if (own := call.own_columns) is not None:
            self.pairs = same & (torch.arange(scores.shape[1], device=scores.device) != own[rows, None])
        self.positives = same if self.rule.include_self else self.pairs

    def add_ranks(self, total: Tensor, slope: Tensor | None) -> None:
        """Adds the terms of AP, and writes its derivative where wanted."""
        if self.rule.ranks is None:
            return
        ap, found = blocked.ap_and_slope(
            self.scores, self.positives, self.negatives, self.rule.ranks, slope is not None
        )
        counted = self.positives.any(1)
        total[AP_SUM] += ((1 - ap) * counted).sum()
        total[AP_COUNT] += counted.sum()
        if slope is not None and found is not None:
            slope.copy_(found)

    def add_calibration(self, total: Tensor) -> None:
        if (rule := self.rule.calibration) is None:
            return
        for sum_at, count_at, hinge, pairs in (
            (POS_SUM, POS_COUNT, rule.alpha - self.scores, self.pairs),
            (NEG_SUM, NEG_COUNT, self.scores - rule.beta, self.negatives),
        ):
            violating = pairs & (hinge > 0)
            share = _share(rule, pairs, hinge.dtype)
            total[sum_at] += (torch.where(violating, hinge, 0.0) * share).sum()
            total[count_at] += (pairs.any(1) if rule.average == "all" else violating).sum()

    def weights(self, upstream: Tensor, slope: Tensor | None) -> Tensor:
        """∂L/∂s, (m, N), from the gradients at the terms."""
        weights = torch.zeros_like(self.scores)
        if (ranks := self.rule.ranks) is not None:
            if slope is None:
                _, slope = blocked.ap_and_slope(self.scores, self.positives, self.negatives, ranks, True)
            assert slope is not None
            weights -= upstream[AP_SUM] * slope
        if (rule := self.rule.calibration) is not None:
            below, above = self.pairs & (self.scores < rule.alpha), self.negatives & (self.scores > rule.beta)
            weights -= (upstream[POS_SUM] * _share(rule, self.pairs, weights.dtype)) * below
            weights += (upstream[NEG_SUM] * _share(rule, self.negatives, weights.dtype)) * above
        return weights


def _share(rule: CalibrationRule, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """What one pair counts for: one, or under Eq. (7) as printed its share of its query's pairs; (m, 1)."""
    size = pairs.sum(1, keepdim=True).clamp(min=1).to(dtype)
    return torch.ones_like(size) if rule.average == "violating" else size.reciprocal()
