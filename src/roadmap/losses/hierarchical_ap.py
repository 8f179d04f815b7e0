"""Hierarchical AP (HAPPIER, Ramzi et al., ECCV 2022): average precision where some mistakes are smaller than others."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from roadmap.kernels.graded import GradedRule, PullRule
from roadmap.kernels.graded_calls import graded_from_scores
from roadmap.kernels.precision import at_least_float32
from roadmap.losses.arguments import check_flag, check_graded_scores, check_number
from roadmap.losses.call import value_of_one_term
from roadmap.losses.graded_terms import forward_by_grades, fused_by_grades, terms_by_grades
from roadmap.losses.rank_ap import SupAP
from roadmap.losses.relevance import Relevance, SetRelevance, TreeRelevance
from roadmap.losses.terms import ap_terms
from roadmap.metrics.grades import SetGrades, TreeGrades


def h_ap(scores: Tensor, grades: Tensor, *, reduction: Literal["mean", "none"] = "mean") -> Tensor:
    """Exact H-AP, in float64. No gradient.

        H-rank(k) = rel(k) + Σ_{j ∈ Ω⁺ \\ k} min(rel(k), rel(j)) H(s_j - s_k)
        H-AP = Σ_{k ∈ Ω⁺} H-rank(k) / rank(k) / Σ_{k ∈ Ω⁺} rel(k)

    Args:
        scores: (M, N), finite, higher is nearer. H(0) = 1: a tie counts as ranked before, as in Eq. (3).
        grades: (M, N), rel: above 0 for positives (Ω⁺), 0 for negatives, below 0 for those in no ranking.
        reduction: "mean" over the queries with a positive (NaN if none has), or "none": (M,), NaN where there is none.
    """
    return exact_value(scores, grades, GradedRule("h_ap"), reduction)


def exact_value(scores: Tensor, grades: Tensor, rule: GradedRule, reduction: str) -> Tensor:
    """An exact measure of every query, or its mean."""
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be 'mean' or 'none', got {reduction!r}")
    check_graded_scores(scores, grades)
    # widened: ties stay ties
    found = graded_from_scores(scores.detach().double(), grades.detach().double(), rule)
    values = torch.where((grades > 0).any(1), found, torch.nan)
    return values.nanmean() if reduction == "mean" else values


def hierarchicalap(
    scores: Tensor,
    grades: Tensor,
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
    pull: PullRule | None = None,
) -> Tensor:
    """A smooth upper bound of 1 - H-AP, as a scalar with a gradient.

    Args:
        scores, grades: as for `h_ap`; half-precision scores are widened to float32.
        tau, rho, delta, start, offset: of H⁻, as for `supap`.
        pull: of H^>; None: the H-rank has no gradient. See `HierarchicalAP`.

    A query without positives does not count; if none counts the loss is 0 with zero gradients.
    """
    check_graded_scores(scores, grades)
    ranks = SupAP(tau, rho, delta, True, start, offset).rule.ranks
    wide = at_least_float32(scores)
    found = graded_from_scores(wide, grades.to(wide.dtype), GradedRule("h_ap", ranks, pull))
    return ap_terms(found, grades > 0).means[0]


class HierarchicalAP(nn.Module):
    """1 - H-AP, by a smooth upper bound: what shares more of a label tree with the query is asked to rank before.

    Called as every loss is. Labels (M, L) are paths in a tree, coarse to fine, the class last; -1 is not known and
    matches nothing; the numbers of a level are those of the whole tree. Bool labels (M, C) are sets of labels. Plain
    labels are a tree of one level, for which this is `SupAP`. `grades` (M, N) says how relevant every pair is instead.

    Args:
        relevance: "shared", the paper's: the items of level l share l^alpha among them; "levels": each has l^alpha;
            "nested": H-AP is the mean of the APs of all levels. See `TreeRelevance`.
        alpha: how much more the finer levels count.
        sets: of sets of labels, "iou": how many two share, over how many they have together; "count": how many they
            share.
        tau, rho, delta, include_self, start, offset: see `SupAP`; H⁻ counts all that is less relevant.
        pull: whether H-rank too has a slope, H^>(t) = min(beta t + gamma, 1) for t > 0 and leak t below, on items that
            are more relevant than k. The paper derives it; of six released settings one has it.
        beta, gamma, leak: of H^>; the numbers in the released settings.

    >>> import torch
    >>> genus_and_species = torch.tensor([[0, 0], [0, 0], [0, 1], [0, 1], [1, 2], [1, 2]])
    >>> loss = HierarchicalAP()(torch.randn(6, 16, requires_grad=True), genus_and_species)
    >>> loss.backward()
    """

    takes_paths = True

    def __init__(
        self,
        relevance: TreeGrades = "shared",
        alpha: float = 1.0,
        sets: SetGrades = "iou",
        tau: float = 0.01,
        rho: float = 100.0,
        delta: float | None = None,
        include_self: bool = True,
        start: float = 0.5,
        offset: float | None = None,
        pull: bool = False,
        beta: float = 25.0,
        gamma: float = 0.5,
        leak: float = 10.0,
    ) -> None:
        super().__init__()
        self.relevance = Relevance(TreeRelevance(relevance, alpha), SetRelevance(sets))
        # of plain labels H-AP is AP, and nothing is more relevant than a positive
        self.binary = SupAP(tau, rho, delta, include_self, start, offset)
        check_flag("pull", pull)
        for name, value in (("beta", beta), ("leak", leak)):
            check_number(name, value, at_least=0)
        check_number("gamma", gamma)
        self.pull = PullRule(beta, gamma, leak) if pull else None

    def extra_repr(self) -> str:
        tree = self.relevance.tree
        said = f"relevance={tree.kind!r}, alpha={tree.alpha}, sets={self.relevance.sets.kind!r}"
        return said + (", pull=False" if self.pull is None else f", pull=True, {self.pull}")

    forward = forward_by_grades
    fused = fused_by_grades
    terms = terms_by_grades
    value = value_of_one_term

    @property
    def graded_rule(self) -> GradedRule:
        """How grades are measured."""
        return GradedRule("h_ap", self.binary.rule.ranks, self.pull)
