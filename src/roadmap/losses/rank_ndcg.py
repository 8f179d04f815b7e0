"""A smooth upper bound of the loss of NDCG over the ranks that SupAP counts, for items that are relevant or not.

DCG_i = Σ_{k ∈ P_i} 1 / log2(1 + rank(k))        NDCG_i = DCG_i / Σ_{j = 1}^{|P_i|} 1 / log2(1 + j)
rank(k) = rank⁺(k) + rank⁻(k), as in rank_ap.py
"""

from __future__ import annotations

from torch import Tensor, nn

from roadmap.kernels import NDCG, LossRule, RankRule, ap_from_scores
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_flag, check_scores
from roadmap.losses.call import forward_by_rule, value_of_one_term
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import check_h_minus, mean_ap_loss, rank_terms
from roadmap.losses.terms import Terms


def supndcg(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
) -> Tensor:
    """A smooth upper bound of 1 - NDCG, as a scalar with a gradient. Arguments as in `roadmap.losses.supap`."""
    check_scores(scores, positives, negatives)
    delta = check_h_minus(tau, rho, delta, start, offset)
    rule = RankRule("supap", tau, rho, delta, start, offset, NDCG)
    return mean_ap_loss(ap_from_scores(at_least_float32(scores), positives, negatives, rule), positives)


class SupNDCG(nn.Module):
    """1 - NDCG over ranks counted as SupAP counts them: a smooth upper bound of the loss of NDCG (Ramzi et al.,
    "Optimization of Rank Losses for Image Retrieval", 2023). Relevance is binary, every positive has the gain 1;
    `GradedNDCG` takes grades.

    H⁺ is a step without gradient and H⁻ is Eq. (4), nowhere below the step. So no rank is underestimated, and a gain
    falls with the rank.

    Args:
        tau, rho, delta, include_self, start, offset: see `SupAP`. The bound needs start >= 1/2 and offset >= 1.

    >>> import torch
    >>> loss = SupNDCG()(torch.randn(8, 16, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    >>> loss.backward()
    """

    def __init__(
        self,
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        include_self: bool = True,
        start: float = 0.5,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        self.delta = check_h_minus(tau, rho, delta, start, offset)
        check_flag("include_self", include_self)
        self.tau, self.rho, self.include_self, self.start, self.offset = tau, rho, include_self, start, offset

    def extra_repr(self) -> str:
        said = f"tau={self.tau}, rho={self.rho}, delta={self.delta:.6g}, include_self={self.include_self}"
        return said + f", start={self.start}, offset={self.offset}"

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - NDCG_i over the queries that have a positive, and their number: one term."""
        return rank_terms(c, self.rule)

    value = value_of_one_term

    @property
    def rule(self) -> LossRule:
        ranks = RankRule("supap", self.tau, self.rho, self.delta, self.start, self.offset, NDCG)
        return LossRule(ranks, None, include_self=self.include_self)
