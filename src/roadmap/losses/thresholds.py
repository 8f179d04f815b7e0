"""Calibration of the scores between batches, Eq. (7)."""

from __future__ import annotations

from torch import Tensor, nn

from roadmap.kernels import CalibrationRule, LossRule
from roadmap.kernels.precision import at_least_float32
from roadmap.kernels.rules import POS_COUNT, POS_SUM
from roadmap.losses.arguments import Average, check_average, check_scores, check_thresholds
from roadmap.losses.call import forward_by_rule
from roadmap.losses.comparison import Comparison
from roadmap.losses.terms import Terms, calibration_terms


def calibration(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor,
    alpha: float = 0.9,
    beta: float = 0.6,
    average: Average = "violating",
) -> Tensor:
    """L_calibr.: positives are asked for a score above alpha, negatives for one below beta.

    Args:
        scores: (M, N), higher is nearer.
        positives: (M, N) mask of P_i, without the query itself.
        negatives: (M, N) mask of N_i.
        alpha: threshold for the positives.
        beta: threshold for the negatives, beta < alpha.
        average: "violating" (default) takes the mean over the positive pairs below alpha plus the mean over the
            negative pairs above beta, pooled over the batch. "all" is Eq. (7) as printed: each query averages over
            all of its pairs, so that thousands of satisfied negatives dilute the few that matter.

    A term without pairs is 0, with zero gradients.
    """
    check_scores(scores, positives, negatives)
    check_thresholds(alpha, beta)
    check_average(average)
    return calibration_terms(at_least_float32(scores), positives, negatives, alpha, beta, average).means.sum()


class Calibration(nn.Module):
    """The calibration loss, Eq. (7). An item is never paired with itself.

    Args:
        alpha: score asked of the positives.
        beta: score the negatives must stay below, beta < alpha.
        average: "violating" or "all" (Eq. 7 as printed); see `calibration`.
    """

    def __init__(self, alpha: float = 0.9, beta: float = 0.6, average: Average = "violating") -> None:
        super().__init__()
        check_thresholds(alpha, beta)
        check_average(average)
        self.alpha = alpha
        self.beta = beta
        self.average: Average = average

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, beta={self.beta}, average={self.average!r}"

    forward = forward_by_rule

    def terms(self, c: Comparison) -> Terms:
        """What positives lack and what negatives have too much, over how many pairs or queries: two terms."""
        found = c.terms(self.rule)
        if found is not None:
            return Terms(found[POS_SUM::2], found[POS_COUNT::2].detach())
        pairs = c.positives(include_self=False)
        return c.terms_or_nan(calibration_terms(c.scores, pairs, c.negatives, self.alpha, self.beta, self.average))

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        return terms.means.sum()

    @property
    def rule(self) -> LossRule:
        return LossRule(None, CalibrationRule(self.alpha, self.beta, self.average))
