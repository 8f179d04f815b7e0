"""NDCG of graded relevance (Järvelin and Kekäläinen, 2002), exact and by a smooth bound."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from roadmap.kernels.graded import GradedRule
from roadmap.kernels.graded_calls import graded_from_scores
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_graded_scores
from roadmap.losses.call import value_of_one_term
from roadmap.losses.graded_terms import forward_by_grades, fused_by_grades, terms_by_grades
from roadmap.losses.hierarchical_ap import exact_value
from roadmap.losses.rank_ndcg import SupNDCG
from roadmap.losses.relevance import Relevance, SetRelevance, TreeRelevance
from roadmap.losses.terms import ap_terms
from roadmap.metrics.grades import Gain, SetGrades, check_gain


def ndcg(
    scores: Tensor, grades: Tensor, gain: Gain = "exponential", *, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Exact NDCG, in float64. No gradient.

        DCG = Σ_k gain(k) / log2(1 + rank(k))        NDCG = DCG / DCG in the best order

    Args:
        scores: (M, N), finite, higher is nearer. H(0) = 1: items with equal scores all take the last of their places.
        grades: (M, N): above 0 for positives, 0 for negatives, below 0 for those in no ranking.
        gain: "exponential": 2^grade - 1; "linear": the grade.
        reduction: "mean" over the queries with a positive (NaN if none has), or "none": (M,), NaN where there is none.
    """
    check_gain(gain)
    return exact_value(scores, grades, GradedRule("ndcg", exponential=gain == "exponential"), reduction)


def gradedndcg(
    scores: Tensor,
    grades: Tensor,
    gain: Gain = "exponential",
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
) -> Tensor:
    """A smooth upper bound of 1 - NDCG, as a scalar with a gradient.

    Args:
        scores, grades, gain: as for `ndcg`; half-precision scores are widened to float32.
        tau, rho, delta, start, offset: of H⁻, as for `supap`.

    A query without positives does not count; if none counts the loss is 0 with zero gradients.
    """
    check_gain(gain)
    check_graded_scores(scores, grades)
    wide = at_least_float32(scores)
    ranks = SupNDCG(tau, rho, delta, True, start, offset).rule.ranks
    rule = GradedRule("ndcg", ranks, exponential=gain == "exponential")
    return ap_terms(graded_from_scores(wide, grades.to(wide.dtype), rule), grades > 0).means[0]


class GradedNDCG(nn.Module):
    """1 - NDCG, by a smooth upper bound: ranks are counted with H⁻ over all that is less relevant.

    Called as every loss is; labels are plain, paths in a tree or sets, as for `HierarchicalAP`. The grade of an item
    is the number of levels that it shares with the query, or what `sets` says; `grades` (M, N) gives them instead.

    Args:
        gain: "exponential": 2^grade - 1; "linear": the grade.
        sets: of sets of labels, "count": how many two share; "iou": that over how many they have together.
        tau, rho, delta, include_self, start, offset: see `SupAP`.
    """

    takes_paths = True

    def __init__(
        self,
        gain: Gain = "exponential",
        sets: SetGrades = "count",
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        include_self: bool = True,
        start: float = 0.5,
        offset: float | None = None,
    ) -> None:
        super().__init__()
        check_gain(gain)
        self.gain: Gain = gain
        self.relevance = Relevance(TreeRelevance("levels"), SetRelevance(sets))
        self.binary = SupNDCG(tau, rho, delta, include_self, start, offset)  # of plain labels, which have one grade

    def extra_repr(self) -> str:
        return f"gain={self.gain!r}, sets={self.relevance.sets.kind!r}"

    forward = forward_by_grades
    fused = fused_by_grades
    terms = terms_by_grades
    value = value_of_one_term

    @property
    def graded_rule(self) -> GradedRule:
        """How grades are measured."""
        return GradedRule("ndcg", self.binary.rule.ranks, exponential=self.gain == "exponential")
