"""Similarity mixup, SiMix (Patel, Tolias, Matas, CVPR 2022): virtual pictures that exist as scores alone.

A picture v = a x + (1 - a) z between two of a class, a drawn from [0, 1), has with any w the score

    s(v, w) = a s(x, w) + (1 - a) s(z, w)

if, as there, vectors are mixed and not normalised again: no vector need be computed. It is a query, and where both of
its parents stand in the gallery also an item there, a positive of all of their class.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roadmap.losses.comparison import Comparison
from roadmap.losses.uncompiled import uncompiled


@dataclass(frozen=True)
class MixedTable:
    """Scores (M + V, N + W) of queries and items, virtual ones last; their labels; where each query stands, or -1."""

    scores: Tensor
    query_labels: Tensor
    gallery_labels: Tensor
    own: Tensor

    @property
    def negatives(self) -> Tensor:
        return self.query_labels[:, None] != self.gallery_labels[None, :]

    def positives(self, include_self: bool) -> Tensor:
        if include_self:
            return ~self.negatives
        columns = torch.arange(len(self.gallery_labels), device=self.own.device)
        return ~self.negatives & (self.own[:, None] != columns)


# How many pairs there are hangs on the labels, which no compiler follows.
@uncompiled
def mixed_table(c: Comparison) -> MixedTable:
    """The scores of a comparison, with a virtual picture for every two queries of a class."""
    labels, own, device = c.query_labels, c.own, c.embeddings.device
    first, second = torch.triu(labels[:, None] == labels[None, :], diagonal=1).nonzero(as_tuple=True)
    scores = c.scores
    # float32 whatever the scores are, so that both precisions mix alike
    parts = torch.rand(len(first), device=device, dtype=torch.float32).to(scores.dtype)
    rows = parts[:, None] * scores[first] + (1 - parts)[:, None] * scores[second]
    scores = torch.cat([scores, rows])
    inside = (own[first] >= 0) & (own[second] >= 0)
    share, left, right = parts[inside], own[first[inside]], own[second[inside]]
    columns = share * scores[:, left] + (1 - share) * scores[:, right]
    N = len(c.gallery_labels)
    places = torch.where(inside, N + inside.cumsum(0) - 1, -1)
    return MixedTable(
        torch.cat([scores, columns], dim=1),
        torch.cat([labels, labels[first]]),
        torch.cat([c.gallery_labels, labels[first[inside]]]),
        torch.cat([own, places]),
    )
