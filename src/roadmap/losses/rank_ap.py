"""AP by counting ranks (Eqs. 1, 3-5): exact AP, SmoothAP and SupAP are one skeleton with different H.

rank⁺(k) = 1 + Σ_{j ∈ P_i \\ k} H⁺(s_j - s_k)        rank⁻(k) = Σ_{j ∈ N_i} H⁻(s_j - s_k)
AP_i = 1/|P_i| Σ_{k ∈ P_i} rank⁺(k) / (rank⁺(k) + rank⁻(k))

         H⁺                    H⁻
exact    step, H(0) = 1        step, H(0) = 1         Eqs. (1), (3)
SmoothAP sigmoid(t / tau)      sigmoid(t / tau)       Brown et al., ECCV 2020
SupAP    step, no gradient     Eq. (4)                Eq. (5)

Other measures of the same ranks: NDCG (rank_ndcg.py) and recall at k (rank_recall.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from roadmap.kernels import AP, LossRule, Measure, RankRule, ap_from_scores
from roadmap.kernels.measures import gains, norms
from roadmap.kernels.precision import at_least_float32
from roadmap.kernels.rules import AP_COUNT, AP_SUM
from roadmap.losses.arguments import check_flag, check_number, check_scores
from roadmap.losses.call import forward_by_rule, value_of_one_term
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms, ap_terms

StepFunction = Callable[[Tensor], Tensor]


def saturation_point(tau: float, epsilon: float = 1e-2) -> float:
    """delta = tau ln((1 - epsilon) / epsilon), where sigmoid(delta / tau) = 1 - epsilon (supplementary A.3)."""
    check_number("tau", tau, above=0)
    check_number("epsilon", epsilon, above=0)
    if not epsilon < 0.5:
        raise ValueError(f"epsilon must be < 0.5, where delta would reach 0, got {epsilon}")
    return tau * math.log((1 - epsilon) / epsilon)


def heaviside(t: Tensor) -> Tensor:
    """H of Eq. (3), H(0) = 1: an item with an equal score counts as ranked before."""
    return (t >= 0).to(t.dtype)


def h_minus(t: Tensor, tau: float, rho: float, delta: float, start: float = 0.5, offset: float | None = None) -> Tensor:
    """H⁻ of Eq. (4), an upper bound of H.

    The paper gives t = 0 to the first two branches; only the second, H⁻(0) = 1, keeps the bound at a tie.

    Args:
        start: what is added to the sigmoid from t = 0 on; the bound needs 1/2.
        offset: where the linear part begins; None, as in the paper: where the sigmoid part ends.
    """
    smooth = torch.sigmoid(t / tau)
    top = 1 / (1 + math.exp(-delta / tau)) + start if offset is None else offset
    return torch.where(t > delta, rho * (t - delta) + top, torch.where(t >= 0, smooth + start, smooth))


def smoothap(scores: Tensor, positives: Tensor, negatives: Tensor, tau: float = 0.01) -> Tensor:
    """L_SmoothAP (Brown et al., ECCV 2020): both ranks counted with sigmoid(t / tau). Arguments as in `supap`."""
    check_scores(scores, positives, negatives)
    check_number("tau", tau, above=0)
    return mean_ap_loss(
        ap_from_scores(at_least_float32(scores), positives, negatives, RankRule("smoothap", tau)), positives
    )


def supap(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
) -> Tensor:
    """L_SupAP, Eq. (5): a smooth upper bound of the AP loss, as a scalar with a gradient.

    Args:
        scores: (M, N), higher is nearer; half precision is widened to float32.
        positives: (M, N) mask of P_i.
        negatives: (M, N) mask of N_i; an item in neither is ignored.
        tau: temperature of the sigmoid part of H⁻.
        rho: slope of its linear part.
        delta: where the linear part begins; None takes `saturation_point(tau)`.
        start, offset: constants of H⁻ that the released code has otherwise; see `SupAP`.

    A query without positives does not count; if none counts the loss is 0 with zero gradients.
    """
    check_scores(scores, positives, negatives)
    delta = check_h_minus(tau, rho, delta, start, offset)
    rule = RankRule("supap", tau, rho, delta, start, offset)
    return mean_ap_loss(ap_from_scores(at_least_float32(scores), positives, negatives, rule), positives)


def check_h_minus(tau: float, rho: float, delta: float | None, start: float, offset: float | None) -> float:
    """The delta that is meant."""
    check_number("tau", tau, above=0)
    check_number("rho", rho, at_least=0)
    check_number("start", start, at_least=0)
    if offset is not None:
        check_number("offset", offset, at_least=0)
    if delta is None:
        return saturation_point(tau)
    check_number("delta", delta, at_least=0)
    return delta


def mean_ap_loss(ap: Tensor, positives: Tensor) -> Tensor:
    """1 - mean of AP_i, (M,), over the queries with a positive; 0 with zero gradients when there is none."""
    return ap_terms(ap, positives).means[0]


def plain_average_precision(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    h_pos: StepFunction,
    h_neg: StepFunction,
    measure: Measure = AP,
) -> Tensor:
    """AP_i of every query (or another measure of its ranks), (M,); 0 where P_i is empty. The equations as written, by
    autograd, with every (pair, item) difference in memory: the truth that the kernels are tested against."""
    query, k = positives.nonzero(as_tuple=True)
    t = scores[query] - scores[query, k][:, None]  # t[p, j] = s_j - s_k for the p-th positive pair (i, k)
    others = positives[query] & (torch.arange(scores.shape[1], device=k.device) != k[:, None])
    zero = t.new_zeros(())
    rank_pos = 1 + torch.where(others, h_pos(t), zero).sum(1)
    rank_neg = torch.where(negatives[query], h_neg(t), zero).sum(1)
    size = positives.sum(1).clamp(min=1)
    precision = gains(measure, rank_pos, rank_neg, size[query])
    return scores.new_zeros(len(scores)).index_add(0, query, precision) / norms(measure, size, scores)


def rank_terms(c: Comparison, rule: LossRule) -> Terms:
    """The term of the ranks: sum of 1 - AP_i, or another measure, over the queries with a positive; their number."""
    found = c.terms(rule)
    if found is not None:
        return Terms(found[AP_SUM : AP_SUM + 1], found[AP_COUNT : AP_COUNT + 1].detach())
    assert rule.ranks is not None
    positives = c.positives(include_self=rule.include_self)
    return c.terms_or_nan(ap_terms(ap_from_scores(c.scores, positives, c.negatives, rule.ranks), positives))


class SmoothAP(nn.Module):
    """SmoothAP (Brown et al., ECCV 2020), the baseline SupAP departs from.

    Args:
        tau: temperature of the sigmoid.
        include_self: whether, in the in-batch call, the query is one of its own positives (the paper's Q ⊆ Ω).
    """

    def __init__(self, tau: float = 0.01, include_self: bool = True) -> None:
        super().__init__()
        check_number("tau", tau, above=0)
        check_flag("include_self", include_self)
        self.tau = tau
        self.include_self = include_self

    def extra_repr(self) -> str:
        return f"tau={self.tau}, include_self={self.include_self}"

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - AP_i over the queries that have a positive, and their number: one term."""
        return rank_terms(c, self.rule)

    value = value_of_one_term

    @property
    def rule(self) -> LossRule:
        return LossRule(RankRule("smoothap", self.tau), None, include_self=self.include_self)


class SupAP(nn.Module):
    """SupAP, Eq. (5): a smooth upper bound of the AP loss.

    Args:
        tau: temperature of the sigmoid part of H⁻, Eq. (4).
        rho: slope of the linear part of H⁻.
        delta: where the linear part begins; None takes tau ln((1 - 1e-2) / 1e-2), 0.046 for tau = 0.01.
        include_self: whether, in the in-batch call, the query is one of its own positives (the paper's Q ⊆ Ω).
        start: what H⁻ adds to the sigmoid for 0 <= t <= delta: 1/2 in Eq. (4), 0 in the released iNaturalist settings.
        offset: where the linear part of H⁻ begins; None, as in Eq. (4), takes sigmoid(delta / tau) + start, 1.49 at the
            defaults. Released: 1.44, and 1.0 for iNaturalist, with delta = 0.05.

    The loss is an upper bound of the AP loss if start >= 1/2 and offset >= 1; a tie takes H⁻(0) = 1/2 + start.
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
        self.tau = tau
        self.rho = rho
        self.include_self = include_self
        self.start = start
        self.offset = offset

    def extra_repr(self) -> str:
        said = f"tau={self.tau}, rho={self.rho}, delta={self.delta:.6g}, include_self={self.include_self}"
        return said + f", start={self.start}, offset={self.offset}"

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        """Sum of 1 - AP_i over the queries that have a positive, and their number: one term."""
        return rank_terms(c, self.rule)

    value = value_of_one_term

    @property
    def rule(self) -> LossRule:
        ranks = RankRule("supap", self.tau, self.rho, self.delta, self.start, self.offset)
        return LossRule(ranks, None, include_self=self.include_self)
