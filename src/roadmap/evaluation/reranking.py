"""What is measured where the nearest are re-ranked: the new order first, then all others by their cosines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roadmap.kernels.precision import full_float32
from roadmap.metrics.counted import Ties, counts_of_scores, query_values
from roadmap.metrics.ranking import means_of
from roadmap.metrics.vectors import unit_vectors
from roadmap.refinement import reranked

ABOVE = 3.0  # added to the scores of those that are re-ranked, which lie in -1..1 as cosines do


class Reranking:
    """The first `count` of each query by k-reciprocal neighbours; the query itself is not among them.

    Args:
        own: (M,) where each query stands in the gallery, -1 for nowhere.
    """

    def __init__(self, queries: Tensor, gallery: Tensor, own: Tensor, count: int) -> None:
        self.queries, self.gallery = unit_vectors(queries, "queries"), unit_vectors(gallery, "gallery")
        self.own = own.to(self.queries.device)
        itself = int(bool((own >= 0).any()))
        count = min(count, len(gallery) - itself)
        self.scores, self.places = reranked(self.queries, self.gallery, count, own=self.own if itself else None)

    def first(self, nearest: int) -> tuple[Tensor, Tensor]:
        """(M, nearest) gallery places and scores, best first."""
        return self.places[:, :nearest].cpu(), self.scores[:, :nearest].cpu()

    def measures(
        self, labels: Tensor, gallery_labels: Tensor, ks: Sequence[int], ties: Ties, memory: int
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """As `roadmap.metrics.retrieval_metrics` with `per_query`, by these scores."""
        names = [*(f"R@{k}" for k in ks), "P@1", "R-precision", "mAP@R", "mAP", "AP loss"]
        nothing = torch.full((len(self.queries),), torch.nan, dtype=torch.float64, device=self.queries.device)
        values = {name: nothing.clone() for name in names}
        height = max(1, memory // (64 * len(self.gallery)))  # scores, their masks, and both sorted
        counted = torch.zeros(len(self.queries), dtype=torch.bool, device=self.queries.device)
        for top in range(0, len(self.queries), height):
            some = slice(top, top + height)
            right = labels[some, None] == gallery_labels[None]
            others = ~right
            mine = self.own[some]
            rows = (mine >= 0).nonzero()[:, 0]
            right[rows, mine[rows]] = others[rows, mine[rows]] = False
            counted[some] = right.any(1)
            here = counted[some].nonzero()[:, 0]
            if not len(here):
                continue
            found = query_values(counts_of_scores(self._every(some)[here], right[here], others[here]), ks, ties)
            for name, value in found.items():
                values[name][top + here] = value
        return means_of(values, counted), {name: value.cpu() for name, value in values.items()}

    def _every(self, some: slice) -> Tensor:
        """(n, N): cosines, and above them all the scores of those that were re-ranked."""
        with full_float32():
            scores = self.queries[some] @ self.gallery.T
        return scores.scatter(1, self.places[some], self.scores[some] + ABOVE)
