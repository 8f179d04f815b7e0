"""The call and the term of a loss of graded relevance: by the kernels of label trees, or from scores and grades."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from roadmap.kernels import both_run_on_triton
from roadmap.kernels.graded import GradedRule
from roadmap.kernels.graded_calls import graded_from_scores
from roadmap.kernels.rules import AP_COUNT, AP_SUM
from roadmap.kernels.trees import TreeRule, tree_loss, tree_terms
from roadmap.losses.call import ByTerms
from roadmap.losses.comparison import Comparison
from roadmap.losses.rank_ap import SupAP
from roadmap.losses.rank_ndcg import SupNDCG
from roadmap.losses.relevance import Relevance
from roadmap.losses.terms import Terms, ap_terms


class ByGrades(ByTerms, Protocol):
    """A loss of graded relevance: `binary` is what it is of plain labels, which have one grade."""

    relevance: Relevance

    @property
    def binary(self) -> SupAP | SupNDCG: ...

    @property
    def graded_rule(self) -> GradedRule: ...

    def fused(self, c: Comparison) -> Tensor | None: ...


def forward_by_grades(
    self: ByGrades,
    embeddings: Tensor,
    labels: Tensor | None,
    indices_tuple: Sequence[Tensor] | None = None,
    ref_emb: Tensor | None = None,
    ref_labels: Tensor | None = None,
    own: Tensor | None = None,
    grades: Tensor | None = None,
) -> Tensor:
    """The loss of a batch, or of queries against a gallery; `Comparison.of_grades` says what the arguments are."""
    c = Comparison.of_grades(embeddings, labels, indices_tuple, ref_emb, ref_labels, own, grades)
    fused = self.fused(c)
    return self.value(self.terms(c)) if fused is None else fused


def fused_by_grades(self: ByGrades, c: Comparison) -> Tensor | None:
    """The loss, where a kernel says it in one go."""
    if c.is_binary:
        return c.fused_loss(self.binary.rule)
    return graded_loss(c, self.relevance, self.graded_rule, include_self=self.binary.include_self)


def terms_by_grades(self: ByGrades, c: Comparison) -> Terms:
    """Sum of 1 - the measure over the queries that have a positive, and their number: one term."""
    if c.is_binary:
        return self.binary.terms(c)
    return graded_terms(c, self.relevance, self.graded_rule, include_self=self.binary.include_self)


def graded_terms(c: Comparison, relevance: Relevance, rule: GradedRule, *, include_self: bool) -> Terms:
    """Sum of 1 - the measure over the queries that have a positive, and their number: one term."""
    if takes_trees(c, relevance, rule):
        tree = _tree_rule(c, relevance, rule, include_self)
        found = tree_terms(c.embeddings, c.query_labels, c.ref_emb, c.gallery_labels, c.places, tree)
        return Terms(found[AP_SUM : AP_SUM + 1], found[AP_COUNT : AP_COUNT + 1].detach())
    grades = c.grades(relevance, include_self=include_self)
    return c.terms_or_nan(ap_terms(graded_from_scores(c.scores, grades, rule), grades > 0))


def graded_loss(c: Comparison, relevance: Relevance, rule: GradedRule, *, include_self: bool) -> Tensor | None:
    """What the term comes to, where a kernel says that in one go."""
    if not takes_trees(c, relevance, rule):
        return None
    tree = _tree_rule(c, relevance, rule, include_self)
    return tree_loss(c.embeddings, c.query_labels, c.ref_emb, c.gallery_labels, c.places, tree)


def _tree_rule(c: Comparison, relevance: Relevance, rule: GradedRule, include_self: bool) -> TreeRule:
    return TreeRule(rule, relevance.tree.kind, relevance.tree.weights(c.query_labels.shape[1]), include_self)


def takes_trees(c: Comparison, relevance: Relevance, rule: GradedRule) -> bool:
    """Whether the labels are paths, and all pairs are compared, where the kernels run."""
    are_paths = c.given is None and c.query_labels.ndim == 2 and c.query_labels.dtype != torch.bool
    by_levels = rule.measure == "h_ap" or relevance.tree.kind == "levels"
    return are_paths and by_levels and c.mined is None and both_run_on_triton(c.embeddings, c.ref_emb)
