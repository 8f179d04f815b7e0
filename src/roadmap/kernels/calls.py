"""Everything that one loss call brings, in one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roadmap.kernels.paths import keeps_scores
from roadmap.kernels.rules import LossRule


@dataclass(frozen=True)
class LossCall:
    """M queries against N items, and what is asked of them.

    Attributes:
        queries: (M, D), of any length and float dtype.
        gallery: (N, D); None: the queries are the gallery.
        query_labels, gallery_labels: (M,) and (N,) integers.
        own: (M,) int64, where each query stands in the gallery, -1 for nowhere. None: every query at its own place in
            the batch, or, with a gallery, nowhere. A place that holds another label is no place.
        rule: which loss.
        as_terms: whether the six terms are asked for, or the loss itself.
        moving: how many items, at the gallery's front, somebody reads the gradient of; None: all. A memory behind a
            batch has none.
    """

    queries: Tensor
    gallery: Tensor | None
    query_labels: Tensor
    gallery_labels: Tensor
    own: Tensor | None
    rule: LossRule
    as_terms: bool
    moving: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.query_labels), len(self.gallery_labels)

    @property
    def keeps_scores(self) -> bool:
        """Whether kernels that could do without store the (M, N) scores."""
        return keeps_scores(*self.shape, self.queries.shape[1])

    @property
    def own_columns(self) -> Tensor | None:
        """`own`, with the batch's own places written out; None where no query stands in the gallery."""
        if self.own is None and self.gallery is None:
            return torch.arange(len(self.query_labels), device=self.query_labels.device)
        return self.own
