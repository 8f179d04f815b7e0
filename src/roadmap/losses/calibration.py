"""Calibration of the scores between batches, Eq. (7)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from roadmap.kernels import CalibrationRule, LossRule
from roadmap.losses.arguments import Average, check_average, check_scores, check_thresholds
from roadmap.losses.comparison import compared, widened


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
    wide = widened(scores)
    mean = _mean_of_violations if average == "violating" else _mean_of_query_means
    # relu, not clamp: clamp has a gradient at 0 and would push a pair that just meets its threshold
    return mean((alpha - wide).relu(), positives) + mean((wide - beta).relu(), negatives)


def _mean_of_violations(hinge: Tensor, pairs: Tensor) -> Tensor:
    violating = pairs & (hinge > 0)
    return (hinge * violating).sum() / violating.sum().clamp(min=1)


def _mean_of_query_means(hinge: Tensor, pairs: Tensor) -> Tensor:
    per_query = (hinge * pairs).sum(1) / pairs.sum(1).clamp(min=1)
    return per_query.sum() / pairs.any(1).sum().clamp(min=1)


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

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        c = compared(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        fused = c.fused_loss(LossRule(None, CalibrationRule(self.alpha, self.beta, self.average)))
        if fused is not None:
            return fused
        positives = c.positives(include_self=False)
        return c.poisoned(calibration(c.scores, positives, c.negatives, self.alpha, self.beta, self.average))
