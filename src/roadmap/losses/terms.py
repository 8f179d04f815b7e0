"""What a loss is made of before it is one number: sums, and how many each is a sum of.

Both add up over rows. So a batch may be shared out over processes, each with its own queries against all items: the
counts are added first, and the loss and the gradient are those of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roadmap.losses.arguments import Average


@dataclass(frozen=True)
class Terms:
    """(T,) sums, with a gradient, and (T,) counts, without; the value of term t is sums[t] / counts[t]."""

    sums: Tensor
    counts: Tensor

    def __add__(self, other: Terms) -> Terms:
        """The terms over the rows of both."""
        return Terms(self.sums + other.sums, self.counts + other.counts)

    @property
    def means(self) -> Tensor:
        """(T,); a term that nothing counts for is 0, with zero gradients."""
        return self.sums / self.counts.clamp(min=1)

    @staticmethod
    def concatenation(*parts: Terms) -> Terms:
        """The terms of several losses in one."""
        return Terms(torch.cat([p.sums for p in parts]), torch.cat([p.counts for p in parts]))


def ap_terms(ap: Tensor, positives: Tensor) -> Terms:
    """Sum of 1 - AP_i (or 1 - another measure) over the queries with a positive, and their number; AP_i is (M,)."""
    counted = positives.any(1)
    return Terms(((1 - ap) * counted).sum()[None], counted.sum()[None])


def calibration_terms(
    scores: Tensor, positives: Tensor, negatives: Tensor, alpha: float, beta: float, average: Average
) -> Terms:
    """Eq. (7): what positives lack to alpha, and what negatives have above beta; two terms."""
    # relu, not clamp: clamp has a gradient at 0 and would push a pair that just meets its threshold
    sides = ((alpha - scores).relu(), positives), ((scores - beta).relu(), negatives)
    parts = _violation_terms if average == "violating" else _query_terms
    return Terms.concatenation(*(parts(hinge, pairs) for hinge, pairs in sides))


def _violation_terms(hinge: Tensor, pairs: Tensor) -> Terms:
    violating = pairs & (hinge > 0)
    return Terms((hinge * violating).sum()[None], violating.sum()[None])


def _query_terms(hinge: Tensor, pairs: Tensor) -> Terms:
    per_query = (hinge * pairs).sum(1) / pairs.sum(1).clamp(min=1)
    return Terms(per_query.sum()[None], pairs.any(1).sum()[None])
