"""Graded losses of label trees in kernels of their own: what such a call brings, and its operator.

Where `graded` takes (M, N) scores and grades of any origin, here the grades follow from paths in a tree: a query has
at most one grade a level, and who has which is worked out where the ranks are counted (triton/trees.py). Runs where
`both_run_on_triton`; elsewhere the losses take `graded`.

    roadmap::tree_terms        sum of 1 - measure over the queries that have a positive, their number; or the one over
                               the other; the derivatives (counted.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from roadmap.kernels.counted import Counted, define_counted, terms_or_loss
from roadmap.kernels.devices import on_device_of
from roadmap.kernels.graded import GradedRule
from roadmap.kernels.graded_calls import _flat, _rule_of
from roadmap.kernels.rules import RANKS_SCHEMA, TERMS

UNKNOWN = -1  # in a path: this level is not known, and matches nothing
ALL_ITEMS = -1
Kind = Literal["shared", "levels", "nested"]


@dataclass(frozen=True)
class TreeRule:
    """A graded measure, and the grade of a positive that shares exactly l levels with its query, Ω^l of them:

        "shared" w_l / |Ω^l|        "levels" w_l        "nested" Σ_{p <= l} w_p / |Ω^{>=p}|

    `weights` are w_1 ... w_L. NDCG takes "levels" alone: its best order is that of the levels.
    """

    measure: GradedRule
    kind: Kind
    weights: tuple[float, ...]
    include_self: bool

    @property
    def counted_weights(self) -> tuple[float, ...]:
        """The weights that the kernels take: of NDCG the gains, which lie in the order of the grades."""
        return tuple(2.0**w - 1 for w in self.weights) if self.measure.exponential else self.weights


@dataclass(frozen=True)
class TreeCall:
    """M queries against N items, their paths, and what is asked of them.

    Attributes:
        queries: (M, D), of any length and float dtype.
        gallery: (N, D); None: the queries are the gallery.
        query_paths, gallery_paths: (M, L) and (N, L) integers.
        own: (M,), where each query stands in the gallery, as in `LossCall`.
        rule: which loss.
        moving: how many items, at the gallery's front, somebody reads the gradient of.
        as_terms: whether the sum and the number are asked for, or the mean.
    """

    queries: Tensor
    gallery: Tensor | None
    query_paths: Tensor
    gallery_paths: Tensor
    own: Tensor | None
    rule: TreeRule
    moving: int
    as_terms: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.query_paths), len(self.gallery_paths)


def tree_terms(
    queries: Tensor,
    query_paths: Tensor,
    gallery: Tensor | None,
    gallery_paths: Tensor,
    own: Tensor | None,
    rule: TreeRule,
) -> Tensor:
    """(TERMS,): the sum and the count stand where those of AP do; the sum has a gradient."""
    return _terms_or_loss(queries, query_paths, gallery, gallery_paths, own, rule, True)


def tree_loss(
    queries: Tensor,
    query_paths: Tensor,
    gallery: Tensor | None,
    gallery_paths: Tensor,
    own: Tensor | None,
    rule: TreeRule,
) -> Tensor:
    """The mean of 1 - measure over the queries that have a positive, a scalar; 0 where none has."""
    return _terms_or_loss(queries, query_paths, gallery, gallery_paths, own, rule, False)


def _terms_or_loss(
    queries: Tensor,
    query_paths: Tensor,
    gallery: Tensor | None,
    gallery_paths: Tensor,
    own: Tensor | None,
    rule: TreeRule,
    as_terms: bool,
) -> Tensor:
    moving = ALL_ITEMS
    if gallery is not None and not torch.compiler.is_compiling():
        # The function that made the gallery may say how many of its rows it hands a gradient on to.
        moving = getattr(gallery.grad_fn, "moving_rows", ALL_ITEMS)
    inputs = queries, gallery, query_paths, gallery_paths, own, *_flat_tree(rule), as_terms, moving
    return terms_or_loss(torch.ops.roadmap.tree_terms, _operator, inputs)


# --- the operator


def _flat_tree(rule: TreeRule) -> tuple[Any, ...]:
    """The rule as the plain arguments that an operator takes."""
    return rule.kind, list(rule.weights), rule.include_self, *_flat(rule.measure)


def _tree_rule_of(kind: str, weights: list[float], include_self: bool, *measure: Any) -> TreeRule:
    return TreeRule(_rule_of(*measure), cast(Kind, kind), tuple(weights), include_self)


def _operator(*args: Any) -> Counted:
    (queries, gallery, query_paths, gallery_paths, own), (*flat, as_terms, moving) = args[:5], args[5:-2]
    from roadmap.kernels.triton import trees

    wanted = len(gallery_paths) if moving == ALL_ITEMS else moving
    call = TreeCall(queries, gallery, query_paths, gallery_paths, own, _tree_rule_of(*flat), wanted, as_terms)
    with on_device_of(queries):
        return trees.terms_and_gradients(call, args[-2:])


def _fake(*args: Any) -> Counted:
    queries, gallery, as_terms, moving = args[0], args[1], args[-4], args[-3]
    rows = 0 if gallery is None else len(gallery) if moving == ALL_ITEMS else moving
    found = [queries.new_empty((TERMS,) if as_terms else (), dtype=torch.float32)]
    for wanted, count in zip(args[-2:], (len(queries), rows), strict=True):
        shape = (count, queries.shape[1]) if wanted else (0,)
        found.append(queries.new_empty(shape, dtype=torch.float32))
    return found[0], found[1], found[2]


def _library_of_operators() -> Any:
    library: Any = torch.library.Library("roadmap", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = (
        "(Tensor queries, Tensor? gallery, Tensor query_paths, Tensor gallery_paths, Tensor? own, str kind, "
        f"float[] weights, bool include_self, str measure, bool exponential, {RANKS_SCHEMA}, float[] pull, "
        "bool as_terms, int moving, bool for_queries, bool for_gallery) -> (Tensor, Tensor, Tensor)"
    )
    define_counted(library, "tree_terms", schema, _operator, _fake)
    return library


_library = _library_of_operators()  # the operators live as long as it does
