"""How relevant an item is: paths, sets, what is not known, and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roadmap.losses
from roadmap.losses import (
    ROADMAP,
    Calibration,
    FastAP,
    GradedNDCG,
    HierarchicalAP,
    Matryoshka,
    Memory,
    SmoothAP,
    SphericalConstraint,
    SupAP,
    gradedndcg,
    h_ap,
)
from roadmap.losses.arguments import GRADED
from roadmap.losses.comparison import Comparison
from roadmap.losses.relevance import Relevance, SetRelevance, TreeRelevance, check_tree

from . import graded_literal as loops
from .cases import drawn
from .graded_cases import SETS, TREES, GradedCase, paths, sets


def grades_of(case: GradedCase, relevance: Relevance, include_self: bool) -> Tensor:
    c = Comparison.of(case.vectors, case.labels, None, case.gallery, case.gallery_labels, graded=True)
    return c.grades(relevance, include_self=include_self)


@pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
@pytest.mark.parametrize(
    ("kind", "alpha"), [("shared", 1.0), ("levels", 1.0), ("nested", 1.0), ("shared", 0.5), ("nested", 0.0)]
)
@pytest.mark.parametrize("case", TREES, ids=repr)
def test_grades_of_a_tree_are_the_literal_ones(case: GradedCase, kind: Any, alpha: float, include_self: bool) -> None:
    queries, items = (labels.tolist() for labels in case.both)
    expected = loops.tree_grades(queries, items, case.own, include_self, kind, alpha)
    found = grades_of(case, Relevance(TreeRelevance(kind, alpha)), include_self)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["iou", "count"])
@pytest.mark.parametrize("case", SETS, ids=repr)
def test_grades_of_sets_are_the_literal_ones(case: GradedCase, kind: Any) -> None:
    queries, items = ([set(row.nonzero()[:, 0].tolist()) for row in labels] for labels in case.both)
    expected = loops.set_grades(queries, items, case.own, True, kind)
    found = grades_of(case, Relevance(sets=SetRelevance(kind)), True)
    assert found.tolist() == expected


def test_the_items_of_a_level_share_its_weight() -> None:
    """Of each query the grades of level l add up to l^alpha, whatever their number: the relevance of HAPPIER."""
    case = TREES[0]
    found = grades_of(case, Relevance(TreeRelevance("shared", 2.0)), True)
    levels = grades_of(case, Relevance(TreeRelevance("levels")), True)
    for level in (1, 2, 3):
        totals = torch.where(levels == level, found, 0.0).sum(1)
        some = (levels == level).any(1)
        torch.testing.assert_close(totals[some], torch.full_like(totals[some], level**2))


def test_what_is_not_known_matches_nothing_but_the_class_is_known() -> None:
    rows = torch.tensor([[-1, 5], [-1, 6], [-1, 5], [3, 5], [3, -1], [-1, -1]])
    found = TreeRelevance("levels").closeness(rows, rows, torch.float32)
    assert found[0].tolist() == [2, 0, 2, 2, 0, 0]
    assert found[4].tolist() == [0, 0, 0, 1, 1, 0]
    assert found[5].tolist() == [0] * 6


def test_binary_grades_are_one_and_zero() -> None:
    c = Comparison.of(drawn(4, 3, 0), torch.tensor([0, 1, 0, 2]))
    expected = [[-1.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0], [1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.0, -1.0]]
    assert c.is_binary
    assert c.grades(Relevance(), include_self=False).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_of_any_type_are_paths(dtype: torch.dtype) -> None:
    x, labels = drawn(5, 3, 1), paths(0, 0, 1, 2, 4)
    assert HierarchicalAP()(x, labels.to(dtype)).item() == HierarchicalAP()(x, labels).item()


def test_autocast_counts_labels_in_common_exactly() -> None:
    many = torch.ones(2, 3001, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert SetRelevance("count").closeness(many, many, torch.float32)[0, 1].item() == 3001


def test_the_words_name_the_losses_that_take_grades() -> None:
    named = {getattr(roadmap.losses, name) for name in roadmap.losses.__all__}
    graded = {loss.__name__ for loss in named if isinstance(loss, type) and getattr(loss, "takes_paths", False) is True}
    assert graded == set(GRADED)


@pytest.mark.parametrize("make", [ROADMAP, SupAP, SmoothAP, Calibration, FastAP])
@pytest.mark.parametrize("labels", [paths(0, 0, 1, 2), sets("0", "1", "12", "3")], ids=["paths", "sets"])
def test_other_losses_refuse_paths_and_sets_and_say_who_takes_them(make: type[nn.Module], labels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"labels must be 1-D.*graded relevance: HierarchicalAP, HAPPIER, GradedNDCG"):
        make()(drawn(4, 3, 0), labels)


X, Y, S = drawn(4, 3, 0), paths(0, 0, 1, 2), sets("0", "1", "12", "3")
G, GY = drawn(3, 3, 1), paths(0, 1, 4)
TWICE = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no labels": ((X, None), {}, TypeError, "labels must be a torch.Tensor of integers, got NoneType"),
    "3-D": (
        (X, Y[None]),
        {},
        ValueError,
        r"or 2-D: integers for paths .*; bool for sets of labels; got shape \(1, 4, 3\)",
    ),
    "floats": (
        (X, Y.float()),
        {},
        TypeError,
        r"must hold integers \(int64\), got torch.float32; .* sets of labels: la",
    ),
    "no levels": ((X, Y[:, :0]), {}, ValueError, r"labels has no columns: its shape is \(4, 0\); each is a level"),
    "too few": ((X, Y[:3]), {}, ValueError, "labels has 3 entries but embeddings has 4 rows"),
    "bool for each": ((X, torch.ones(4, dtype=torch.bool)), {}, TypeError, "labels must hold integers"),
    "numbered under each parent": (
        (X, TWICE),
        {},
        ValueError,
        "labels are no tree: 0 in column 1 lies under 0 and under 1 of column 0; number the classes of a level over",
    ),
    "another parent in the gallery": (
        (X, Y),
        {"ref_emb": G, "ref_labels": torch.tensor([[0, 0, 0], [1, 2, 1], [0, 0, 0]])},
        ValueError,
        "labels are no tree: 1 in column 2 lies under 0 and under 2",
    ),
    "another depth": (
        (X, Y),
        {"ref_emb": G, "ref_labels": GY[:, 1:]},
        ValueError,
        "labels are paths of 3 levels but ref_labels are paths of 2 levels; both must be of one kind",
    ),
    "plain gallery": ((X, Y), {"ref_emb": G, "ref_labels": GY[:, 0]}, ValueError, "but ref_labels are plain labels"),
    "sets and paths": ((X, S), {"ref_emb": G, "ref_labels": GY}, ValueError, "labels are sets of 5 labels but ref_lab"),
    "another item": (
        (X, Y),
        {"ref_emb": G, "ref_labels": GY, "own": torch.tensor([0, 1, -1, -1])},
        ValueError,
        r"own\[1\] is 1, but the gallery item there has label \[0, 0, 1\] and the query \[0, 0, 0\]",
    ),
    "grades of another shape": (
        (X, None),
        {"grades": torch.ones(4, 3)},
        ValueError,
        r"grades must have shape \(queries, gallery\), here \(4, 4\), got \(4, 3\)",
    ),
    "grades as a list": (
        (X, None),
        {"grades": [[1]]},
        TypeError,
        "grades must be a torch.Tensor of real numbers, got list",
    ),
    "NaN for a grade": (
        (X, None),
        {"grades": torch.full((4, 4), torch.nan)},
        ValueError,
        "grades must be finite; an item",
    ),
    "grades elsewhere": (
        (X, None),
        {"grades": torch.ones(4, 4, device="meta")},
        ValueError,
        "grades is on meta but scores",
    ),
}


@pytest.mark.parametrize("make", [HierarchicalAP, GradedNDCG])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls_that_cannot_be(name: str, make: type[nn.Module]) -> None:
    args, options, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        make()(*args, **options)


BAD_ARGUMENTS: dict[str, tuple[type[nn.Module], dict[str, Any], type[Exception], str]] = {
    "relevance": (
        HierarchicalAP,
        {"relevance": "map"},
        ValueError,
        "relevance must be 'shared', 'levels' or 'nested', got",
    ),
    "alpha": (HierarchicalAP, {"alpha": -1}, ValueError, "alpha must be >= 0, got -1"),
    "sets": (GradedNDCG, {"sets": "jaccard"}, ValueError, "sets must be 'iou' or 'count', got 'jaccard'"),
    "gain": (GradedNDCG, {"gain": "exp"}, ValueError, "gain must be 'exponential' or 'linear', got 'exp'"),
    "pull": (HierarchicalAP, {"pull": 1}, TypeError, "pull must be True or False, got int 1"),
    "leak": (HierarchicalAP, {"leak": -1.0}, ValueError, "leak must be >= 0, got -1.0"),
    "tau": (GradedNDCG, {"tau": 0}, ValueError, "tau must be > 0, got 0"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_cannot_be(name: str) -> None:
    make, options, error, message = BAD_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        make(**options)


def test_functions_refuse_in_words() -> None:
    scores, grades = torch.rand(2, 3), torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"scores must have shape \(queries, gallery\), got \(3,\); use scores\[None\]"
    ):
        gradedndcg(scores[0], grades[0])
    with pytest.raises(TypeError, match="scores must be a torch.Tensor of floating point, got torch.int64"):
        gradedndcg(scores.long(), grades)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'none', got 'sum'"):
        h_ap(scores, grades, reduction="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scores must be finite"):
        h_ap(scores * torch.inf, grades)


def test_a_tree_that_lacks_some_parents_is_a_tree() -> None:
    check_tree(torch.tensor([[0, -1, 4], [0, 2, 4], [-1, 2, 4], [1, 3, 5], [1, -1, -1]]), torch.zeros(0, 3))


def test_a_class_under_two_grandparents_is_no_tree_though_its_parent_is_not_known() -> None:
    table = torch.tensor([[0, -1, 4], [1, -1, 4], [1, 3, 5]])
    with pytest.raises(ValueError, match="labels are no tree: 4 in column 2 lies under 0 and under 1 of column 0"):
        HierarchicalAP()(drawn(3, 3, 0), table)


@pytest.mark.parametrize("around", [lambda loss: Matryoshka(loss, [2, 3]), SphericalConstraint])
def test_what_goes_around_a_loss_hands_paths_on(around: Callable[[nn.Module], nn.Module]) -> None:
    x, y, plain = drawn(6, 3, 0), paths(0, 0, 1, 2, 2, 3), torch.tensor([0, 0, 1, 2, 2, 3])
    inside = around(HierarchicalAP())
    torch.testing.assert_close(Memory(inside, 8)(x, y), inside(x, y))  # an empty memory
    assert not torch.equal(inside(x, y), inside(x, plain))
    with pytest.raises(ValueError, match="labels must be 1-D"):
        around(SupAP())(x, y)
