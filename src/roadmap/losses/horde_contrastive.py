"""The contrastive loss of HORDE: squares for the positives, a mean over the negatives that are too near."""

from __future__ import annotations

from torch import Tensor, nn

from roadmap.losses.arguments import check_number
from roadmap.losses.call import forward_by_terms
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms


class HordeContrastive(nn.Module):
    """1/2 mean over positive pairs of (1 - s)^2 + 1/2 mean over negative pairs with s > margin of (s - margin): the
    contrastive loss as the authors of HORDE released it (Jacob et al., ICCV 2019). Each mean is over the whole batch.

    Args:
        margin: score that negatives must stay below.
    """

    def __init__(self, margin: float = 0.5) -> None:
        super().__init__()
        check_number("margin", margin)
        self.margin = margin

    def extra_repr(self) -> str:
        return f"margin={self.margin}"

    forward = forward_by_terms

    def terms(self, c: Comparison) -> Terms:
        """What positives lack, squared, and what negatives have too much, over how many pairs: two terms."""
        positives = c.positives(include_self=False)
        excess = (c.scores - self.margin).relu()
        near = c.negatives & (excess > 0)
        pull = Terms(((1 - c.scores) ** 2 * positives).sum()[None], positives.sum()[None])
        push = Terms((excess * near).sum()[None], near.sum()[None])
        return c.terms_or_nan(Terms.concatenation(pull, push))

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        return terms.means.sum() / 2
