"""Hierarchical AP against the loops, worked by hand, and beside AP."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from roadmap.kernels import graded
from roadmap.kernels.graded import PullRule
from roadmap.losses import HierarchicalAP, SupAP, average_precision, h_ap, hierarchicalap, supap
from roadmap.losses.comparison import Comparison
from roadmap.losses.relevance import Relevance, TreeRelevance

from . import graded_literal as loops
from .cases import CASES, drawn, score_table
from .graded_cases import SETS, TREES, GradedCase, check_graded, check_on_scores, graded_table, paths

BOTH = pytest.mark.parametrize("include_self", [True, False], ids=["with self", "without self"])
PULL = (2.0, 0.5, 1.0)
SOFT = {"tau": 0.1, "rho": 10.0}


def tree(case: GradedCase, include_self: bool, kind: str = "shared", alpha: float = 1.0) -> list[list[float]]:
    queries, items = (labels.tolist() for labels in case.both)
    return loops.tree_grades(queries, items, case.own, include_self, kind, alpha)


@BOTH
@pytest.mark.parametrize("case", TREES, ids=repr)
def test_hierarchical_ap_is_its_transcription(case: GradedCase, include_self: bool) -> None:
    check_graded(HierarchicalAP(include_self=include_self), loops.h_ap_loss, tree(case, include_self), case)


@pytest.mark.parametrize(("kind", "alpha"), [("levels", 1.0), ("nested", 1.0), ("shared", 2.0), ("nested", 0.5)])
@pytest.mark.parametrize("case", [TREES[0], TREES[6], TREES[9]], ids=repr)
def test_other_grades_of_a_tree(case: GradedCase, kind: str, alpha: float) -> None:
    loss = HierarchicalAP(relevance=kind, alpha=alpha)  # type: ignore[arg-type]
    check_graded(loss, loops.h_ap_loss, tree(case, True, kind, alpha), case)


@pytest.mark.parametrize("case", [TREES[0], TREES[7], TREES[9]], ids=repr)
def test_the_slope_of_h_rank(case: GradedCase) -> None:
    loss = HierarchicalAP(**SOFT, pull=True, beta=2.0, gamma=0.5, leak=1.0)
    steps = loops.Steps(**SOFT, pull=PULL)
    check_graded(loss, lambda s, g: loops.h_ap_loss(s, g, steps), tree(case, True), case)


@BOTH
@pytest.mark.parametrize("kind", ["iou", "count"])
@pytest.mark.parametrize("case", SETS, ids=repr)
def test_sets_of_labels(case: GradedCase, kind: str, include_self: bool) -> None:
    queries, items = ([set(row.nonzero()[:, 0].tolist()) for row in labels] for labels in case.both)
    expected = loops.set_grades(queries, items, case.own, include_self, kind)
    loss = HierarchicalAP(sets=kind, include_self=include_self)  # type: ignore[arg-type]
    check_graded(loss, loops.h_ap_loss, expected, case)
    if kind == "iou":  # unless told
        check_graded(HierarchicalAP(include_self=include_self), loops.h_ap_loss, expected, case)


def test_grades_pair_by_pair_need_no_labels() -> None:
    case = TREES[9]
    _, grades = graded_table(3, 4, 9)
    assert case.gallery is not None
    with_none = GradedCase("", case.vectors, None, case.gallery, None)  # type: ignore[arg-type]
    check_graded(HierarchicalAP(), loops.h_ap_loss, grades.tolist(), with_none, grades=grades)
    labelled = GradedCase("", case.vectors, paths(0, 0, 0, 0), case.gallery, paths(*[1] * 9))
    check_graded(HierarchicalAP(), loops.h_ap_loss, grades.tolist(), labelled, grades=grades.long())


@BOTH
def test_a_query_is_no_negative_of_its_own(include_self: bool) -> None:
    x, (_, grades) = drawn(5, 3, 1), graded_table(4, 5, 5)
    grades.fill_diagonal_(0)
    expected = grades.clone().fill_diagonal_(-1)
    case = GradedCase("", x, torch.arange(5))
    loss = HierarchicalAP(include_self=include_self)
    check_graded(loss, loops.h_ap_loss, expected.tolist(), case, grades=grades)
    grades.fill_diagonal_(2)
    expected = grades if include_self else expected
    check_graded(loss, loops.h_ap_loss, expected.tolist(), case, grades=grades)


@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize("seed", range(3))
def test_functions_of_scores_and_grades(seed: int, ties: bool) -> None:
    scores, grades = graded_table(seed, ties=ties)
    check_on_scores(hierarchicalap, loops.h_ap_loss, (scores, grades))
    pulled = partial(hierarchicalap, pull=PullRule(*PULL), **SOFT)
    check_on_scores(pulled, lambda s, g: loops.h_ap_loss(s, g, loops.Steps(**SOFT, pull=PULL)), (scores, grades))
    exact = 1 - loops.h_ap_loss(scores.tolist(), grades.tolist(), loops.Steps(exact=True))[0]
    assert h_ap(scores, grades).item() == pytest.approx(exact, abs=1e-12)
    assert h_ap(scores.half(), grades.half()).dtype == torch.float64


def test_h_ap_worked_by_hand() -> None:
    """Grades 1, 0, 1/2, 1 from the top: H-ranks 1, 3/2, 5/2 at ranks 1, 3, 4, over a sum of 5/2."""
    scores, grades = torch.tensor([[0.9, 0.8, 0.7, 0.6]]), torch.tensor([[1.0, 0.0, 0.5, 1.0]])
    expected = (1 + (0.5 + 0.5) / 3 + (1 + 1 + 0.5) / 4) / 2.5
    assert h_ap(scores, grades).item() == pytest.approx(expected)
    # a smaller mistake costs less: the near miss above the positive, or the stranger
    near, far = torch.tensor([[0.5, 1.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.5]])
    assert h_ap(scores[:, :3], near) > h_ap(scores[:, :3], far)


def test_h_ap_of_each_query() -> None:
    scores, grades = graded_table(0)
    each = h_ap(scores, grades, reduction="none")
    assert math.isnan(each[0])
    assert each[1:].mean().item() == pytest.approx(h_ap(scores, grades).item())
    assert math.isnan(h_ap(scores[:1], grades[:1]))
    assert not h_ap(scores.requires_grad_(), grades).requires_grad


def test_the_best_order_is_by_grade() -> None:
    grades = torch.tensor([[3.0, 2.0, 2.0, 1.0, 0.0, -1.0]])
    assert h_ap(torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 1.0]]), grades).item() == 1


graded_rows = st.integers(0, 10_000).map(lambda seed: graded_table(seed, 3, 7, ties=seed % 2 == 1))


@given(graded_rows, st.booleans())
def test_the_loss_is_an_upper_bound(table: tuple[torch.Tensor, torch.Tensor], pulled: bool) -> None:
    scores, grades = table
    pull = PullRule(25.0, 0.5, 10.0) if pulled else None
    for i in range(1, 3):
        if (grades[i] > 0).any():
            row = scores[i : i + 1], grades[i : i + 1]
            assert hierarchicalap(*row, pull=pull).item() >= 1 - h_ap(*row).item() - 1e-12


@given(st.integers(0, 10_000), st.booleans())
def test_grades_of_zero_and_one_are_ap(seed: int, ties: bool) -> None:
    scores, positives, negatives = score_table(seed, 3, 8, ties)
    grades = torch.where(positives, 1.0, torch.where(negatives, 0.0, -1.0)).double()
    if positives.any():
        expected = average_precision(scores, positives, negatives).item()
        assert h_ap(scores, grades).item() == pytest.approx(expected, abs=1e-14)
    leaf, other = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    found, expected = hierarchicalap(leaf, 0.3 * grades, pull=PullRule(*PULL)), supap(other, positives, negatives)
    found.backward(), expected.backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-13)


@BOTH
@pytest.mark.parametrize("kind", ["shared", "levels", "nested"])
def test_a_tree_of_one_level_is_supap(kind: str, include_self: bool) -> None:
    for case in CASES:
        labels, items = (None if some is None else torch.tensor(some) for some in (case.labels, case.gallery_labels))
        results = []
        for column in (False, True):
            x = case.vectors.clone().requires_grad_()
            given_labels = [some[:, None] if column and some is not None else some for some in (labels, items)]
            loss = HierarchicalAP(kind, include_self=include_self) if column else SupAP(include_self=include_self)  # type: ignore[arg-type]
            value = loss(x, given_labels[0], ref_emb=case.gallery, ref_labels=given_labels[1])
            value.backward()
            results.append((value.detach(), x.grad))
        torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12, msg=case.name)
        plain = HierarchicalAP(include_self=include_self)(case.vectors, labels, ref_emb=case.gallery, ref_labels=items)
        assert plain.item() == pytest.approx(results[0][0].item(), abs=1e-15)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_nested_grades_give_the_mean_of_the_aps_of_all_levels(alpha: float) -> None:
    for case in (TREES[0], TREES[9]):
        c = Comparison.of(case.vectors, case.labels, None, case.gallery, case.gallery_labels, graded=True)
        grades = c.grades(Relevance(TreeRelevance("nested", alpha)), include_self=True)
        found = h_ap(c.scores, grades, reduction="none")
        total, weights = torch.zeros(len(found), dtype=torch.float64), 0.0
        queries, items = (labels.tolist() for labels in case.both)
        for level in (1, 2, 3):
            relevant = torch.tensor([[loops.shared_levels(q, i) >= level for i in items] for q in queries])
            weight = level**alpha - (level - 1) ** alpha
            # a level at which a query has nobody adds nothing: it has no items that could be found
            total += weight * average_precision(c.scores, relevant, reduction="none").nan_to_num(0)
            weights = weights + weight * relevant.any(1).double()
        counted = ~found.isnan()
        torch.testing.assert_close(found[counted], (total / weights)[counted], rtol=0, atol=1e-12)


def test_h_ap_does_not_see_the_scale_of_the_grades() -> None:
    scores, grades = graded_table(5)
    assert h_ap(scores, grades).item() == pytest.approx(h_ap(scores, 7.5 * grades).item(), abs=1e-14)


@pytest.mark.parametrize("seed", range(2))
def test_gradcheck(seed: int) -> None:
    scores, grades = graded_table(seed)
    leaf = scores.requires_grad_()
    assert gradcheck(lambda s: hierarchicalap(s, grades, **SOFT), leaf)
    assert gradcheck(lambda s: hierarchicalap(s, grades, pull=PullRule(*PULL), **SOFT), leaf)


def test_gradcheck_through_the_embeddings() -> None:
    case = TREES[9]
    assert case.gallery is not None
    assert gradcheck(
        lambda x, g: HierarchicalAP(**SOFT)(x, case.labels, ref_emb=g, ref_labels=case.gallery_labels),
        (case.vectors.clone().requires_grad_(), case.gallery.clone().requires_grad_()),
    )


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, grades = graded_table(6, 7, 11)
    rule = graded.GradedRule("h_ap", SupAP().rule.ranks, PullRule(*PULL))
    expected = graded.values_and_slope(scores, grades, rule, True)
    for elements, pairs in ((1, 1), (25, 30), (11, 1000)):
        monkeypatch.setattr(graded, "CPU_BLOCK", elements)
        monkeypatch.setattr(graded, "PAIRS_AT_ONCE", pairs)
        torch.testing.assert_close(graded.values_and_slope(scores, grades, rule, True), expected, rtol=0, atol=1e-14)


def test_what_is_held_at_once_is_bounded() -> None:
    """Half of 300 x 300 pairs are positive: a row for each would be 13.5 million numbers, 108 MB of float64."""
    largest = 0

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                largest = max(largest, found.numel())
            return found

    scores = torch.rand(300, 300, dtype=torch.float64)
    grades = torch.randint(0, 2, (300, 300)).double()
    with Watched():
        graded.values_and_slope(scores, grades, graded.GradedRule("h_ap", SupAP().rule.ranks), True)
    assert 90_000 <= largest <= graded.CPU_BLOCK


def test_mined_pairs_choose_who_is_ranked() -> None:
    x, labels = drawn(5, 3, 3), paths(0, 0, 1, 2, 4)
    pairs = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]), torch.tensor([4, 4, 0])
    c = Comparison.of(x, labels, pairs, graded=True)
    found = c.grades(Relevance(TreeRelevance("levels")), include_self=False)
    expected = torch.full((5, 5), -1.0, dtype=torch.float64)
    expected[0, 1], expected[0, 2], expected[1, 3], expected[0, 4], expected[1, 4] = 3, 2, 1, 0, 0
    assert found.tolist() == expected.tolist()
    value = HierarchicalAP("levels", include_self=False)(x, labels, pairs)
    assert value.item() == pytest.approx(loops.h_ap_loss(c.scores.tolist(), expected.tolist())[0], abs=1e-12)
    itself = c.grades(Relevance(TreeRelevance("levels")), include_self=True)
    assert itself.diagonal().tolist() == [3.0] * 5


def test_float32_stays_near_float64() -> None:
    x, labels = torch.randn(48, 16, dtype=torch.float64), paths(*[i % 6 for i in range(48)])
    loss = HierarchicalAP()
    assert loss(x.float(), labels).item() == pytest.approx(loss(x, labels).item(), abs=2e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_the_compiler_follow() -> None:
    scores, grades = graded_table(7)
    leaf = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(hierarchicalap(leaf, grades), leaf)
    assert torch.equal(torch.func.grad(lambda s: hierarchicalap(s, grades))(scores), expected)
    both = torch.vmap(lambda s: hierarchicalap(s, grades))(torch.stack([scores, -scores]))
    assert both[0].item() == hierarchicalap(scores, grades).item()
    torch.compiler.reset()
    called = torch.compile(lambda s: hierarchicalap(s, grades), backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(called(leaf), leaf)
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad(hierarchicalap(leaf, grades), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="have no second derivative"):
        slope.sum().backward()


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_and_to_the_bit_each_time() -> None:
    x, labels = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), paths(*[i % 6 for i in range(64)])
    found = []
    for _ in range(3):
        leaf = x.cuda().requires_grad_()
        value = HierarchicalAP()(leaf, labels.cuda())
        value.backward()
        found.append((value.detach().cpu(), leaf.grad.cpu()))
    here = x.double().requires_grad_()
    expected = HierarchicalAP()(here, labels)
    expected.backward()
    torch.testing.assert_close(found[0][0].double(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1].double(), here.grad, rtol=1e-2, atol=1e-4)
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))
