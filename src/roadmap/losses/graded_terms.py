"""The term of a loss of graded relevance: by the kernels of label trees, or from scores and grades."""

from __future__ import annotations

import torch
from torch import Tensor

from roadmap.kernels import both_run_on_triton
from roadmap.kernels.graded import GradedRule
from roadmap.kernels.graded_calls import graded_from_scores
from roadmap.kernels.rules import AP_COUNT, AP_SUM
from roadmap.kernels.trees import TreeRule, tree_loss, tree_terms
from roadmap.losses.comparison import Comparison
from roadmap.losses.relevance import Relevance
from roadmap.losses.terms import Terms, ap_terms


def graded_terms(c: Comparison, relevance: Relevance, rule: GradedRule, *, include_self: bool) -> Terms:
    """Sum of 1 - the measure over the queries that have a positive, and their number: one term."""
    if takes_trees(c, relevance, rule):
        tree = _tree_rule(c, relevance, rule, include_self)
        found = tree_terms(c.embeddings, c.query_labels, c.ref_emb, c.gallery_labels, c.places, tree)
        return Terms(found[AP_SUM : AP_SUM + 1], found[AP_COUNT : AP_COUNT + 1].detach())
    grades = c.grades(relevance, include_self=include_self)
    terms = ap_terms(graded_from_scores(c.scores, grades, rule), grades > 0)
    return Terms(c.loss_or_nan(terms.sums), terms.counts)


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
